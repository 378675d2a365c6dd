"""Changing bytes: bits, numbers at the borders of their types, tokens, pieces of other inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

WHOLE_NUMBERS = (
    *(0, 1, -1, 2, 7, 8, 9, 10, 63, 64, 65, 127, 128, 255, 256, 999, 1000, 1023, 1024, 4095, 4096, 65535, 65536),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64 - 1),
    *(2**64, 10**30, 10**100),
)
NUMBER_TEXTS = (
    *("1e308", "-1e308", "1e-320", "1e999", "NaN", "nan", "inf", "-Infinity", "0x10", "1_000", "+1", "-0", "00", "1."),
    *(".5", "1e5", "٣", "²", "9" * 19, "9" * 5000),
)
TEXTS = (
    *("", " ", "\0", "\n", "\r\n", "\t", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\ufffd", "é", "😀"),
    *("..", "../../etc/passwd", "/", "//", "\\", '"', "'", "`", "{", "}", "[", "]", "(", ")", ";", ",", ":", "=", "#"),
    *("%s", "{}", "$(PATH)", "<b>", "none", "null", "true", "a" * 300, "é" * 300, "A" * 5000),
)
_DIGITS = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
SIZE_LIMIT = 64 << 10


class Mutator:
    """Deterministic: the same seed and the same calls give the same inputs."""

    def __init__(self, random: Random, tokens: Sequence[bytes] = (), size_limit: int = SIZE_LIMIT) -> None:
        self.random = random
        self.size_limit = size_limit
        self._tokens = [*tokens, *(text.encode() for text in TEXTS), *(text.encode() for text in NUMBER_TEXTS)]
        self._own = len(tokens)
        self._kinds: list[Callable[[bytearray, bytes], None]] = [
            *(self._flip, self._byte, self._binary_number, self._written_number, self._token, self._token),
            *(self._delete, self._repeat, self._copy, self._splice, self._lines, self._insert),
        ]

    def mutate(self, data: bytes, other: bytes) -> bytes:
        """A few changes at once; `other` is another input to take pieces of."""
        changed = bytearray(data)
        for _ in range(min(1 + int(self.random.expovariate(0.6)), 12)):
            self.random.choice(self._kinds)(changed, other)
        return bytes(changed[: self.size_limit])

    def token(self) -> bytes:
        if self._own and self.random.random() < 0.6:
            return self._tokens[self.random.randrange(self._own)]
        return self.random.choice(self._tokens)

    def _place(self, data: bytearray) -> int:
        return self.random.randrange(len(data) + 1)

    def _stretch(self, data: bytearray) -> tuple[int, int]:
        start = self._place(data)
        # Mostly short: what is long breaks everything at once.
        length = int(self.random.paretovariate(0.6))
        return start, min(len(data), start + length)

    def _flip(self, data: bytearray, other: bytes) -> None:
        if data:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)

    def _byte(self, data: bytearray, other: bytes) -> None:
        if data:
            data[self.random.randrange(len(data))] = self.random.randrange(256)

    def _insert(self, data: bytearray, other: bytes) -> None:
        place = self._place(data)
        data[place:place] = self.random.randbytes(1 + int(self.random.expovariate(0.3)))

    def _binary_number(self, data: bytearray, other: bytes) -> None:
        size = self.random.choice((1, 2, 4, 8))
        order = self.random.choice(("little", "little", "big"))
        value = (self.random.choice(WHOLE_NUMBERS) + self.random.choice((0, 0, 1, -1))) % (1 << 8 * size)
        place = self.random.randrange(max(1, len(data) - size + 1))
        if self.random.random() < 0.7:
            place -= place % size
        data[place : place + size] = value.to_bytes(size, "little" if order == "little" else "big")

    def _written_number(self, data: bytearray, other: bytes) -> None:
        start = self._place(data)
        found = _DIGITS.search(data, start) or _DIGITS.search(data)
        if found is None:
            return
        near = found.group().isdigit() and len(found.group()) < 20 and self.random.random() < 0.4
        if near:
            text = str(int(found.group()) + self.random.choice((-1, 1, 10, -10, 1000)))
        elif self.random.random() < 0.6:
            text = str(self.random.choice(WHOLE_NUMBERS))
        else:
            text = self.random.choice(NUMBER_TEXTS)
        data[found.start() : found.end()] = text.encode()

    def _token(self, data: bytearray, other: bytes) -> None:
        start, end = self._stretch(data)
        data[start : end if self.random.random() < 0.5 else start] = self.token()

    def _delete(self, data: bytearray, other: bytes) -> None:
        start, end = self._stretch(data)
        del data[start:end]

    def _repeat(self, data: bytearray, other: bytes) -> None:
        start, end = self._stretch(data)
        piece = bytes(data[start:end])
        times = self.random.choice((1, 1, 2, 10, 100, 1000))
        if len(piece) * times < self.size_limit:
            data[end:end] = piece * times

    def _copy(self, data: bytearray, other: bytes) -> None:
        start, end = self._stretch(data)
        place = self._place(data)
        data[place : place + end - start] = data[start:end]

    def _splice(self, data: bytearray, other: bytes) -> None:
        if other:
            start = self.random.randrange(len(other))
            piece = other[start : start + int(self.random.paretovariate(0.4))]
            place = self._place(data)
            data[place : place + (len(piece) if self.random.random() < 0.5 else 0)] = piece

    def _lines(self, data: bytearray, other: bytes) -> None:
        """Whole lines, or whatever stands between NULs."""
        separator = b"\0" if b"\0" in data and self.random.random() < 0.5 else b"\n"
        lines = bytes(data).split(separator)
        if len(lines) > 1:
            first, second = (self.random.randrange(len(lines)) for _ in range(2))
            kind = self.random.randrange(3)
            if kind == 0:
                lines[first], lines[second] = lines[second], lines[first]
            elif kind == 1:
                del lines[first]
            else:
                lines.insert(first, lines[second])
            data[:] = separator.join(lines)
