"""py-spy as a bounded child process that never stops its target, and the reasons for its failures."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.common.text import one_line
from rankscope.daemon import procfs
from rankscope.daemon.blocking_reads import BlockedError
from rankscope.daemon.collector import blocked
from rankscope.daemon.samples import Problem, RankProcess

MAX_OUTPUT_BYTES: Final = 16 * 1024 * 1024
MAX_LOG_BYTES: Final = 64 * 1024
# In place of the output's path: the child writes to memory.
IN_MEMORY: Final = Path("memory")
# A killed child ends at once, or after a moment on a busy machine. Each that does not takes a few megabytes.
STUCK_SECONDS: Final = 1.0
STUCK_PER_OWNER: Final = 4
MAX_STUCK: Final = 32
# A CUDA process has 100 to 300.
MAX_THREADS: Final = 1000

_CHILD_LIMITS: Final = (
    (resource.RLIMIT_FSIZE, MAX_OUTPUT_BYTES),
    (resource.RLIMIT_AS, 4 * 1024 * 1024 * 1024),
    (resource.RLIMIT_CPU, 20),  # seconds; also ends a child whose daemon was killed
    (resource.RLIMIT_CORE, 0),
)


def engine_threads(process_folder: str) -> frozenset[int]:
    """Threads on which autograd runs the backward of a device. torch names them; py-spy does not see these names."""
    try:
        return procfs.BLOCKING.call(process_folder, lambda: procfs.thread_ids(process_folder, b"pt_autograd_"))
    except BlockedError:
        return frozenset()


def find_py_spy() -> Path | None:
    beside = Path(sys.executable).parent / "py-spy"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("py-spy")
    return Path(found) if found else None


def record_command(py_spy: Path, pid: int, seconds: int, rate_hz: int, output: Path = IN_MEMORY) -> list[str]:
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
    """A running py-spy. `poll` reaps it and returns the CPU time it took. What it writes stays in memory: a disk that
    somebody has filled does not stop it, and stacks, which reveal other users' programs, are nobody else's to read."""

    def __init__(self, command: Sequence[str], keeps_stdout: bool = False) -> None:
        """Standard output goes to the log, or with `keeps_stdout` to the output."""
        if "--nonblocking" not in command:
            raise ValueError(f"refused: py-spy without --nonblocking stops the training process: {command}")
        self._log, self._output = files = [os.memfd_create("rankscope-stacks", os.MFD_CLOEXEC) for _ in range(2)]
        weakref.finalize(self, _close, files)
        path = f"/proc/self/fd/{self._output}"  # of the child: it inherits the file under the same number
        self._process = subprocess.Popen(
            [*DIE_WITH_PARENT, *(path if word == str(IN_MEMORY) else word for word in command)],
            stdin=subprocess.DEVNULL,
            stdout=self._output if keeps_stdout else self._log,
            stderr=self._log,
            pass_fds=(self._output,),
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
    def log(self) -> str:
        return os.pread(self._log, MAX_LOG_BYTES, 0).decode("utf-8", "replace")

    @property
    def output(self) -> str:
        return os.pread(self._output, MAX_OUTPUT_BYTES, 0).decode("utf-8", "replace")

    @property
    def cpu_seconds(self) -> float:
        """Used so far."""
        with suppress(OSError):
            # The CPU clock of another process, as clock_getcpuclockid(3) computes it on Linux.
            self._cpu_seconds = max(self._cpu_seconds, time.clock_gettime((~self.pid << 3) | 2))
        return self._cpu_seconds

    def poll(self) -> Ended | None:
        """None while it runs. Do not call it again once the child has ended."""
        pid, wait_status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        status = os.waitstatus_to_exitcode(wait_status)
        self._process.returncode = status  # so that Popen does not wait for it
        return Ended(status, max(self._cpu_seconds, usage.ru_utime + usage.ru_stime))

    def kill(self) -> None:
        """Does not wait for it: a child that reads a file system which does not answer survives SIGKILL."""
        # Not Popen.send_signal, which may reap the child and lose its CPU time. The pid is ours until we reap it.
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> Ended | None:
        """None if it has not ended by then."""
        give_up_at = time.monotonic() + seconds
        while (ended := self.poll()) is None and time.monotonic() < give_up_at:
            time.sleep(0.01)
        return ended


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class KilledChildren:
    """Children that were killed and are reaped when they end. Most end at once; one that waits for a file system of its
    target which does not answer stays. A rank with such a child is not read again before it ends, and their number
    is bounded for each owner and in total. May be used from several threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._killed: list[tuple[Child, RankProcess, float]] = []

    def kill(self, child: Child, rank: RankProcess) -> None:
        child.kill()
        with self._lock:
            self._killed.append((child, rank, self._monotonic()))

    def reap(self, patience_seconds: float = 0.0) -> Sequence[float]:
        """Returns the CPU seconds of each that has ended by then."""
        give_up_at = self._monotonic() + patience_seconds
        cpu_seconds = []
        with self._lock:
            for killed in self._killed[:]:
                ended = killed[0].wait(max(0.0, give_up_at - self._monotonic()))
                if ended is not None:
                    self._killed.remove(killed)
                    cpu_seconds.append(ended.cpu_seconds)
        return cpu_seconds

    @property
    def stuck(self) -> int:
        """How many do not end."""
        return len(self._stuck())

    def hold(self, rank: RankProcess) -> bool:
        """Whether one that reads the rank has not ended yet."""
        with self._lock:
            return any(held.key == rank.key for _, held, _ in self._killed)

    def objection(self, rank: RankProcess) -> Problem | None:
        """Why the rank must not be read now."""
        stuck = self._stuck()
        own = next((child for child, held in stuck if held.key == rank.key), None)
        if own is not None:
            what = f"py-spy (pid {own.pid}) was killed and does not end"
        elif sum(held.owner == rank.owner for _, held in stuck) >= STUCK_PER_OWNER or len(stuck) >= MAX_STUCK:
            what = f"{len(stuck)} py-spy processes of other ranks were killed and do not end"
        else:
            return None
        next_step = "if a file system (FUSE, NFS) of the job does not answer, repair or unmount it"
        text = f"{rank}: {what}; no stacks are read until then; next step: {next_step}"
        return Problem("stacks", "stuck", text)

    def _stuck(self) -> list[tuple[Child, RankProcess]]:
        since = self._monotonic() - STUCK_SECONDS
        with self._lock:
            return [(child, rank) for child, rank, at in self._killed if at <= since]


def _die_with_parent() -> tuple[str, ...]:
    # A program, not a preexec_fn: that would run Python in a fork of a process with gRPC threads.
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


DIE_WITH_PARENT: Final = _die_with_parent()


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


def objection(rank: RankProcess, process_folder: str) -> Problem | None:
    """Why py-spy should not read the rank. A sample of 2,000 threads takes half a second of CPU time; by then the next
    is due."""
    try:
        threads = procfs.BLOCKING.call(process_folder, lambda: procfs.read_stat(process_folder)).threads
    except BlockedError:
        return blocked("stacks", rank)
    except (OSError, ValueError):
        return None  # it ended; py-spy says so
    if threads <= MAX_THREADS:
        return None
    return Problem("stacks", "threads", f"{rank}: it has {threads} threads; stacks are read of {MAX_THREADS} at most")


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
