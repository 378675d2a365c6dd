"""Commands of the daemon, read from the ring and checked; answers to it; and the handover of a finished trace.

Any process that may write into this one's memory could send a command, so a command can do no more than a capture
within bounds, or one dump of the flight recorder while no step ends."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
import zlib
from typing import Any, Callable, Dict, NamedTuple, Optional

from . import ring_layout
from .ring import Ring

MAX_STEPS = 1000
MAX_LENGTH_NS = 120_000_000_000
MAX_PATIENCE_NS = 3600_000_000_000
# How long a trace is kept for the daemon, which copies it as soon as it is there. It takes memory of the container.
KEEP_SECONDS = 60.0
# A command for another capture means that the trace is not wanted any more, but perhaps not by all daemons.
MIN_KEPT_SECONDS = 2.0
POLL_SECONDS = 0.05


class Command(NamedTuple):
    number: int
    verb: int
    option_bits: int
    start_unix_ns: int
    start_step: int  # 0: by time; of a drop, the number of the capture
    wait_steps: int
    warmup_steps: int
    steps: int  # 0: as many as fit into the length
    length_ns: int
    give_up_unix_ns: int

    @property
    def options(self) -> Dict[str, bool]:
        return {name: True for bit, name in enumerate(ring_layout.OPTIONS) if self.option_bits >> bit & 1}

    @property
    def windows(self) -> int:
        return (self.option_bits >> ring_layout.MORE_WINDOWS_SHIFT) + 1


def read_command(ring: Ring, mark: bytes) -> Optional[Command]:
    """None for anything that is not whole, or not what the mark announced."""
    raw = ring.read_command()
    body = raw[: ring_layout.COMMAND.size]
    if ring_layout.CHECKSUM.unpack_from(raw, len(body))[0] != zlib.crc32(body):
        return None
    command = Command(*ring_layout.COMMAND.unpack(body))
    return command if command.number == ring_layout.COMMAND_NUMBER.unpack(mark)[0] and command.number else None


def refusal(command: Command, now_unix_ns: int) -> Optional[str]:
    """What is wrong with a request for a capture."""
    if command.windows > ring_layout.MAX_WINDOWS:
        return "asks for more than {} windows".format(ring_layout.MAX_WINDOWS)
    if (command.option_bits & (1 << ring_layout.MORE_WINDOWS_SHIFT) - 1) >> len(ring_layout.OPTIONS):
        return "asks for options that this probe does not know; upgrade the probe"
    if not 0 < command.length_ns <= MAX_LENGTH_NS or command.steps > MAX_STEPS:
        return "asks for more than {} steps or {} s".format(MAX_STEPS, MAX_LENGTH_NS // 10**9)
    if command.start_step < 0 or max(command.wait_steps, command.warmup_steps) > MAX_STEPS:
        return "asks for a start that cannot be"
    if not 0 < command.give_up_unix_ns - now_unix_ns <= MAX_PATIENCE_NS:
        return "came too late, or waits for too long; are the clocks right?"
    return None


class Answer:
    """The answer to one command, written again whenever something in it changes."""

    def __init__(self, ring: Ring, number: int) -> None:
        self._ring = ring
        self.number = number
        self._fields: Dict[str, int] = dict.fromkeys(
            ("phase", "first_step", "start_unix_ns", "steps", "fd", "size", "start_ns", "stop_ns", "write_ns"), 0
        )

    def report(self, phase: int, text: str = "", **changes: Any) -> None:
        self._fields.update(changes, phase=phase)
        encoded = " ".join(text.split()).encode("utf-8", "replace")[: ring_layout.ANSWER_TEXT_BYTES]
        body = ring_layout.ANSWER.pack(self.number, *self._fields.values(), len(encoded))
        self._ring.write_answer(body + encoded)


class Handover:
    """Writes a finished trace on a thread of its own and keeps it until the daemon has fetched it. One at a time."""

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
            answer.report(ring_layout.PHASE_WRITTEN, text, fd=self._fd, size=status.st_size, write_ns=write_ns)
            _wait_until_unwanted(ring, answer.number)
        except Exception as error:
            failed(error)
        finally:
            self.close()
            self._busy.release()

    def close(self) -> None:
        """Closes the descriptor only if it is still ours: the user may have closed the number and used it again."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if fd >= 0 and os.fstat(fd).st_ino == self._inode:
                os.close(fd)


def _wait_until_unwanted(ring: Ring, number: int) -> None:
    start = time.monotonic()
    while time.monotonic() < start + KEEP_SECONDS:
        command = read_command(ring, ring.command_mark())
        if command is not None and command.verb == ring_layout.VERB_DROP and command.start_step == number:
            return
        is_another = command is not None and command.verb != ring_layout.VERB_DROP and command.number != number
        if is_another and time.monotonic() > start + MIN_KEPT_SECONDS:
            return
        time.sleep(POLL_SECONDS)
