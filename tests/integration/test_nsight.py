"""`rankscope capture --nsight` with real processes and a stand-in for nsys that behaves as nsys 2025.3 does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.daemon import procfs
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import ListRanksRequest, ListRanksResponse
from rankscope.v1.rank_service_pb2_grpc import RankServiceServicer, add_RankServiceServicer_to_server
from rankscope.v1.window_pb2 import RankWindow, StepStatistics
from tests.support.waiting import wait_until

# `start` with an unknown session begins another one, and succeeds.
NSYS = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> calls
case "$1" in
sessions) cat sessions ;;
start) echo "${3#--output=}" > output; [ ! -e broken ] || { echo "no \033[31mroom"; exit 1; } ;;
stop) [ -e lazy ] || echo report > "$(cat output).nsys-rep" ;;
esac
"""
HEADER = "              ID         TIME                                      STATE LAUNCH NAME\n"


class Ranks(RankServiceServicer):
    def __init__(self) -> None:
        self.ranks: list[ListRanksResponse.Rank] = []

    def ListRanks(self, request: ListRanksRequest, context: grpc.ServicerContext) -> ListRanksResponse:
        return ListRanksResponse(node="here", ranks=self.ranks)


class Machine:
    """Ranks, their daemon, and an nsys in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = Ranks()
        self.jobs: list[subprocess.Popen[bytes]] = []
        self.server = grpc.server(ThreadPoolExecutor(2))
        add_RankServiceServicer_to_server(self.service, self.server)
        self.server.add_insecure_port(f"unix:{folder}/d.sock")
        self.server.start()
        nsys = folder / "nsys"
        nsys.write_text(NSYS)
        nsys.chmod(0o755)

    def start(self, *environments: dict[str, str], step_seconds: float = 0.02) -> None:
        for rank, environment in enumerate(environments):
            command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
            job = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self.jobs.append(job)
            assert job.stdout is not None and job.stdout.readline()
            ticks = procfs.read_stat(f"/proc/{job.pid}").start_ticks
            identity = RankIdentity(job="bert", rank=rank, world_size=2, pid=job.pid, incarnation=ticks)
            latest = RankWindow(step_seconds=StepStatistics(p50=step_seconds))
            self.service.ranks.append(ListRanksResponse.Rank(identity=identity, latest=latest))

    def list_sessions(self, *rows: tuple[int, str]) -> None:
        lines = [f"{number:>16}        00:11 {state:>42}      1 train\n" for number, state in rows]
        (self.folder / "sessions").write_text(HEADER + "".join(lines))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def capture(self, *words: str) -> int:
        return main(["capture", "--nsight", "--connect", f"unix:{self.folder}/d.sock", *words])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)  # where reports go
    yield made
    for job in made.jobs:
        job.kill()
        job.communicate()
    made.server.stop(0).wait(5)


def under(session: str) -> dict[str, str]:
    return {"NSYS_PROFILING_SESSION_ID": session}


def test_a_session_is_started_stopped_and_reported(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(under("11530"), under("11530"))
    machine.list_sessions((400, "Launched"), (11530, "Launched"))
    output = tmp_path / "reports"
    assert machine.capture("--steps", "3", "--output", str(output), "--json") == Exit.OK
    told = json.loads(capsys.readouterr().out)
    (report,) = output.iterdir()
    assert told["nsight"] == [{"session": "11530", "ranks": [0, 1], "report": str(report)}]
    assert (told["run"], told["seconds"]) == ("bert", pytest.approx(0.06))
    listed, start, stop = machine.calls
    assert listed == "sessions list"
    assert start == f"start --session=11530 --output={str(report).removesuffix('.nsys-rep')}"
    assert stop == "stop --session=11530"


def test_ctrl_c_stops_the_recording(machine: Machine, tmp_path: Path) -> None:
    machine.start(under("11530"))
    machine.list_sessions((11530, "Launched"))
    words = ["capture", "--nsight", "--connect", f"unix:{tmp_path}/d.sock", "--seconds", "60"]
    command = subprocess.Popen([sys.executable, "-m", "rankscope.cli.main", *words], stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None and "recording rank 0" in command.stderr.readline()
    command.send_signal(signal.SIGINT)
    command.communicate()
    assert command.returncode == Exit.INTERRUPTED
    assert machine.calls[-1] == "stop --session=11530"


NOT_UNDER = "rank 0 (pid {pid}) was not started under nsys, which cannot attach to a running process"


@pytest.mark.parametrize("environment", [{}, under(""), under("--kill=all"), under("1; reboot"), under("9" * 5000)])
def test_a_job_outside_of_nsys_is_refused(
    environment: dict[str, str], machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(environment)
    assert machine.capture("--seconds", "1") == Exit.REFUSED
    told = capsys.readouterr().err
    assert NOT_UNDER.format(pid=machine.jobs[0].pid) in told
    assert "`nsys launch --session-new=train torchrun …`" in told and "capture without --nsight" in told
    assert machine.calls == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(7, "Launched")], "nsys session 11530 of rank 0 is not known to"),
        ([(11530, "Collection")], "is in the state 'Collection', not 'Launched'"),
        ([], "it has ended, or another nsys has launched the job"),
    ],
)
def test_only_an_idle_session_is_started(
    rows: Sequence[tuple[int, str]], told: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(under("11530"))
    machine.list_sessions(*rows)
    assert machine.capture("--seconds", "1") == Exit.REFUSED
    assert told in capsys.readouterr().err
    assert machine.calls == ["sessions list"]


def test_a_missing_nsys_is_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(under("11530"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.capture("--seconds", "1") == Exit.USAGE
    assert "nsys is not installed here; put it into PATH, or capture without --nsight" in capsys.readouterr().err


def test_a_failing_nsys_is_quoted_and_stopped(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.start(under("11530"))
    machine.list_sessions((11530, "Launched"))
    (machine.folder / "broken").touch()
    assert machine.capture("--seconds", "1") == Exit.FAILED
    told = capsys.readouterr().err
    assert "`nsys start --session=11530" in told and "no \ufffd[31mroom" in told
    assert machine.calls[-1] == "stop --session=11530"


def test_a_report_that_is_missing_is_an_error(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(under("11530"))
    machine.list_sessions((11530, "Launched"))
    (machine.folder / "lazy").touch()
    assert machine.capture("--seconds", "0.1", "--output", str(tmp_path / "reports")) == Exit.FAILED
    assert "nsys wrote no report" in capsys.readouterr().err


def test_a_process_that_took_the_ranks_pid_is_not_read(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.start(under("11530"))
    machine.service.ranks[0].identity.incarnation += 1
    assert machine.capture("--seconds", "1") == Exit.REFUSED
    assert "has ended; ask again" in capsys.readouterr().err


def test_a_rank_in_a_container_is_not_touched(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Another namespace stands for it: its nsys, and the files that it shares with nsys, are not the caller's."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", "import sys; sys.stdin.read()"]
    job = subprocess.Popen(command, env=under("11530") | {"PATH": os.environ["PATH"]}, stdin=subprocess.PIPE)
    machine.jobs.append(job)
    process = f"/proc/{job.pid}"
    here = procfs.namespace_inode("/proc/self", "mnt")
    wait_until(lambda: procfs.namespace_inode(process, "mnt") not in (0, here), lambda: process)
    ticks = procfs.read_stat(process).start_ticks
    identity = RankIdentity(job="bert", rank=0, world_size=1, pid=job.pid, incarnation=ticks)
    machine.service.ranks.append(ListRanksResponse.Rank(identity=identity))
    assert machine.capture("--seconds", "1") == Exit.REFUSED
    assert "runs in a container, and nsys must run there" in capsys.readouterr().err
    assert machine.calls == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "3", "--shapes"], "leave out all options but"),
        (["--steps", "3", "--repeat", "2"], "leave out all options but"),
        (["--steps", "3", "--patience", "0"], "leave out all options but"),
        (["--seconds", "1e9"], "a capture takes 0.05 to 60"),
        (["--steps", "3", "--ranks", "5"], "rank 5 of 'bert' not seen on this machine"),
        (["--steps", "3", "--run", "other"], "no run 'other' is seen now"),
        (["--steps", "3", "--connect", "127.0.0.1:1", "--plaintext"], "is a network address; run it there"),
    ],
)
def test_a_wrong_request_reaches_no_nsys(
    words: Sequence[str], told: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.start(under("11530"))
    assert machine.capture(*words) in (Exit.USAGE, Exit.NOT_FOUND)
    assert told in capsys.readouterr().err
    assert machine.calls == []


def test_steps_need_a_known_step_time(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.start(under("11530"), step_seconds=0.0)
    assert machine.capture("--steps", "3") == Exit.REFUSED
    assert "say --seconds S" in capsys.readouterr().err
