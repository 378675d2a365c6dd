"""py-spy as a bounded child process that never stops its target, the reasons for its failures, and the private folder
that it writes to."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.common.text import one_line
from rankscope.daemon import procfs
from rankscope.daemon.samples import Problem, RankProcess

OUTPUT_LIMIT_BYTES: Final = 16 * 1024 * 1024
LOG_LIMIT_BYTES: Final = 64 * 1024
FOLDER_PREFIX: Final = "rankscope-stacks-"

_CHILD_LIMITS: Final = (
    (resource.RLIMIT_FSIZE, OUTPUT_LIMIT_BYTES),
    (resource.RLIMIT_AS, 4 * 1024 * 1024 * 1024),
    (resource.RLIMIT_CPU, 20),  # seconds; also ends a child whose daemon was killed
    (resource.RLIMIT_CORE, 0),
)


def engine_threads(process_folder: str) -> frozenset[int]:
    """Threads on which autograd runs the backward of a device. torch names them; py-spy does not see these names."""
    return procfs.thread_ids(process_folder, b"pt_autograd_")


def find_py_spy() -> Path | None:
    beside = Path(sys.executable).parent / "py-spy"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("py-spy")
    return Path(found) if found else None


def record_command(py_spy: Path, pid: int, seconds: int, rate_hz: int, output: Path) -> list[str]:
    options = ["--duration", str(seconds), "--rate", str(rate_hz), "--format", "raw", "--output", str(output)]
    return [*_command(py_spy, "record", pid), *options, "--threads", "--idle", "--full-filenames"]


def dump_command(py_spy: Path, pid: int) -> list[str]:
    return [*_command(py_spy, "dump", pid), "--json"]


def _command(py_spy: Path, verb: str, pid: int) -> list[str]:
    # Without --nonblocking py-spy ptrace-stops every thread for every sample: 1.5 s of training became 24 s.
    return [str(py_spy), verb, "--nonblocking", "--pid", str(pid)]


@dataclass(frozen=True)
class Ended:
    """How a child ended. `status` is the exit status, or minus the signal that killed it."""

    status: int
    cpu_seconds: float


class Child:
    """A running py-spy. `poll` reaps it and returns the CPU time it took."""

    def __init__(self, command: Sequence[str], log: Path, stdout: Path | None = None) -> None:
        """Its standard error goes to `log`, and so does its standard output unless `stdout` is given."""
        if "--nonblocking" not in command:
            raise ValueError(f"refused: py-spy without --nonblocking stops the training process: {command}")
        with log.open("wb") as errors, (stdout or Path(os.devnull)).open("wb") as output:
            self._process = subprocess.Popen(
                [*_DIE_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=output if stdout else errors,
                stderr=errors,
                cwd="/",
            )
        self.pid = self._process.pid
        self._cpu_seconds = 0.0
        for limit, value in _CHILD_LIMITS:
            try:
                resource.prlimit(self.pid, limit, (value, value))
            except (ProcessLookupError, PermissionError):
                break  # ended already, or a py-spy that carries capabilities of its own

    @property
    def cpu_seconds(self) -> float:
        """Used so far."""
        with suppress(OSError):
            # The CPU clock of another process, as clock_getcpuclockid(3) computes it on Linux.
            self._cpu_seconds = max(self._cpu_seconds, time.clock_gettime((~self.pid << 3) | 2))
        return self._cpu_seconds

    def poll(self) -> Ended | None:
        """None while it runs. Do not call it again once the child has ended."""
        return self._wait(os.WNOHANG)

    def kill(self) -> Ended:
        # Not Popen.send_signal, which may reap the child and lose its CPU time. The pid is ours until we reap it.
        os.kill(self.pid, signal.SIGKILL)
        ended = self._wait(0)
        assert ended is not None
        return ended

    def _wait(self, options: int) -> Ended | None:
        pid, wait_status, usage = os.wait4(self.pid, options)
        if pid == 0:
            return None
        status = os.waitstatus_to_exitcode(wait_status)
        self._process.returncode = status  # so that Popen does not wait for it
        return Ended(status, max(self._cpu_seconds, usage.ru_utime + usage.ru_stime))


def _die_with_parent() -> tuple[str, ...]:
    # A program, not a preexec_fn: that would run Python in a fork of a process with gRPC threads.
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


_DIE_WITH_PARENT: Final = _die_with_parent()


def explain_failure(rank: RankProcess, ended: Ended | None, log: str, is_alive: bool) -> Problem:
    """`ended` is None for a child that was killed for taking too long."""
    if not is_alive:
        return Problem("stacks", "died", f"{rank}: the process ended while py-spy was reading it")
    if ended is None:
        text = f"{rank}: py-spy took too long and was killed; it is tried again later (is the machine overloaded?)"
        return Problem("stacks", "timeout", text)
    cause = _cause(log)
    if "permission denied" in cause.lower() or "operation not permitted" in cause.lower():
        needs = "the daemon needs CAP_SYS_PTRACE (see docs/troubleshooting.md)"
        text = f"{rank}: py-spy could not read memory: EPERM; {needs}"
        return Problem("stacks", "permission", text)
    how = f"exit status {ended.status}" if ended.status >= 0 else f"signal {-ended.status}"
    return Problem("stacks", "unreadable", f"{rank}: py-spy failed ({how}): {cause or 'no message'}")


def missing(looked_for: Path | None) -> Problem:
    where = f"no py-spy at {looked_for}" if looked_for else "py-spy is not installed"
    return Problem("stacks", "missing", f"{where}, so there are no stacks; pip install py-spy")


def _cause(log: str) -> str:
    """The message and what caused it, without the Rust backtrace."""
    lines = []
    for line in log.splitlines():
        if line.startswith("Stack backtrace"):
            break
        lines.append(line.strip())
    return one_line(" ".join(lines).strip().removeprefix("Error: "), 300)


class PrivateFolder:
    """A folder for py-spy's output that only this user can read: stacks reveal other users' programs. Removed by
    `close`, or by the next daemon. Raises OSError if nothing is writable."""

    def __init__(self) -> None:
        self.path, self._descriptor = _make()
        _sweep(self.path.parent)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _make() -> tuple[Path, int]:
    try:
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    except OSError:
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/dev/shm"))
    # A lock lasts as long as the daemon, however it dies and in whichever pid namespace: it marks a folder in use.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if path.exists():
        return path, descriptor
    os.close(descriptor)
    return _make()  # another daemon removed it before it was locked


def _sweep(parent: Path) -> None:
    """Remove the folders of daemons that were killed."""
    for folder in parent.glob(FOLDER_PREFIX + "*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use
        finally:
            os.close(descriptor)
