"""`python -m tools.sandbox COMMAND …`: runs a command apart from whatever else runs on this machine.

The command sees no process but its own, has a loopback interface to itself, an empty /run and a temporary folder.
What it leaves running ends with it. What it left is named at the end: it is a mistake in a test that somebody should
look at, and no reason to fail.

Needs root and its capabilities (a container has few). Without them the command runs as it is: a daemon of another user
than root sees only processes of that user anyway."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ENDING_SECONDS = 3.0  # processes that were signalled by a test which did not wait for them
_PREFIX = "rs-"  # of temporary folders: short, for the paths of sockets in them
_MARK = ".rankscope-sandbox"  # in the folder: nothing else is removed, whatever its name
_PLACE = "RANKSCOPE_SANDBOX"  # in the environment of the first process inside
_ENTER = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child")
_ENTER += ("--mount-proc",)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LAST_PID = "20000"  # small ones belong to the machine elsewhere, and tests make them up


@functools.cache
def is_possible() -> bool:
    try:
        return os.geteuid() == 0 and subprocess.run([*_ENTER, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def run(command: Sequence[str], output: int | None = None) -> int:
    """The exit status of the command. Standard error goes where its output goes."""
    if not is_possible():
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT if output else None).returncode
    _remove_folders_of_killed_runs()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder, _marked(Path(folder)):
        Path(folder).chmod(0o1777)  # as /tmp: tests have processes of other users
        environment = {**os.environ, "TMPDIR": folder, _PLACE: folder}
        return subprocess.run(
            [*_ENTER, sys.executable, "-m", "tools.sandbox", *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        ).returncode


@contextlib.contextmanager
def _marked(folder: Path, flags: int = os.O_CREAT | os.O_EXCL) -> Iterator[None]:
    """Locks the mark of the folder for as long as this process lives, in whatever pid namespace. Raises OSError if
    another process has the lock, or, without `flags`, if there is no mark."""
    opened = os.open(folder / _MARK, os.O_RDONLY | os.O_NOFOLLOW | flags, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def _remove_folders_of_killed_runs() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not of a sandbox, or of one that runs
            mark = (folder / _MARK).lstat()
            is_old = time.time() - mark.st_mtime > ENDING_SECONDS  # not between its creation and its lock
            if is_old and mark.st_uid == os.geteuid():
                with _marked(folder, flags=0):
                    shutil.rmtree(folder, ignore_errors=True)


def _run_inside(command: Sequence[str], folder: Path) -> int:
    """As the first process of the namespace, which inherits the processes that lose their parent."""
    _raise_loopback()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run"], check=True)
    with contextlib.suppress(OSError):  # a kernel without it
        Path("/proc/sys/kernel/ns_last_pid").write_text(_LAST_PID)
    mounts = _mounts()
    started = subprocess.Popen(command)
    while True:
        try:
            pid, status = os.wait()
        except KeyboardInterrupt:
            continue  # the command has it too, and ends
        if pid == started.pid:
            break
    _reap_those_that_end()
    left = {
        "processes": [_words(path) for path in _processes()],
        "mounts": sorted(_mounts() - mounts),
        "temporary files": sorted(
            path.name for path in folder.iterdir() if not path.name.startswith(("pytest-of-", _MARK))
        ),
    }
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU time", flush=True)
    for kind, names in left.items():
        if names:
            print(f"left behind: {kind}: {', '.join(names)}", flush=True)
    started.returncode = os.waitstatus_to_exitcode(status)
    return started.returncode if started.returncode >= 0 else 128 - started.returncode


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _reap_those_that_end() -> None:
    give_up_at = time.monotonic() + ENDING_SECONDS
    while _processes() and time.monotonic() < give_up_at:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _processes() -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdecimal() and path.name != "1"]


def _words(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ")[:200]
        return f"{process.name}: {words.decode(errors='replace')}"
    except OSError:
        return process.name


def _mounts() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


if __name__ == "__main__":
    place = os.environ.pop(_PLACE, None)
    sys.exit(_run_inside(sys.argv[1:], Path(place)) if place else run(sys.argv[1:]))
