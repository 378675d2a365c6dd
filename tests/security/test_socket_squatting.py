"""A process that binds libkineto's daemon socket in a network namespace before the daemon does: trainers there take
configurations from it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rankscope.daemon.captures.kineto import sockets
from rankscope.daemon.captures.kineto.enter_namespace import bind_at
from rankscope.daemon.captures.kineto.sockets import bind_file
from tests.integration.daemon_process import MAIN, serving
from tests.integration.kineto_peers import peer
from tests.security.forged_ranks import EMPTY, NOBODY, captured, forged_rank, job_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to enter another network namespace needs root")

# Whatever else runs on this machine.
RUN = f"squatted-{os.getpid()}"


def kineto_findings(*flags: str) -> list[dict[str, str]]:
    done = subprocess.run([*MAIN, "doctor", "--json", *flags], capture_output=True, text=True)
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    return [finding for finding in findings if finding["check"] == "kineto" and RUN in finding["text"]]


def test_capture_and_doctor_name_a_squatter_and_the_probe_records(tmp_path: Path) -> None:
    with peer() as squatter:
        assert squatter.do(do="squat") == "squatted"
        enter = ("nsenter", "--target", str(squatter.pid), "--net")
        rank = forged_rank(RUN, len(EMPTY), EMPTY, uid=NOBODY, enter=enter, KINETO_USE_DAEMON="1")
        with rank, serving(tmp_path, "daemon", "--stack-rate-hertz", "0", "--gpu", "false") as daemon:
            job = job_of(daemon, RUN)
            daemon.wait_for_words(f"it belongs to pid {squatter.pid} (python")
            (entry,) = captured(daemon, job).ranks
            (finding,) = kineto_findings("--socket", daemon.grpc_target.removeprefix("unix:"))
    assert any(note.startswith("not by probe") and "the trace is empty" in note for note in entry.notes), entry
    (note,) = (note for note in entry.notes if note.startswith("not by kineto"))
    for text in (note, finding["text"]):
        assert f"belongs to pid {squatter.pid} (python" in text and "uid 0)" in text, text
        assert "trainers there take configurations from it" in text, text
    assert "stop it" in note and "RANKSCOPE_PROBE=1" in note
    assert finding["level"] == "warning" and "stop it" in finding["next_step"]


def test_the_doctor_accepts_the_daemons_own_socket(tmp_path: Path) -> None:
    """The holder stands in for the daemon, whose pid is in its lock: a real one may find another that was first."""
    with peer() as daemon:
        assert daemon.do(do="squat") == "squatted"
        enter = ("nsenter", "--target", str(daemon.pid), "--net")
        with forged_rank(RUN, len(EMPTY), EMPTY, enter=enter, KINETO_USE_DAEMON="1"):
            wait_until(lambda: kineto_findings("--socket", str(tmp_path / "other.sock")), lambda: "no finding")
            (tmp_path / "daemon.sock.lock").write_text(f"{daemon.pid}\n")
            assert kineto_findings("--socket", str(tmp_path / "daemon.sock")) == []


@pytest.mark.parametrize("replace", [Path.symlink_to, Path.hardlink_to])
def test_a_link_replacing_the_file_socket_opens_nothing_to_others(
    monkeypatch: pytest.MonkeyPatch, replace: Callable[[Path, Path], None]
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, bind_file(f"{folder}/theirs") as private:
        other = Path(folder, "theirs", "dynolog")
        other.chmod(0o600)

        def bind_and_swap(name: str) -> socket.socket:
            endpoint = bind_at(name)
            Path(name).unlink()
            replace(Path(name), other)
            return endpoint

        monkeypatch.setattr(sockets, "bind_at", bind_and_swap)
        bind_file(f"{folder}/shared").close()
        assert other.stat().st_mode & 0o777 == 0o600
        assert private.fileno() >= 0


def test_everybody_may_send_to_the_file_socket() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, bind_file(folder):
        assert Path(folder, "dynolog").stat().st_mode & 0o777 == 0o666
