"""Decodes the JSON text of events into records with the fields that the analysis needs, and repairs invalid JSON
that profilers write: control characters, NaN, stray backslashes, unbalanced quotes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.trace import Repairs, TraceError

_QUOTE, _BACKSLASH, _COMMA = ord('"'), ord("\\"), ord(",")
_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("{"), ord("[")]] = 1
_STEP[[ord("}"), ord("]")]] = -1
_STRUCTURAL = _STEP != 0
_STRUCTURAL[_COMMA] = True
CONTROL = "control character inside a string replaced by a space"
ENCODING = "invalid UTF-8 replaced by U+FFFD"
SURROGATE = "lone surrogate replaced by U+FFFD"
ESCAPE = "invalid escape read as a backslash"
NOT_A_NUMBER = "NaN or Infinity read as null"
TOO_LARGE = "number out of range read as null"
_TO_SPACE = bytes(letter if letter >= 0x20 else 0x20 for letter in range(256))
_PAIR_OR_HALF = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_ESCAPE_SEQUENCE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?')
# Both patterns start at what precedes a value: a search from every letter, or from every digit of a long number, would
# be very slow.
_WORD = re.compile(rb"[:,\[]\s*([-+]?(?:[Nn]a[Nn](?:\([a-z0-9]*\))?|[Ii]nf(?:inity)?|NAN|INF))(?![A-Za-z0-9])")
_LONG_NUMBER = re.compile(
    rb"[:,\[]\s*(-?[0-9]{300,}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|-?[0-9.]+[eE]\+?[0-9]{3,})(?![0-9.])"
)
UNREADABLE = "unreadable event skipped"
# With more, the file is not a damaged trace but something else.
MAX_UNREADABLE = 1000
_NOTHING = msgspec.Raw()
_PLACE = re.compile(r" \(byte (\d+)\)")
# The start of an event, recognised without counting brackets: to resume after a stray quote.
_NEXT_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id)"\s*:)')
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Arguments(msgspec.Struct, gc=False):
    """Users can record anything under any name, so the fields accept any type."""

    external_id: Any = msgspec.field(default=-1, name="External id")
    device: Any = -1
    stream: Any = -1
    correlation: Any = -1
    size_bytes: Any = msgspec.field(default=-1, name="bytes")
    old_external_id: Any = msgspec.field(default=-1, name="external id")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    group_size: Any = msgspec.field(default=-1, name="Group size")
    group_start: Any = msgspec.field(default=-1, name="Global rank start")
    group_stride: Any = msgspec.field(default=-1, name="Global rank stride")
    group_rank: Any = msgspec.field(default=-1, name="Rank")
    sequence: Any = msgspec.field(default=-1, name="Seq")
    element_type: Any = msgspec.field(default=None, name="dtype")
    in_elements: Any = msgspec.field(default=-1, name="In msg nelems")
    out_elements: Any = msgspec.field(default=-1, name="Out msg nelems")
    source: Any = msgspec.field(default=-1, name="Src Rank")
    destination: Any = msgspec.field(default=-1, name="Dst Rank")
    # Of "[memory]" instants.
    change_bytes: Any = msgspec.field(default=None, name="Bytes")
    allocated_bytes: Any = msgspec.field(default=-1, name="Total Allocated")
    reserved_bytes: Any = msgspec.field(default=-1, name="Total Reserved")
    device_type: Any = msgspec.field(default=-1, name="Device Type")
    memory_device: Any = msgspec.field(default=-1, name="Device Id")
    address: Any = msgspec.field(default=-1, name="Addr")
    # Long lists in traces with shapes; decoded only for the few events that need them.
    input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")


class Event(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = -1
    tid: Any = -1
    ts: Any = None
    dur: Any = None
    id: Any = -1  # of a flow
    args: Arguments | list[msgspec.Raw] | str | int | float | bool | None = None


class WrittenTimes(msgspec.Struct, gc=False):
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING


_EVENTS = msgspec.json.Decoder(list[Event])
_TIMES = msgspec.json.Decoder(list[WrittenTimes])


@dataclass(frozen=True)
class Batch:
    """Events and their JSON text."""

    text: bytes
    events: list[Event]

    def written_times(self) -> list[WrittenTimes]:
        """The times as written in the file, with digits that a float cannot hold."""
        return _TIMES.decode(self.text)


def decode(elements: bytes | memoryview) -> Batch:
    """Decode a text `{…}, {…}, …`. Success proves that it was cut between two events: a cut inside a string or
    nested brackets leaves them open."""
    text = b"".join((b"[", elements, b"]"))
    return Batch(text, _EVENTS.decode(text))


def decode_pieces(
    text: bytes, starts: list[int], ends: list[int], repairs: Repairs, *, offset: int
) -> tuple[list[Batch], int | None]:
    """Decode the elements of a text, repaired where necessary. Unreadable ones are found by bisection, noted and
    skipped. If one of them swallowed its neighbours (because of a stray quote), decoding stops, and the second
    result is the position where the next event seems to begin."""
    batches: list[Batch] = []
    waiting = [(0, len(starts))] if starts else []
    while waiting:
        first, last = waiting.pop()
        start, end = starts[first], ends[last - 1]
        try:
            batch = _decode_repaired(text[start:end], repairs, offset=offset + start)
            if not batch.events:
                repairs.note("comma without a following event", byte=offset + start)
            batches.append(batch)
            continue
        except DECODE_ERRORS as error:
            reason = error
        if last - first > 1:
            middle = (first + last) // 2
            waiting += [(middle, last), (first, middle)]
            continue
        note_unreadable(repairs, explain(reason), byte=offset + end - len(text[start:end].lstrip()))
        # The last element ends where the array seems to end, which may be wrong after a stray quote.
        following = next_event(text, start, len(text) if last == len(starts) else end)
        if following is not None:
            return batches, following
    return batches, None


def _decode_repaired(elements: bytes, repairs: Repairs, *, offset: int) -> Batch:
    try:
        return decode(elements)
    except DECODE_ERRORS as error:
        if not _is_repairable(error):
            raise
        fixes = Repairs()
        repaired = repair_json(elements, fixes, offset=offset)
        if repaired == elements:
            raise
        batch = decode(repaired)
        repairs.add(fixes)
        return batch


def _is_repairable(error: Exception) -> bool:
    if isinstance(error, msgspec.ValidationError):
        return "range" in str(error)  # a number out of range; otherwise the element is not an event
    return not isinstance(error, RecursionError)


def next_event(text: bytes, start: int, end: int) -> int | None:
    found = _NEXT_EVENT.search(text, start, end)
    return found.end() if found else None


def note_unreadable(repairs: Repairs, reason: str, *, byte: int) -> None:
    repairs.note(f"{UNREADABLE}: {reason}", byte=byte)
    if repairs.total(UNREADABLE) > MAX_UNREADABLE:
        raise TraceError(f"more than {MAX_UNREADABLE} events cannot be read; the last one: {reason}", byte=byte)


def explain(error: Exception) -> str:
    """A decoder's error as a clause, without its position."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    words = _PLACE.sub("", str(error)).split(" - at ")[0].removeprefix("JSON is malformed: ").replace("`", "")
    return words[:1].lower() + words[1:] if not words.startswith("JSON") else words


