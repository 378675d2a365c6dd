"""What the probe reads: orders in its ring, which any code that can write into the process could leave, and the user's
words in the environment. The training process comes first: nothing may be raised that is not caught."""

from __future__ import annotations

import zlib

from rankscope.probe import declaration, ring_layout
from rankscope.probe.capture_commands import (
    MAX_LENGTH_NS,
    MAX_PATIENCE_NS,
    MAX_STEPS,
    Answer,
    read_command,
    refusal,
)
from tests.fuzz.mutating import Mutator

_NOW = 1_790_000_000_000_000_000
_BODY = ring_layout.COMMAND.pack(7, ring_layout.VERB_CAPTURE, 3, _NOW + 10**9, 0, 0, 1, 3, 10**10, _NOW + 6 * 10**10)
_WORDS = (
    b"params=7B,layers=32,width=4096,sequence=4096,batch=1024",
    b"pp=2,dp=4",
    b"989T",
    b"4.2e18",
)
# An order as the daemon's `write_command` leaves it, and the words of the documentation.
SEEDS = [_BODY + ring_layout.CHECKSUM.pack(zlib.crc32(_BODY)), *_WORDS]
TOKENS = [b"pp=", b"tp=", b"dp=", b",", b"=", b"params=", b"batch=", b"7B", b"1e400", b"\xff" * 8]
SIZE_LIMIT = 4096
_AREA = ring_layout.COMMAND.size + 4


class _Ring:
    def __init__(self, area: bytes) -> None:
        self._area = area
        self.written = b""

    def read_command(self) -> bytes:
        return self._area

    def write_answer(self, answer: bytes) -> None:
        self.written = answer


def run(data: bytes) -> None:
    _check_order(data[:_AREA].ljust(_AREA, b"\0"))
    _check_words(data.decode("utf-8", "replace"))


def _check_order(area: bytes) -> None:
    ring = _Ring(area)
    command = read_command(ring, area[:4])
    if command is None:
        return
    wrong = refusal(command, _NOW)
    if wrong is None:
        assert 0 < command.length_ns <= MAX_LENGTH_NS and command.steps <= MAX_STEPS
        assert 0 < command.give_up_unix_ns - _NOW <= MAX_PATIENCE_NS
        assert 1 <= command.windows <= ring_layout.MAX_WINDOWS
        assert command.start_step >= 0 and max(command.wait_steps, command.warmup_steps) <= MAX_STEPS
        assert set(command.options) <= set(ring_layout.OPTIONS)
    Answer(ring, command.number).report(ring_layout.PHASE_FAILED, wrong or "no")
    assert len(ring.written) <= ring_layout.ANSWER.size + ring_layout.ANSWER_TEXT_BYTES


def _check_words(text: str) -> None:
    for name in ("RANKSCOPE_FLOPS_PER_STEP", "RANKSCOPE_MODEL"):
        try:
            flops = declaration.flops_from_environment({name: text})
            assert flops is None or flops > 0
        except declaration.BadValueError as error:
            assert len(str(error)) < 600
    try:
        place = declaration.coordinates("RANKSCOPE_PARALLELISM", text, 3, 8)
        assert all(0 <= value < 8 for value in place.values()), place
    except declaration.BadValueError as error:
        assert len(str(error)) < 600


class _Sealing:
    def __init__(self, plain: Mutator) -> None:
        self._plain = plain

    def mutate(self, data: bytes, other: bytes) -> bytes:
        changed = self._plain.mutate(data, other)
        if data[:1].isalnum() or self._plain.random.random() < 0.1:
            return changed
        body = changed[: ring_layout.COMMAND.size].ljust(ring_layout.COMMAND.size, b"\0")
        return body + ring_layout.CHECKSUM.pack(zlib.crc32(body))


def mutator(plain: Mutator) -> _Sealing:
    return _Sealing(plain)
