"""Runs a module of ours as a separate process, at low priority and within limits: its input is not trusted, and its
failure must not affect the daemon."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from rankscope.common.text import printable
from rankscope.daemon.captures.orders import CancelledError, CaptureError
from rankscope.daemon.cgroups import memory_left_bytes
from rankscope.daemon.stacks.pyspy import DIE_WITH_PARENT

NICENESS: Final = 10
# Of the memory that the container has left; the daemon grows, too.
SHARE_OF_MEMORY: Final = 0.6
MAX_MESSAGE_CHARACTERS: Final = 300
# Less than this is not worth beginning with while others will give theirs back.
MIN_MEMORY_BYTES: Final = 192 << 20
TICK_SECONDS: Final = 0.05
_MEMORY_VARIABLE: Final = "TRACE_WORKER_MEMORY_BYTES"


class MemoryShares:
    """What the container has left, for processes that run at the same time: together they must not take more, or the
    kernel kills the container. One process for each tenant, so that one tenant's traces do not keep others waiting.
    Thread-safe."""

    def __init__(self, left_bytes: Callable[[], int | None] = memory_left_bytes) -> None:
        self._left_bytes = left_bytes
        self._changed = threading.Condition()
        self._held: dict[str, int] = {}  # by tenant

    @contextlib.contextmanager
    def share(self, tenant: str, seconds: float, cancelled: threading.Event) -> Iterator[int | None]:
        """None without a limit. Waits for its turn."""
        give_up_at = time.monotonic() + seconds
        with self._changed:
            while not self._is_next(tenant):
                self._changed.wait(TICK_SECONDS)
                if cancelled.is_set():
                    raise CancelledError("cancelled")
                if time.monotonic() > give_up_at:
                    raise CaptureError(f"other captures were worked on for {seconds:g} s; ask again later")
            granted = self._free_bytes()
            self._held[tenant] = granted or 0
        try:
            yield granted
        finally:
            with self._changed:
                del self._held[tenant]
                self._changed.notify_all()

    def _is_next(self, tenant: str) -> bool:
        free_bytes = self._free_bytes()
        is_enough = not self._held or free_bytes is None or free_bytes >= MIN_MEMORY_BYTES
        return tenant not in self._held and is_enough

    def _free_bytes(self) -> int | None:
        left_bytes = self._left_bytes()
        # What others have taken of theirs by now counts twice: too little is safe.
        return None if left_bytes is None else int(SHARE_OF_MEMORY * max(0, left_bytes - sum(self._held.values())))


def run_module(
    module: str,
    folder: Path,
    *,
    seconds: float,
    what: str,
    cancelled: threading.Event | None = None,
    memory_bytes: int | None = None,
) -> None:
    """Run the module in a directory that holds its orders and receives its results. Raises CaptureError if it fails,
    is killed or takes too long, CancelledError if it is cancelled; results written until then remain."""
    cancelled = cancelled or threading.Event()
    # Numeric threads would each reserve address space, which is limited, and take CPU from others.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    if memory_bytes is not None:
        environment[_MEMORY_VARIABLE] = str(memory_bytes)
    with tempfile.TemporaryFile(dir=folder) as messages:
        try:
            child = subprocess.Popen(
                [*DIE_WITH_PARENT, sys.executable, "-m", module, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                cwd="/",
                env=environment,
            )
        except OSError as error:
            raise CaptureError(f"{what} could not be started: {error.strerror}") from error
        try:
            status = _await(child, seconds, cancelled)
        finally:
            child.kill()
            child.wait()
        if status is None and cancelled.is_set():
            raise CancelledError("cancelled")
        if status is None:
            raise CaptureError(f"{what} took longer than {seconds:g} s and was ended; is the node busy?")
        if status != 0:
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            raise CaptureError(f"{what} failed ({how}): {_last_line(messages)}")


def _await(child: subprocess.Popen[bytes], seconds: float, cancelled: threading.Event) -> int | None:
    """Its exit status; None if it took too long or was cancelled."""
    # Ticks are counted, not seconds: a pause of the machine leaves the process as much time as before.
    for _ in range(round(seconds / TICK_SECONDS)):
        if (status := child.poll()) is not None or cancelled.wait(TICK_SECONDS):
            return status
    return child.poll()


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(max(0, messages.seek(0, os.SEEK_END) - 8192))
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return printable(lines[-1] if lines else "no message", MAX_MESSAGE_CHARACTERS)


def confine(*, memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    """Called by such a process before it reads anything. It gets less memory where its container has less."""
    os.nice(NICENESS)
    granted = os.environ.get(_MEMORY_VARIABLE)
    left_bytes = memory_left_bytes() if granted is None else None
    if granted is not None or left_bytes is not None:
        share_bytes = int(granted or SHARE_OF_MEMORY * (left_bytes or 0))
        memory_bytes = min(memory_bytes, _address_space_bytes() + share_bytes)
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(limit, (value, value))


def _address_space_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 256 << 20
