"""Cuts a trace file to a range of host time and keeps the device work launched in it; finds the whole steps that the
traces of several ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.traces.breakdown import Breakdown
from rankscope.analysis.traces.joins.perfetto import ON_DEVICE, RawEvent, in_utf8, microseconds, nanoseconds
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, repair_json
from rankscope.analysis.traces.reader.json_stream import Ending, Text, batches, find_events, inflate
from rankscope.analysis.traces.reader.metadata import base_time_ns, describe
from rankscope.analysis.traces.steps import Steps, first_whole
from rankscope.analysis.traces.trace import ABSENT, Category, Repairs, Trace, TraceError

# What a profiler writes before its events takes a few kilobytes, with a long list of process groups some hundred.
MAX_HEAD_BYTES = 8 << 20
# Ranks that share no step among so many share none.
MAX_RUNS = 1024
# The nearest run begins among the steps around the same moment.
RUNS_AROUND = 3
# Written again from other sources.
_REPLACED = ("traceEvents", "distributedInfo", "")
_EVENTS = msgspec.json.Decoder(list[RawEvent])
_HEAD = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()
_MISSING = msgspec.Raw(b"")
_ARROW = b'"ac2g"'
_FRAME = b'"python_function"'
_DEVICE_MARK = b'"gpu_user_annotation"'


class _Ties(msgspec.Struct, gc=False):
    """The fields that link a device event to a host event."""

    correlation: Any = ABSENT
    external_id: Any = msgspec.field(default=ABSENT, name="External id")


_TIES = msgspec.json.Decoder(_Ties)


@dataclass(frozen=True)
class Outline:
    """What is needed of a trace to cut its file later."""

    base_ns: int
    call_start_ns: Ints
    call_correlation: Ints
    mark_start_ns: Ints
    mark_external_id: Ints

    def stretch(self, start_ns: int, end_ns: int) -> Stretch:
        """Times are relative to the trace's base, as in its columns."""
        calls = (self.call_start_ns >= start_ns) & (self.call_start_ns < end_ns)
        marks = (self.mark_start_ns >= start_ns) & (self.mark_start_ns < end_ns)
        return Stretch(
            self.base_ns + start_ns,
            self.base_ns + end_ns,
            has_calls=len(self.call_start_ns) > 0,
            correlations=frozenset(self.call_correlation[calls].tolist()),
            external_ids=frozenset(self.mark_external_id[marks].tolist()),
        )


@dataclass(frozen=True)
class Stretch:
    """A range of host time, in Unix time."""

    start_ns: int
    end_ns: int
    has_calls: bool  # whether the whole trace has any; without, device work is selected by its own time
    correlations: frozenset[int]  # of the runtime calls in the range
    external_ids: frozenset[int]  # of the host annotations in the range


def outline(trace: Trace) -> Outline:
    calls = trace.of(Category.RUNTIME, Category.DRIVER) & (trace.correlation != ABSENT)
    marks = trace.of(Category.USER_ANNOTATION) & (trace.external_id != ABSENT)
    return Outline(
        trace.base_ns,
        trace.start_ns[calls],
        trace.correlation[calls],
        trace.start_ns[marks],
        trace.external_id[marks],
    )


def cut(
    blocks: Iterable[bytes],
    stretch: Stretch | None,
    head: Mapping[str, Any],
    *,
    distributed: Mapping[str, Any],
    mark: Mapping[str, Any] | None = None,
) -> Iterator[bytes]:
    """Yield pieces of the JSON text of a file that `read_trace` accepts, cut to `stretch`; without it, with all events.
    `head` replaces the file's own metadata of the same names, `distributed` its rank information. Metadata after the
    events is dropped; names of processes and threads are kept. `mark` is an event written first, at the start of the
    range: steps that are bounded by optimizers then begin there and not with the next operator.

    Raises TraceError if the file does not give the base time before its events."""
    text = Text(inflate(blocks), Repairs())
    own = _open(text)
    base_ns = base_time_ns(describe(_ENCODER.encode(own), Repairs(), offset=0), Repairs())
    kept = {name: value for name, value in own.items() if name not in _REPLACED and name not in head}
    distributed_info = {**_mapping(own.get("distributedInfo")), **distributed}
    written: dict[str, Any] = {**kept, "baseTimeNanoseconds": base_ns, **head, "distributedInfo": distributed_info}
    yield _ENCODER.encode(written)[:-1] + b',"traceEvents":[\n'
    separator = b""
    if mark is not None and stretch is not None:
        yield _ENCODER.encode({**mark, "ts": microseconds(stretch.start_ns - base_ns)})
        separator = b",\n"
    for batch in batches(text, Ending()):
        plain = in_utf8(batch.text)
        if stretch is None:
            left = plain[1:-1].strip()
        else:
            events = _EVENTS.decode(plain)
            left = _ENCODER.encode([event for event in events if _belongs(event, stretch, base_ns)])[1:-1]
        if left:
            yield separator + left
            separator = b",\n"
    yield b"\n]}"


def _open(text: Text) -> dict[str, msgspec.Raw]:
    """Advance to the first event and return the fields before it."""
    found = find_events(text, limit_bytes=MAX_HEAD_BYTES)
    if found is None or text.held[found[1] : found[1] + 1] != b"[":
        raise TraceError("traceEvents not found in the first megabytes of the file")
    before, place = found
    try:
        head = _HEAD.decode(repair_json(before.removeprefix(b"\xef\xbb\xbf"), Repairs(), offset=0))
    except DECODE_ERRORS:
        raise TraceError("the metadata before traceEvents cannot be read") from None
    text.drop(place + 1)
    return head


