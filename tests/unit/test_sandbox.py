from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import sandbox

pytestmark = pytest.mark.skipif(not sandbox.is_possible(), reason="namespaces need root: run as root")


def inside(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.sandbox", "sh", "-c", script]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=180)


def test_a_command_sees_no_process_but_its_own() -> None:
    done = inside("ls -d /proc/[0-9]* | wc -l; ls /run | wc -l")
    processes, in_run, *_ = map(int, done.stdout.split()[:2])
    assert processes <= 5 and in_run == 0, done


def test_a_port_that_is_taken_outside_is_free_inside() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = inside(f"{sys.executable} -c \"import socket; socket.create_server(('127.0.0.1', {port}))\"")
    assert done.returncode == 0, done


def test_what_is_left_behind_is_named_and_ended() -> None:
    done = inside("sleep 987654 & touch $TMPDIR/left; echo $TMPDIR; mount -t tmpfs none /mnt; exit 3")
    assert done.returncode == 3, done
    assert "sleep 987654" in done.stdout and "temporary files: left" in done.stdout and "mounts: /mnt" in done.stdout
    assert not Path(done.stdout.split()[0]).exists()
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert "sleep 987654" not in listed.splitlines()


def test_a_command_that_is_killed_has_failed() -> None:
    assert inside("kill -KILL $$").returncode == 128 + 9
