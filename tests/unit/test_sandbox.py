from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools import sandbox

# The kernel lets only root make pid and network namespaces. The last test shows what the sandbox does for other users.
in_namespaces = pytest.mark.skipif(not sandbox.is_possible(), reason="pid and network namespaces need root")


SANDBOX = [sys.executable, "-m", "tools.sandbox", "sh", "-c"]
ROOT = Path(__file__).parents[2]


def inside(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, **environment}
    return subprocess.run([*SANDBOX, script], cwd=ROOT, env=known, capture_output=True, text=True, timeout=180)


@in_namespaces
def test_a_command_sees_no_process_but_its_own() -> None:
    done = inside("ls -d /proc/[0-9]* | wc -l; ls /run | wc -l")
    processes, in_run, *_ = map(int, done.stdout.split()[:2])
    assert processes <= 5 and in_run == 0, done


@in_namespaces
def test_a_port_that_is_taken_outside_is_free_inside() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = inside(f"{sys.executable} -c \"import socket; socket.create_server(('127.0.0.1', {port}))\"")
    assert done.returncode == 0, done


@in_namespaces
def test_what_is_left_behind_is_named_and_ended() -> None:
    done = inside("sleep 987654 & touch $TMPDIR/left; echo $TMPDIR; mount -t tmpfs none /mnt; exit 3")
    assert done.returncode == 3, done
    assert "sleep 987654" in done.stdout and "temporary files: left" in done.stdout and "mounts: /mnt" in done.stdout
    assert not Path(done.stdout.split()[0]).exists()
    listed = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert "sleep 987654" not in listed.splitlines()


@in_namespaces
def test_a_command_that_is_killed_has_failed() -> None:
    assert inside("kill -KILL $$").returncode == 128 + 9


@in_namespaces
def test_a_killed_runs_folder_is_removed_by_the_next_run(tmp_path: Path) -> None:
    known = {**os.environ, "TMPDIR": str(tmp_path)}
    script = "echo begun; sleep 987655"
    with subprocess.Popen([*SANDBOX, script], cwd=ROOT, env=known, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"begun\n"
        (folder,) = tmp_path.iterdir()
        (tmp_path / "rs-of-another-user").mkdir()
        make_old(folder)
        assert inside("true", TMPDIR=str(tmp_path)).returncode == 0
        assert folder.exists(), "its run goes on"
        running.kill()
    make_old(folder)
    assert inside("true", TMPDIR=str(tmp_path)).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rs-of-another-user"]


def make_old(folder: Path) -> None:
    os.utime(folder / ".rankscope-sandbox", (0, 0))


def test_without_namespaces_a_command_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sandbox, "is_possible", lambda: False)
    assert sandbox.run(["sh", "-c", "echo as it is; exit 3"]) == 3
    assert capfd.readouterr().out == "as it is\n"