def place_of(error: Exception) -> int | None:
    """The position of the error in the text."""
    found = _PLACE.search(str(error))
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Layout:
    """The structure of a text that begins between two elements of an array."""

    quotes: Ints  # positions of quotes that open or close a string
    commas: Ints  # positions of the commas between elements of the array
    closing: int | None  # position of the bracket that closes the array

    def within_texts(self, positions: Ints) -> Bools:
        within: Bools = np.searchsorted(self.quotes, positions) % 2 == 1
        return within

    def pieces(self, length: int) -> tuple[list[int], list[int]]:
        """Starts and ends of the elements. The last one ends at the closing bracket or at the end of the text."""
        end = length if self.closing is None else self.closing
        commas = self.commas.tolist()
        return [0, *(comma + 1 for comma in commas)], [*commas, end]


def lay_out(text: bytes) -> Layout:
    quotes, marks, kinds = _structure(text, in_string=False)
    depth = np.cumsum(_STEP[kinds], dtype=np.int64)
    below = np.flatnonzero(depth < 0)
    closing = int(marks[below[0]]) if len(below) else None
    commas = marks[(kinds == _COMMA) & (depth == 0)]
    if closing is not None:
        commas = commas[commas < closing]
    return Layout(quotes, commas, closing)


def _structure(text: bytes, *, in_string: bool) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
    """Positions of the quotes; positions and letters of the brackets and commas outside of strings."""
    letters = np.frombuffer(text, dtype=np.uint8)
    quotes = np.flatnonzero(letters == _QUOTE)
    if b"\\" in text:
        quotes = quotes[~_escaped(letters, quotes)]
    marks = np.flatnonzero(_STRUCTURAL[letters])
    marks = marks[np.searchsorted(quotes, marks) % 2 == in_string]
    return quotes, marks, letters[marks]