def _mapping(value: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    try:
        return {} if value is None else _HEAD.decode(value)
    except DECODE_ERRORS:
        return {}


def _belongs(event: RawEvent, stretch: Stretch, base_ns: int) -> bool:
    if bytes(event.get("ph", _MISSING)) == b'"M"':
        return True
    category = bytes(event.get("cat", _MISSING))
    if category == _ARROW and stretch.has_calls:
        return _integer(event.get("id", _MISSING)) in stretch.correlations
    if category in ON_DEVICE and stretch.has_calls:
        return _is_launched(event, category, stretch)
    start = nanoseconds(bytes(event.get("ts", _MISSING)))
    if start is None:
        return False
    if category == _FRAME:
        return _clip(event, start, stretch.start_ns - base_ns, stretch.end_ns - base_ns)
    return stretch.start_ns <= start + base_ns < stretch.end_ns


def _is_launched(event: RawEvent, category: bytes, stretch: Stretch) -> bool:
    try:
        ties = _TIES.decode(event.get("args", _MISSING))
    except DECODE_ERRORS:
        return False
    if category == _DEVICE_MARK:
        return isinstance(ties.external_id, int) and ties.external_id in stretch.external_ids
    return isinstance(ties.correlation, int) and ties.correlation in stretch.correlations


def _clip(event: RawEvent, start_ns: int, begin_ns: int, end_ns: int) -> bool:
    """Shorten functions that overlap the border of the range, so that events keep their callers."""
    end = start_ns + (nanoseconds(bytes(event.get("dur", _MISSING))) or 0)
    if start_ns >= end_ns or end <= begin_ns:
        return False
    if start_ns < begin_ns or end > end_ns:
        start = max(start_ns, begin_ns)
        event["ts"], event["dur"] = microseconds(start), microseconds(min(end, end_ns) - start)
    return True


def _integer(written: msgspec.Raw) -> int:
    text = bytes(written)
    return int(text) if text.isdigit() and len(text) < 20 else ABSENT


@dataclass(frozen=True)
class WholeSteps:
    """Consecutive steps on the host, relative to the trace's base."""

    base_ns: int
    start_ns: Ints
    end_ns: Ints
    duration_ns: Ints  # on the device if there is one, otherwise on the host

    def __len__(self) -> int:
        return len(self.start_ns)

    def run(self, first: int, count: int) -> WholeSteps:
        part = slice(first, first + count)
        return WholeSteps(self.base_ns, self.start_ns[part], self.end_ns[part], self.duration_ns[part])

    @property
    def unix_ns(self) -> Ints:
        return self.start_ns + self.base_ns

    @property
    def seconds(self) -> float | None:
        """The median."""
        return float(np.median(self.duration_ns)) / 1e9 if len(self) else None


def find_whole_steps(trace: Trace, steps: Steps, breakdown: Breakdown | None) -> WholeSteps:
    """Steps that are whole on the host and have all of their device work."""
    first, last = first_whole(steps), len(steps)
    durations = steps.end_ns - steps.start_ns
    if breakdown is not None and not breakdown.on_host:
        durations = np.array([step.span_ns for step in breakdown.steps], dtype=np.int64)
        last = first + sum(step.whole for step in breakdown.steps)
    part = slice(first, last)
    return WholeSteps(trace.base_ns, steps.start_ns[part], steps.end_ns[part], durations[part])


def common_run(steps_of: Mapping[int, WholeSteps], count: int) -> dict[int, int] | None:
    """For each rank, the position of the first of `count` steps that begin at the same boundary on all ranks, as
    early as possible; None if there is no such run. Ranks pass a boundary at about the same time, so the run nearest
    in time is the same one."""
    if not steps_of or any(len(steps) < count for steps in steps_of.values()):
        return None
    reference = max(steps_of.values(), key=lambda steps: int(steps.unix_ns[0]))
    usual_ns = {rank: float(np.median(steps.end_ns - steps.start_ns)) for rank, steps in steps_of.items()}
    for position in range(min(len(reference) - count + 1, MAX_RUNS)):
        moments = reference.unix_ns[position : position + count]
        nearest = {rank: _nearest_run(steps, moments, usual_ns[rank]) for rank, steps in steps_of.items()}
        if all(place is not None for place in nearest.values()):
            return {rank: place for rank, place in nearest.items() if place is not None}
    return None


def _nearest_run(steps: WholeSteps, moments: Ints, usual_ns: float) -> int | None:
    """None if a run that was not recorded would be nearer."""
    last = len(steps) - len(moments)
    near = int(np.searchsorted(steps.unix_ns, moments[0]))
    first = min(max(near - RUNS_AROUND, 0), last)
    part = steps.unix_ns[first : min(near + RUNS_AROUND, last) + len(moments)]
    starts = np.lib.stride_tricks.sliding_window_view(part, len(moments))
    distances = np.abs(starts - moments).mean(axis=1)
    best = int(distances.argmin())
    return None if first + best in (0, last) and distances[best] > usual_ns / 2 else first + best
