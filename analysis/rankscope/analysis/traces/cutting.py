"""Cuts a trace to a stretch of time on the host, with the work on devices that was launched in it, whenever it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT, Category, Trace
from rankscope.analysis.traces.inflating import blocks_of, inflate
from rankscope.analysis.traces.perfetto import go_to_events, nanoseconds
from rankscope.analysis.traces.perfetto_tracks import ON_DEVICE, RawEvent
from rankscope.analysis.traces.refusing import Repairs
from rankscope.analysis.traces.splitting import Ending, Text, batches
from rankscope.analysis.traces.steps import Steps

_EVENTS = msgspec.json.Decoder(list[RawEvent])
_ENCODER = msgspec.json.Encoder()
_MISSING = msgspec.Raw(b"")


class _Launched(msgspec.Struct, gc=False):
    correlation: int = ABSENT


_LAUNCHED = msgspec.json.Decoder(_Launched)


@dataclass(frozen=True)
class Stretch:
    """In the trace's own time, from its base."""

    start_ns: int
    end_ns: int
    correlations: Ints  # of the calls in it that launch work, sorted

    def launches(self, correlation: int) -> bool:
        place = int(np.searchsorted(self.correlations, correlation))
        return place < len(self.correlations) and int(self.correlations[place]) == correlation


def stretch_of(trace: Trace, start_ns: int, end_ns: int) -> Stretch:
    calls = trace.of(Category.RUNTIME, Category.DRIVER) & (trace.correlation != ABSENT)
    calls &= (trace.start_ns >= start_ns) & (trace.start_ns < end_ns)
    return Stretch(start_ns, end_ns, np.unique(trace.correlation[calls]))


def common_steps(steps_of: Mapping[int, Steps], base_ns_of: Mapping[int, int], count: int) -> dict[int, int] | None:
    """For each rank the position of its first step of a run of `count` whole ones that begins at the same boundary on
    all ranks, as early as possible; None if there is no such run.

    Ranks in step pass a boundary at about the same time. The first step of a trace is never used: the trace may have
    begun in the middle of it."""
    starts = {rank: steps.start_ns[1:] + base_ns_of[rank] for rank, steps in steps_of.items()}
    if not starts or any(len(values) < count for values in starts.values()):
        return None
    last_to_begin = max(starts, key=lambda rank: int(starts[rank][0]))
    # Back by up to half a step the others may have passed the same boundary just before.
    for position in range(len(starts[last_to_begin]) - count + 1):
        moment = int(starts[last_to_begin][position])
        nearest = {rank: int(np.argmin(np.abs(values - moment))) for rank, values in starts.items()}
        if all(nearest[rank] + count <= len(starts[rank]) for rank in starts):
            return {rank: place + 1 for rank, place in nearest.items()}
    return None


def cut_events(data: bytes | memoryview, stretch: Stretch, head: Mapping[str, Any]) -> Iterator[bytes]:
    """Pieces of the JSON text of the trace that is left, with `head` for its description. Notes on processes and
    threads are kept."""
    text = Text(inflate(blocks_of(data)), Repairs())
    go_to_events(text)
    yield _ENCODER.encode(head)[:-1] + (b"," if head else b"") + b'"traceEvents":[\n'
    separator = b""
    for batch in batches(text, Ending()):
        kept = [event for event in _EVENTS.decode(batch.text) if _belongs(event, stretch)]
        if kept:
            yield separator + _ENCODER.encode(kept)[1:-1]
            separator = b",\n"
    yield b"\n]}"


def _belongs(event: RawEvent, stretch: Stretch) -> bool:
    if bytes(event.get("ph", _MISSING)) == b'"M"':
        return True
    if bytes(event.get("cat", _MISSING)) in ON_DEVICE and "args" in event:
        try:
            correlation = _LAUNCHED.decode(event["args"]).correlation
        except msgspec.DecodeError:
            correlation = ABSENT
        if correlation != ABSENT and len(stretch.correlations):
            return stretch.launches(correlation)
    start = nanoseconds(bytes(event.get("ts", _MISSING)))
    return start is not None and stretch.start_ns <= start < stretch.end_ns
