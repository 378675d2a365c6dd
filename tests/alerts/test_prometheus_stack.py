"""`rankscope up --prometheus` as a process: what it starts ends with it, and what it cannot start it explains."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, serving
from tests.listening_sockets import listening
from tests.support.processes import children, is_gone
from tests.support.waiting import wait_until
from tools.prometheus_binaries import binary


@pytest.fixture(autouse=True)
def _programs() -> None:
    binary("alertmanager")  # gets all of them if need be


def started(up: Serving) -> dict[int, str]:
    """What it runs by pid: the name under which it announced the port that the process listens on. The name of its
    file is the package's (Debian's Alertmanager is `prometheus-alertmanager`)."""
    names = {urlsplit(address(up, name)).port: name for name in ("prometheus", "alertmanager")}
    return {pid: names[port] for pid in children(up.process.pid) for _, port in listening(pid) if port in names}


def address(up: Serving, name: str) -> str:
    found = re.search(rf"\b{name} (http://[^\s,]+)", up.log)
    assert found is not None, up.log
    return found[1]


def test_both_programs_die_with_up_and_alerts_need_a_token(tmp_path: Path) -> None:
    with serving(tmp_path, "up", "--prometheus") as up:
        programs = started(up)
        assert sorted(programs.values()) == ["alertmanager", "prometheus"]
        for name, path in (("prometheus", "/-/ready"), ("alertmanager", "/-/ready")):
            with urllib.request.urlopen(address(up, name) + path, timeout=PATIENCE_SECONDS) as answer:
                assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address(up, "alerts"), data=b"{}", timeout=PATIENCE_SECONDS)
        os.kill(up.process.pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, programs)), lambda: f"{programs} live on")


def test_it_ends_in_order_and_leaves_no_folder_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with serving(tmp_path, "up", "--prometheus", environment={"TMPDIR": str(temporary)}) as up:
        assert [path for path in temporary.iterdir() if path.name.startswith("rankscope-prometheus-")]
        programs = started(up)
        assert len(programs) == 2
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(PATIENCE_SECONDS) == 0
        assert "Traceback" not in up.log
    assert all(map(is_gone, programs))
    assert not [path for path in temporary.iterdir() if path.name.startswith("rankscope-")]


def test_a_port_that_is_taken_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [
            "--metrics-listen",
            "127.0.0.1:0",
            "--socket",
            str(tmp_path / "d.sock"),
            "--capture-dir",
            str(tmp_path / "c"),
            "--profile-dir",
            str(tmp_path / "p"),
        ]
        command = [*MAIN, "up", *flags, "--prometheus", "--prometheus-listen", where]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert refused.returncode == 1
    assert f"prometheus did not start on {where}; pass another --prometheus-listen" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "d.sock").exists()