class KeyScanner:
    """Finds a key of the outermost object in one pass over its text, part by part."""

    def __init__(self, key: bytes) -> None:
        self._key = re.compile(b"(?=%s)" % re.escape(b'"%s"' % key))
        self.lookahead_bytes = len(key) + 2
        self.scanned = 0  # bytes
        self._depth = 0
        self._in_string = False

    def scan(self, part: bytes, following: bytes) -> list[int]:
        """Positions of the key in the whole text. `part` continues the text at `scanned`; `following` begins with the
        next `lookahead_bytes`."""
        quotes, marks, kinds = _structure(part, in_string=self._in_string)
        depth = np.concatenate(([0], np.cumsum(_STEP[kinds], dtype=np.int64))) + self._depth
        seen = [match.start() for match in self._key.finditer(part + following[: self.lookahead_bytes - 1])]
        places = np.array(seen, dtype=np.int64)
        opens = np.searchsorted(quotes, places) % 2 == self._in_string
        outermost = depth[np.searchsorted(marks, places)] == 1
        found: list[int] = (places[opens & outermost] + self.scanned).tolist()
        self._depth = int(depth[-1])
        self._in_string = (len(quotes) + self._in_string) % 2 == 1
        # An odd number of backslashes at the end escapes the next letter, whatever it is.
        self.scanned += len(part) + (len(part) - len(part.rstrip(b"\\"))) % 2
        return found


def _escaped(letters: np.ndarray[tuple[int], np.dtype[np.uint8]], positions: Ints) -> Bools:
    """Whether each position is preceded by an odd number of backslashes."""
    others = np.flatnonzero(letters != _BACKSLASH)
    before = np.searchsorted(others, positions) - 1
    last_other = np.where(before >= 0, others[np.maximum(before, 0)], -1)
    escaped: Bools = (positions - last_other - 1) % 2 == 1
    return escaped


def repair_json(text: bytes, repairs: Repairs, *, offset: int) -> bytes:
    """The text with invalid JSON repaired and noted in `repairs`; the same text if there is nothing to repair."""
    text = _repair_controls(text, repairs, offset)
    text = _repair_encoding(text, repairs, offset)
    if b"\\" in text:
        text = _repair_escapes(text, repairs, offset)
    text = _repair_values(text, _WORD, NOT_A_NUMBER, repairs, offset)
    return _repair_values(text, _LONG_NUMBER, TOO_LARGE, repairs, offset)


def _repair_controls(text: bytes, repairs: Repairs, offset: int) -> bytes:
    # Outside of strings a control character is white space, so all of them can become spaces.
    places = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) < 0x20)
    if not len(places):
        return text
    places = places[lay_out(text).within_texts(places)]
    if not len(places):
        return text
    repairs.note(CONTROL, len(places), byte=offset + int(places[0]))
    return text.translate(_TO_SPACE)


def _repair_encoding(text: bytes, repairs: Repairs, offset: int) -> bytes:
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError as error:
        decoded = text.decode(errors="replace")
        repairs.note(ENCODING, max(decoded.count("\ufffd"), 1), byte=offset + error.start)
        return decoded.encode()
    return text


def _repair_escapes(text: bytes, repairs: Repairs, offset: int) -> bytes:
    def whole(match: re.Match[bytes]) -> bytes:
        found = match[0]
        if len(found) != 6:
            return found
        repairs.note(SURROGATE, byte=offset + match.start())
        return rb"\ufffd"

    def escaped(match: re.Match[bytes]) -> bytes:
        if len(match[0]) > 1:
            return match[0]
        repairs.note(ESCAPE, byte=offset + match.start())
        return rb"\\"

    return _ESCAPE_SEQUENCE.sub(escaped, _PAIR_OR_HALF.sub(whole, text))


def _repair_values(text: bytes, pattern: re.Pattern[bytes], words: str, repairs: Repairs, offset: int) -> bytes:
    matches = list(pattern.finditer(text))
    if not matches:
        return text
    inside = lay_out(text).within_texts(np.array([match.start(1) for match in matches]))
    found = [match for match, within in zip(matches, inside.tolist(), strict=True) if not within]
    if found:
        repairs.note(words, len(found), byte=offset + found[0].start(1))
    pieces, done = [], 0
    for match in found:
        pieces += [text[done : match.start(1)], b"null"]
        done = match.end()
    return b"".join([*pieces, text[done:]])
