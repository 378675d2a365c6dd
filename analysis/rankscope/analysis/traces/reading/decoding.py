"""Events of a piece of text as typed records: only the fields the analysis reads, whatever else a user noted there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.analysis.traces.reading.mending import mend
from rankscope.analysis.traces.reading.refusing import Repairs, TraceError

UNREADABLE = "event left out because it cannot be read"
# Beyond this the file is not a trace with some damage but something else.
UNREADABLE_LIMIT = 1000

_NOTHING = msgspec.Raw()
_PLACE = re.compile(r" \(byte (\d+)\)")
# An event that begins, seen without counting brackets: how to find the way again behind a text with a stray quote.
_NEXT_EVENT = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|id)"\s*:)')


class Arguments(msgspec.Struct, gc=False):
    """Users may note anything under any name, so that no field insists on a type."""

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
    asynchronous: Any = msgspec.field(default=-1, name="Is asynchronized op")
    # Of "[memory]" instants.
    change_bytes: Any = msgspec.field(default=None, name="Bytes")
    allocated_bytes: Any = msgspec.field(default=-1, name="Total Allocated")
    reserved_bytes: Any = msgspec.field(default=-1, name="Total Reserved")
    device_type: Any = msgspec.field(default=-1, name="Device Type")
    memory_device: Any = msgspec.field(default=-1, name="Device Id")
    # Long lists in a trace with shapes; decoded only for the few events where they tell something.
    input_dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    input_type: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")


class Event(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = -1
    tid: Any = -1
    ts: Any = None
    dur: Any = None
    args: Arguments | list[msgspec.Raw] | str | int | float | bool | None = None


class WrittenTimes(msgspec.Struct, gc=False):
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING


_EVENTS = msgspec.json.Decoder(list[Event])
_TIMES = msgspec.json.Decoder(list[WrittenTimes])


@dataclass(frozen=True)
class Batch:
    """Events and the text they were read from."""

    text: bytes
    events: list[Event]

    def written_times(self) -> list[WrittenTimes]:
        """Of the same events, as they are written: what a float cannot hold."""
        return _TIMES.decode(self.text)


def decode(elements: bytes | memoryview) -> Batch:
    """The events of a text `{…}, {…}, …`. That it decodes proves that it was cut between two events: a cut within a
    text or within nested brackets leaves them open."""
    text = b"".join((b"[", elements, b"]"))
    return Batch(text, _EVENTS.decode(text))


DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_pieces(
    text: bytes, starts: list[int], ends: list[int], repairs: Repairs, *, offset: int
) -> tuple[list[Batch], int | None]:
    """The readable events among the pieces of a text, mended where they must be, and found by halving; those that
    cannot be read are noted and left out. When one of them has swallowed its neighbours (a stray quote does that),
    reading stops; the second result is where the next event seems to begin."""
    batches: list[Batch] = []
    waiting = [(0, len(starts))] if starts else []
    while waiting:
        first, last = waiting.pop()
        start, end = starts[first], ends[last - 1]
        try:
            batch = _decode_mended(text[start:end], repairs, offset=offset + start)
            if not batch.events:
                repairs.note("comma without an event behind it", byte=offset + start)
            batches.append(batch)
            continue
        except DECODE_ERRORS as error:
            reason = error
        if last - first > 1:
            middle = (first + last) // 2
            waiting += [(middle, last), (first, middle)]
            continue
        note_unreadable(repairs, explain(reason), byte=offset + end - len(text[start:end].lstrip()))
        # The last piece ends where the array seems to, which a stray quote may have feigned.
        following = next_event(text, start, len(text) if last == len(starts) else end)
        if following is not None:
            return batches, following
    return batches, None


def next_event(text: bytes, start: int, end: int) -> int | None:
    found = _NEXT_EVENT.search(text, start, end)
    return found.end() if found else None


def note_unreadable(repairs: Repairs, reason: str, *, byte: int) -> None:
    repairs.note(f"{UNREADABLE}: {reason}", byte=byte)
    if repairs.total(UNREADABLE) > UNREADABLE_LIMIT:
        raise TraceError(f"more than {UNREADABLE_LIMIT} events cannot be read; the last one: {reason}", byte=byte)


def _decode_mended(elements: bytes, repairs: Repairs, *, offset: int) -> Batch:
    try:
        return decode(elements)
    except DECODE_ERRORS as error:
        if not _may_be_mended(error):
            raise
        mends = Repairs()
        mended = mend(elements, mends, offset=offset)
        if mended == elements:
            raise
        batch = decode(mended)
        repairs.add(mends)
        return batch


def _may_be_mended(error: Exception) -> bool:
    if isinstance(error, msgspec.ValidationError):
        return "range" in str(error)  # a number that no float holds; else there is no event where one should be
    return not isinstance(error, RecursionError)


def explain(error: Exception) -> str:
    """A decoder's complaint in words, without its own idea of the place."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    words = _PLACE.sub("", str(error)).split(" - at ")[0].removeprefix("JSON is malformed: ").replace("`", "")
    return words[:1].lower() + words[1:] if not words.startswith("JSON") else words


def place_of(error: Exception) -> int | None:
    """How far into the text a decoder came."""
    found = _PLACE.search(str(error))
    return int(found[1]) if found else None
