"""One trace of many ranks that opens in Perfetto: each rank's processes together and in order, on a common clock."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation

import msgspec

from rankscope.analysis.traces.joins.aligning import ClockShift
from rankscope.analysis.traces.joins.perfetto_tracks import PROCESS_NOTES, THREAD_NOTES, RankTracks, RawEvent
from rankscope.analysis.traces.reading.inflating import blocks_of, inflate
from rankscope.analysis.traces.reading.refusing import Repairs, TraceError
from rankscope.analysis.traces.reading.splitting import Ending, Text, batches

# Times are written from so long before the first event of the first rank, that none becomes negative: a float holds
# nanoseconds there, which it does not since 1970.
BEFORE_FIRST_NS = 600_000_000_000
_HEAD_BYTES = 256 << 10
_FLOW_BITS = 32
_MISSING = msgspec.Raw(b"")
_NO_TEXT = msgspec.Raw(b'""')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*"?(-?\d{1,19})(?!\d)')
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_PLAIN = re.compile(rb"(-?)(\d+)(?:\.(\d*))?")
# Beyond what 64 bits hold in nanoseconds nothing is a time.
_FURTHEST_DIGITS = 16
_FURTHEST_MICROSECONDS = 10**_FURTHEST_DIGITS
_FURTHEST_NS = 1 << 62
_EVENTS = msgspec.json.Decoder(list[RawEvent])
_ENCODER = msgspec.json.Encoder()


def merge_for_perfetto(
    files: Iterable[tuple[int, bytes | memoryview]], shifts: Mapping[int, ClockShift]
) -> Iterator[bytes]:
    """Pieces of one JSON text, from (rank, file) in the order in which the ranks are to stand; a file may be gzip. At
    no time is more than one file's piece held, so that `files` may open them one by one. A rank without a shift keeps
    its clock, unless that is more than ten minutes from the first rank's. Every event is kept, but for the names that
    files give to processes and to threads without events."""
    origin: int | None = None
    separator = b""
    for position, (rank, data) in enumerate(files):
        base = _base_ns(data)
        shift = shifts.get(rank, ClockShift())
        text = Text(inflate(blocks_of(data)), Repairs())
        go_to_events(text)
        writer: _RankWriter | None = None
        for batch in batches(text, Ending()):
            events = _EVENTS.decode(in_utf8(batch.text))
            if writer is None:
                first = _first_ns(events, base) + shift.offset_ns
                if origin is None:
                    # What is no time is shown as it is: a header holds 64 bits.
                    origin = (first if abs(first) < _FURTHEST_NS else 0) - BEFORE_FIRST_NS
                    yield _head(origin)
                elif abs(first - origin - BEFORE_FIRST_NS) > BEFORE_FIRST_NS:
                    # Nothing aligned this clock, and what it says cannot be: shown from the first rank's beginning.
                    shift = ClockShift(shift.offset_ns + origin + BEFORE_FIRST_NS - first)
                writer = _RankWriter(RankTracks(position, rank), base, origin, shift)
            kept = [event for event in map(writer.rewritten, events) if event]
            if kept:
                yield separator + _ENCODER.encode(kept)[1:-1]
                separator = b",\n"
        if writer is not None:
            yield separator + _ENCODER.encode(list(writer.tracks.notes()))[1:-1]
            separator = b",\n"
    yield b"\n]}" if origin is not None else b'{"traceEvents":[]}'


def _head(origin_ns: int) -> bytes:
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
    return _ENCODER.encode(head)[:-1] + b',"traceEvents":[\n'


class _RankWriter:
    def __init__(self, tracks: RankTracks, base_ns: int, origin_ns: int, shift: ClockShift) -> None:
        self.tracks = tracks
        self._process = msgspec.Raw(b"%d" % tracks.process)
        self._base_ns = base_ns
        self._origin_ns = origin_ns
        self._shift = shift
        # Two files may use the same numbers for their arrows.
        self._flows = (tracks.position + 1) << _FLOW_BITS

    def rewritten(self, event: RawEvent) -> RawEvent | None:
        pid, tid = bytes(event.get("pid", _NO_TEXT)), bytes(event.get("tid", _NO_TEXT))
        if bytes(event.get("ph", _MISSING)) == b'"M"':
            name = bytes(event.get("name", _MISSING))
            if name in THREAD_NOTES:
                self.tracks.note_thread(pid, tid, event)
            if name in THREAD_NOTES or name in PROCESS_NOTES:
                return None
        event["tid"] = msgspec.Raw(b"%d" % self.tracks.thread(pid, tid, bytes(event.get("cat", _MISSING))))
        event["pid"] = self._process
        for key in ("id", "bind_id"):
            if key in event:
                event[key] = msgspec.Raw(b"%d" % (self._flows | _flow_number(bytes(event[key]))))
        if "ts" in event:
            self._move(event)
        return event

    def _move(self, event: RawEvent) -> None:
        start = nanoseconds(bytes(event["ts"]))
        if start is None:
            return
        absolute = start + self._base_ns
        moved = absolute + self._shift.offset_ns
        if self._shift.drift_ratio:
            moved += round(self._shift.drift_ratio * (absolute - self._shift.origin_ns))
            lasted = nanoseconds(bytes(event.get("dur", _MISSING)))
            if lasted is not None:
                event["dur"] = microseconds(lasted + round(self._shift.drift_ratio * lasted))
        event["ts"] = microseconds(moved - self._origin_ns)


def in_utf8(text: bytes) -> bytes:
    """A reader that skips a text does not mind its encoding; others would."""
    return text if text.isascii() else text.decode(errors="replace").encode()


def nanoseconds(written: bytes) -> int | None:
    """Of a number of microseconds as it is written: exact, where a float since 1970 knows quarters of microseconds."""
    written = written.strip(b'"')
    plain = _PLAIN.fullmatch(written)
    if plain is None:
        try:
            value = Decimal(written.decode(errors="replace"))
            # 1e999999 is a number too, of a million digits.
            return int(value * 1000) if abs(value) < _FURTHEST_MICROSECONDS else None
        except (InvalidOperation, ValueError, OverflowError):
            return None
    if len(plain[2]) > _FURTHEST_DIGITS:
        return None
    whole = int(plain[2]) * 1000 + int(((plain[3] or b"") + b"000")[:3])
    return -whole if plain[1] else whole


def microseconds(value_ns: int) -> msgspec.Raw:
    sign = b"-" if value_ns < 0 else b""
    return msgspec.Raw(b"%s%d.%03d" % (sign, abs(value_ns) // 1000, abs(value_ns) % 1000))


def _flow_number(written: bytes) -> int:
    if written.isdigit() and len(written) < 10:
        return int(written)
    return zlib.crc32(written)


def _base_ns(data: bytes | memoryview) -> int:
    """Usually before the events; where it is not, the whole text is searched."""
    tail = b""
    for block in inflate(blocks_of(data)):
        window = tail + block
        found = _BASE.search(window)
        if found:
            return int(found[1])
        tail = window[-64:]
    return 0


def go_to_events(text: Text) -> None:
    """Just behind the bracket that opens the events. For texts that `read_trace` took."""
    text.hold(_HEAD_BYTES)
    start = len(text.held) - len(text.held.removeprefix(b"\xef\xbb\xbf").lstrip())
    if text.held[start : start + 1] == b"[":
        text.drop(start + 1)
        return
    while True:
        found = _EVENTS_KEY.search(text.held)
        if found:
            text.drop(found.end())
            return
        if text.ended:
            raise TraceError("no traceEvents found: not a Kineto trace")
        text.hold(2 * len(text.held))


def _first_ns(events: list[RawEvent], base_ns: int) -> int:
    """Of what happened, not of what describes: notes may bear any time."""
    for event in events:
        start = nanoseconds(bytes(event.get("ts", _MISSING)))
        if start is not None and bytes(event.get("ph", _MISSING)) != b'"M"':
            return base_ns + start
    return base_ns
