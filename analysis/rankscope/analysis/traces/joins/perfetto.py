"""Merges the traces of many ranks into one that opens in Perfetto: one process per rank with its threads and
streams, on a common clock."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import msgspec

from rankscope.analysis.step_graph.clock_alignment import ClockShift
from rankscope.analysis.traces.reader.json_stream import Ending, Text, batches, blocks_of, inflate
from rankscope.analysis.traces.reader.trace_file import skip_to_events
from rankscope.analysis.traces.trace import Repairs

RawEvent: TypeAlias = dict[str, msgspec.Raw]
# A rank's process has this number plus the rank. 0 is avoided because viewers treat it as the kernel's idle task.
FIRST_PROCESS = 1_000_000
# Larger than any thread id of an operating system; for tracks whose own number is taken or not a number.
_FIRST_OWN_THREAD = 1 << 23
_DEVICE_ORDER, _OTHER_ORDER = 1 << 24, 1 << 25
ON_DEVICE = frozenset(
    f'"{category}"'.encode()
    for category in (
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "gpu_user_annotation",
        "cuda_sync",
        "hip_sync",
        "mtia_ccp_events",
    )
)
_PROCESS_METADATA = frozenset({b'"process_name"', b'"process_labels"', b'"process_sort_index"'})
_THREAD_METADATA = frozenset({b'"thread_name"', b'"thread_sort_index"'})
# Times are written relative to this long before the first event of the first rank, so that none is negative. A float
# holds nanoseconds there, but not since 1970.
LEAD_NS = 600_000_000_000
_FLOW_BITS = 32
_MISSING = msgspec.Raw(b"")
_NO_TEXT = msgspec.Raw(b'""')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*"?(-?\d{1,19})(?!\d)')
_PLAIN = re.compile(rb"(-?)(\d+)(?:\.(\d*))?")
# Larger values exceed 64 bits in nanoseconds and are not times.
_FURTHEST_DIGITS = 16
_FURTHEST_MICROSECONDS = 10**_FURTHEST_DIGITS
_FURTHEST_NS = 1 << 62
_EVENTS = msgspec.json.Decoder(list[RawEvent])
_ENCODER = msgspec.json.Encoder()


@dataclass
class RankTracks:
    """Maps a (process, thread) of a rank's file to a thread number. Streams of several devices may have equal
    numbers, and so may a device and the host."""

    position: int  # of the rank among all: the order of the tracks
    rank: int
    _threads: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _next_thread: int = _FIRST_OWN_THREAD
    _on_device: set[tuple[bytes, bytes]] = field(default_factory=set)
    _thread_metadata: dict[tuple[bytes, bytes], list[RawEvent]] = field(default_factory=dict)

    @property
    def process(self) -> int:
        return FIRST_PROCESS + self.rank

    def thread(self, pid: bytes, tid: bytes, category: bytes) -> int:
        key = (pid, tid)
        if category in ON_DEVICE:
            self._on_device.add(key)
        number = self._threads.get(key)
        if number is None:
            number = int(tid) if tid.isdigit() and pid.isdigit() and len(tid) < 10 else self._next_thread
            while number in self._taken:
                number = self._next_thread
                self._next_thread += 1
            self._threads[key] = number
            self._taken.add(number)
        return number

    def keep_thread_metadata(self, pid: bytes, tid: bytes, event: RawEvent) -> None:
        """Kept until it is known which threads have events: traces also name streams of devices that were never
        used."""
        self._thread_metadata.setdefault((pid, tid), []).append(event)

    def metadata(self) -> Iterator[dict[str, Any]]:
        """Metadata events that name and order the process and its threads: host, then devices, then the profiler's
        own."""
        yield self._metadata_event("process_name", 0, name=f"rank {self.rank}")
        yield self._metadata_event("process_sort_index", 0, sort_index=self.position)
        for (pid, tid), number in self._threads.items():
            if (pid, tid) in self._on_device:
                device, stream = pid.decode(errors="replace"), tid.decode(errors="replace")
                order = _DEVICE_ORDER + (int(stream) if tid.isdigit() and len(tid) < 10 else 0)
                yield self._metadata_event("thread_name", number, name=f"GPU {device} stream {stream}")
                yield self._metadata_event("thread_sort_index", number, sort_index=order)
            elif not pid.isdigit():
                name = tid.decode(errors="replace").strip('"') or "profiler"
                yield self._metadata_event("thread_name", number, name=name)
                yield self._metadata_event("thread_sort_index", number, sort_index=_OTHER_ORDER)
            else:
                for event in self._thread_metadata.get((pid, tid), []):
                    yield {**event, "pid": self.process, "tid": number}

    def _metadata_event(self, kind: str, thread: int, **arguments: object) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": self.process, "tid": thread, "ts": 0, "args": arguments}


def merge_for_perfetto(
    files: Iterable[tuple[int, bytes | memoryview]], shifts: Mapping[int, ClockShift]
) -> Iterator[bytes]:
    """Yield pieces of one JSON text from (rank, file) in the order in which the ranks are shown; a file may be gzip.
    Only a piece of one file is held at a time, so `files` may open them one by one. A rank without a shift keeps its
    clock, unless it differs by more than ten minutes from the first rank's. All events are kept, except names of
    processes and of threads without events."""
    origin: int | None = None
    separator = b""
    for position, (rank, data) in enumerate(files):
        base = _base_ns(data)
        shift = shifts.get(rank, ClockShift())
        text = Text(inflate(blocks_of(data)), Repairs())
        skip_to_events(text)
        writer: _RankWriter | None = None
        for batch in batches(text, Ending()):
            events = _EVENTS.decode(in_utf8(batch.text))
            if writer is None:
                first = _first_ns(events, base) + shift.offset_ns
                if origin is None:
                    # Invalid times are written as they are: the header holds 64 bits.
                    origin = (first if abs(first) < _FURTHEST_NS else 0) - LEAD_NS
                    yield _head(origin)
                elif abs(first - origin - LEAD_NS) > LEAD_NS:
                    # This clock could not be aligned and is implausible: shown from the first rank's beginning.
                    shift = ClockShift(shift.offset_ns + origin + LEAD_NS - first)
                writer = _RankWriter(RankTracks(position, rank), base, origin, shift)
            kept = [event for event in map(writer.rewritten, events) if event]
            if kept:
                yield separator + _ENCODER.encode(kept)[1:-1]
                separator = b",\n"
        if writer is not None:
            yield separator + _ENCODER.encode(list(writer.tracks.metadata()))[1:-1]
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
            if name in _THREAD_METADATA:
                self.tracks.keep_thread_metadata(pid, tid, event)
            if name in _THREAD_METADATA or name in _PROCESS_METADATA:
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
    """A decoder that skips a string ignores its encoding; others would reject it."""
    return text if text.isascii() else text.decode(errors="replace").encode()


def nanoseconds(written: bytes) -> int | None:
    """Exact nanoseconds from a written number of microseconds; a float since 1970 resolves only quarters of
    microseconds."""
    written = written.strip(b'"')
    plain = _PLAIN.fullmatch(written)
    if plain is None:
        try:
            value = Decimal(written.decode(errors="replace"))
            # 1e999999 is a number too, with a million digits.
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
    """Usually before the events; otherwise the whole text is searched."""
    tail = b""
    for block in inflate(blocks_of(data)):
        window = tail + block
        found = _BASE.search(window)
        if found:
            return int(found[1])
        tail = window[-64:]
    return 0


def _first_ns(events: list[RawEvent], base_ns: int) -> int:
    """The first time of an event other than metadata, which may have any time."""
    for event in events:
        start = nanoseconds(bytes(event.get("ts", _MISSING)))
        if start is not None and bytes(event.get("ph", _MISSING)) != b'"M"':
            return base_ns + start
    return base_ns
