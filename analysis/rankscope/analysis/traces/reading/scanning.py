"""Where the events of a JSON array end, found by counting quotes and brackets over whole arrays of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("{"), ord("[")]] = 1
_STEP[[ord("}"), ord("]")]] = -1
_STRUCTURAL = _STEP != 0
_STRUCTURAL[_COMMA] = True


@dataclass(frozen=True)
class Layout:
    """A text that begins between two elements of an array."""

    quotes: Ints  # positions of quotes that open or close a text
    commas: Ints  # positions of commas between elements of that array
    closing: int | None  # position of the bracket that closes the array

    def within_texts(self, positions: Ints) -> Bools:
        within: Bools = np.searchsorted(self.quotes, positions) % 2 == 1
        return within

    def pieces(self, length: int) -> tuple[list[int], list[int]]:
        """Starts and ends of the elements, the last one reaching to the closing bracket or to the end of the text."""
        end = length if self.closing is None else self.closing
        commas = self.commas.tolist()
        return [0, *(comma + 1 for comma in commas)], [*commas, end]


def lay_out(text: bytes) -> Layout:
    letters = np.frombuffer(text, dtype=np.uint8)
    quotes = np.flatnonzero(letters == _QUOTE)
    if b"\\" in text:
        quotes = quotes[~_escaped(letters, quotes)]
    marks = np.flatnonzero(_STRUCTURAL[letters])
    marks = marks[np.searchsorted(quotes, marks) % 2 == 0]
    kinds = letters[marks]
    depth = np.cumsum(_STEP[kinds], dtype=np.int64)
    below = np.flatnonzero(depth < 0)
    closing = int(marks[below[0]]) if len(below) else None
    commas = marks[(kinds == _COMMA) & (depth == 0)]
    if closing is not None:
        commas = commas[commas < closing]
    return Layout(quotes, commas, closing)


def _escaped(letters: np.ndarray[tuple[int], np.dtype[np.uint8]], positions: Ints) -> Bools:
    """Whether an odd number of backslashes stands before each position."""
    others = np.flatnonzero(letters != _BACKSLASH)
    before = np.searchsorted(others, positions) - 1
    last_other = np.where(before >= 0, others[np.maximum(before, 0)], -1)
    escaped: Bools = (positions - last_other - 1) % 2 == 1
    return escaped
