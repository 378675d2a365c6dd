"""Hands a finished trace to the daemon: written on a thread of its own, kept until it has been fetched."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from typing import Callable

from . import layout
from .commanding import Answer, read_command
from .ring import Ring

# How long a trace is kept for the daemon, which copies it as soon as it is there. It is memory of the container's.
KEEP_SECONDS = 60.0
# A command for another capture means that the trace is not wanted any more, but perhaps not by everybody.
KEEP_AT_LEAST_SECONDS = 2.0
POLL_SECONDS = 0.05


class Handover:
    """One trace at a time."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._fd = -1
        self._inode = -1

    @property
    def is_busy(self) -> bool:
        return self._busy.locked()

    def start(
        self, ring: Ring, write: Callable[[], int], answer: Answer, text: str, failed: Callable[[Exception], None]
    ) -> None:
        """`write` returns a descriptor of the trace."""
        self._busy.acquire()
        try:
            # Not threading.Thread: it would show up in the user's threading.enumerate().
            _thread.start_new_thread(self._run, (ring, write, answer, text, failed))
        except BaseException:
            self._busy.release()
            raise

    def wait(self, seconds: float) -> None:
        if self._busy.acquire(timeout=seconds):
            self._busy.release()

    def _run(
        self, ring: Ring, write: Callable[[], int], answer: Answer, text: str, failed: Callable[[Exception], None]
    ) -> None:
        """libkineto holds the GIL while it writes, but training can meanwhile be inside an operator, a collective, a
        backward pass."""
        try:
            start_ns = time.monotonic_ns()
            self._fd = write()
            status = os.fstat(self._fd)
            self._inode = status.st_ino
            write_ns = time.monotonic_ns() - start_ns
            answer.tell(layout.PHASE_WRITTEN, text, fd=self._fd, size=status.st_size, write_ns=write_ns)
            _wait_until_unwanted(ring, answer.number)
        except Exception as error:
            failed(error)
        finally:
            self.close()
            self._busy.release()

    def close(self) -> None:
        """The number may have been closed and used again by the user: closed only if it is still ours."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if fd >= 0 and os.fstat(fd).st_ino == self._inode:
                os.close(fd)


def _wait_until_unwanted(ring: Ring, number: int) -> None:
    start = time.monotonic()
    while time.monotonic() < start + KEEP_SECONDS:
        command = read_command(ring, ring.command_mark())
        if command is not None and command.verb == layout.VERB_DROP and command.start_step == number:
            return
        is_another = command is not None and command.verb == layout.VERB_CAPTURE and command.number != number
        if is_another and time.monotonic() > start + KEEP_AT_LEAST_SECONDS:
            return
        time.sleep(POLL_SECONDS)
