"""What the daemon asks for through the ring, checked, and what it is told back. Whoever may write into this process'
memory could ask, so a command can do no more than a capture within bounds."""

from __future__ import annotations

import zlib
from typing import Any, Dict, NamedTuple, Optional

from . import layout
from .ring import Ring

STEPS_LIMIT = 1000
LENGTH_LIMIT_NS = 120_000_000_000
PATIENCE_LIMIT_NS = 3600_000_000_000


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
        return {name: True for bit, name in enumerate(layout.OPTIONS) if self.option_bits >> bit & 1}

    @property
    def windows(self) -> int:
        return (self.option_bits >> layout.MORE_WINDOWS_SHIFT) + 1


def read_command(ring: Ring, mark: bytes) -> Optional[Command]:
    """None for anything that is not whole, or not what the mark announced."""
    raw = ring.read_command()
    body = raw[: layout.COMMAND.size]
    if layout.CHECKSUM.unpack_from(raw, len(body))[0] != zlib.crc32(body):
        return None
    command = Command(*layout.COMMAND.unpack(body))
    return command if command.number == layout.COMMAND_NUMBER.unpack(mark)[0] and command.number else None


def refusal(command: Command, now_unix_ns: int) -> Optional[str]:
    """What is wrong with a request for a capture."""
    if command.windows > layout.WINDOWS_LIMIT:
        return "asks for more than {} windows".format(layout.WINDOWS_LIMIT)
    if (command.option_bits & (1 << layout.MORE_WINDOWS_SHIFT) - 1) >> len(layout.OPTIONS):
        return "asks for options that this probe does not know; upgrade the probe"
    if not 0 < command.length_ns <= LENGTH_LIMIT_NS or command.steps > STEPS_LIMIT:
        return "asks for more than {} steps or {} s".format(STEPS_LIMIT, LENGTH_LIMIT_NS // 10**9)
    if command.start_step < 0 or max(command.wait_steps, command.warmup_steps) > STEPS_LIMIT:
        return "asks for a start that cannot be"
    if not 0 < command.give_up_unix_ns - now_unix_ns <= PATIENCE_LIMIT_NS:
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

    def tell(self, phase: int, text: str = "", **changes: Any) -> None:
        self._fields.update(changes, phase=phase)
        encoded = " ".join(text.split()).encode("utf-8", "replace")[: layout.ANSWER_TEXT_BYTES]
        body = layout.ANSWER.pack(self.number, *self._fields.values(), len(encoded))
        self._ring.write_answer(body + encoded)
