"""One typical step of a replay as rectangles: what the host and the streams of each rank do, and when.

What is too short to be seen is joined: a slice of a lane then has one rectangle a kind of activity, whose height is the
share of the slice that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from rankscope.analysis.quantities import shorten_all
from rankscope.analysis.replay.changes import Change
from rankscope.analysis.replay.edits import Ranks, Traced
from rankscope.analysis.replay.graph import Graph
from rankscope.analysis.replay.replay import Times, call_starts, collective_wait_ns, step_ends
from rankscope.analysis.stats.robust import Bools, Floats, Ints, join_rows, number_groups, take_rows
from rankscope.analysis.traces.kernels import Kind
from rankscope.analysis.traces.trace import ABSENT, Trace

MAX_RANKS = 8
MAX_STREAMS = 6  # of a rank
MAX_RECTANGLES = 2_000
# Slices of the axis, at most: about one for each pixel of a page.
_SLICES = 600
_COARSER = 1.25
_NEAR_RATIO = 0.01
_NAME_CHARACTERS = 76
_HOST = -1  # as the number of a stream


class Activity(IntEnum):
    """In the order of their stacking, from below."""

    HOST = 0
    CALL = 1
    DEVICE_WAIT = 2
    INPUT_WAIT = 3
    COMPUTE = 4
    COMMUNICATION = 5
    RANK_WAIT = 6
    COPY = 7


_OF_KIND = np.array([Activity.COMPUTE] * len(Kind))
_OF_KIND[Kind.COMMUNICATION], _OF_KIND[Kind.MEMORY] = Activity.COMMUNICATION, Activity.COPY


@dataclass(frozen=True, order=True)
class Lane:
    rank: int
    stream: int  # position among those of the trace; the host's is before them
    name: str  # host, stream 7


@dataclass(frozen=True)
class Spans:
    lane: Ints
    start_ns: Ints
    end_ns: Ints
    activity: Ints
    name: Ints  # of the longest event, in the rank's trace; ABSENT for the host's own time
    events: Ints  # 0 for the rest of a span that was cut

    @property
    def length_ns(self) -> Ints:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Rectangles(Spans):
    busy_ns: Ints
    bottom_ratio: Floats  # of the lane's height
    height_ratio: Floats


@dataclass(frozen=True)
class Timeline:
    """Times since the beginning of the step, which is the end of the one before."""

    step: int  # its number
    duration_ns: int
    lanes: tuple[Lane, ...]  # by rank
    streams_left_out: int
    drawn: Rectangles
    names: tuple[str, ...]  # of what is drawn; shortened, empty for the host's own time


@dataclass
class StepTimelines:
    """For `forecast` as its `watch`. Holds a few hundred KiB a replay, whatever the size of the traces."""

    of_changes: dict[str, Timeline] = field(default_factory=dict)  # by the name of the prediction
    recorded: Timeline | None = None
    replayed: Timeline | None = None  # without a change
    ranks: tuple[int, ...] = ()  # that are drawn
    ranks_left_out: int = 0
    least_waiting: int | None = None  # the rank that waits least for others, if any waits
    most_waiting: int | None = None

    def __call__(self, changes: tuple[Change, ...], ranks: Ranks, times: Mapping[int, Times]) -> None:
        if changes:
            name = "+".join(change.name for change in changes)
            axis_ns = self.replayed.duration_ns if self.replayed is not None else 0
            self.of_changes[name] = step_timeline(ranks, times, self.ranks, axis_ns)
            return
        waits = {rank: int(collective_wait_ns(one.graph, times[rank]).sum()) for rank, one in ranks.items()}
        if any(waits.values()):
            self.least_waiting = min(waits, key=lambda rank: waits[rank])
            self.most_waiting = max(waits, key=lambda rank: waits[rank])
        wanted = [rank for rank in (self.least_waiting, self.most_waiting) if rank is not None]
        self.ranks = tuple(sorted(list(dict.fromkeys([*wanted, *sorted(ranks)]))[:MAX_RANKS]))
        self.ranks_left_out = len(ranks) - len(self.ranks)
        self.replayed = step_timeline(ranks, times, self.ranks)
        recorded = {rank: _recorded(ranks[rank].graph) for rank in self.ranks}
        self.recorded = step_timeline(ranks, recorded, self.ranks)


@dataclass(frozen=True)
class _Steps:
    """The whole steps of a rank: each begins when the one before ends."""

    number: Ints
    begin_ns: Ints
    end_ns: Ints

    @property
    def mean_ns(self) -> float:
        return float(self.end_ns[-1] - self.begin_ns[0]) / len(self.number)

    @property
    def typical(self) -> int:
        """The position of the first that is near the mean; else of the nearest. In the last steps of a trace, a host
        that is ahead of its device has nothing left to do."""
        off = np.abs(self.end_ns - self.begin_ns - self.mean_ns)
        return int((off <= max(_NEAR_RATIO * self.mean_ns, float(off.min()))).argmax())


def step_timeline(ranks: Ranks, times: Mapping[int, Times], drawn: Sequence[int], axis_ns: int = 0) -> Timeline:
    """A step whose duration is near the mean, on the ranks that are `drawn`. The axis that it is drawn on may be longer
    than the step."""
    steps = {rank: _whole_steps(ranks[rank].graph, times[rank]) for rank in drawn}
    middle = float(np.median([one.mean_ns for one in steps.values()]))
    leader = min(steps.values(), key=lambda one: abs(one.mean_ns - middle))
    number = int(leader.number[leader.typical])
    begin = int(leader.begin_ns[leader.typical])
    duration = max(int(leader.end_ns[leader.typical]) - begin, 1)
    lanes: list[Lane] = []
    parts: list[Spans] = []
    left_out = 0
    for rank in drawn:
        since = _begin(steps[rank], number, begin, duration)
        spans = _within(_spans(ranks[rank].graph, ranks[rank].trace, times[rank]), since, duration)
        streams, dropped = _busiest(spans)
        left_out += dropped
        for stream in (_HOST, *streams):
            own = take_rows(spans, spans.lane == stream)
            parts.append(_apart(replace(own, lane=np.full(len(own.lane), len(lanes)))))
            lanes.append(Lane(rank, stream, "host" if stream == _HOST else _stream_name(ranks[rank], stream)))
    spans, slice_ns = join_rows(parts), -(-max(duration, axis_ns) // _SLICES)
    made = _joined(spans, slice_ns, duration)
    while len(made.lane) > MAX_RECTANGLES and slice_ns < duration:
        slice_ns = int(slice_ns * _COARSER) + 1
        made = _joined(spans, slice_ns, duration)
    names = _names([ranks[lane.rank].trace for lane in lanes], made)
    return Timeline(number, duration, tuple(lanes), left_out, made, names)


def _recorded(graph: Graph) -> Times:
    return Times(graph.call_end_ns, graph.start_ns, graph.start_ns + graph.duration_ns)


def _whole_steps(graph: Graph, times: Times) -> _Steps:
    first, last = graph.step_range
    ends, starts = step_ends(graph, times.call_end_ns, times.work_end_ns), call_starts(graph, times)
    if last > first:
        number, begin, end = graph.steps.number[first + 1 : last + 1], ends[first:last], ends[first + 1 : last + 1]
    else:
        number, end = graph.steps.number[first : first + 1], ends[first : first + 1]
        begin = starts[graph.call_step == first][:1]
    # The end of a step without a call is not known.
    earliest = np.concatenate((starts, times.work_start_ns)).min()
    return _Steps(number, np.maximum(begin, earliest), end)


def _begin(steps: _Steps, number: int, begin: int, duration: int) -> int:
    """Of the step on another rank: the same moment, unless the ranks have no clock in common."""
    same = np.flatnonzero(steps.number == number)
    own = int(steps.begin_ns[int(same[0]) if len(same) else steps.typical])
    return begin if abs(own - begin) <= duration / 2 else own


def _spans(graph: Graph, trace: Trace, times: Times) -> Spans:
    """All of a rank. The lane is the stream, or _HOST."""
    start, end = call_starts(graph, times), times.call_end_ns
    before = np.concatenate((start[:1], end[:-1]))
    ready = start - np.clip(graph.input_ns, 0, np.maximum(start - before, 0))
    launched = np.minimum(start + graph.own_ns, end)
    call, work = trace.name[graph.call_row], trace.name[graph.work_row]
    entered = times.work_start_ns + collective_wait_ns(graph, times)
    parts = [
        _same(_HOST, before, ready, Activity.HOST, np.full(len(call), ABSENT)),
        _same(_HOST, ready, start, Activity.INPUT_WAIT, np.full(len(call), ABSENT)),
        _same(_HOST, start, launched, Activity.CALL, call),
        _same(_HOST, launched, end, Activity.DEVICE_WAIT, call),
        _same(graph.stream, times.work_start_ns, entered, Activity.RANK_WAIT, work),
        _same(graph.stream, entered, times.work_end_ns, _OF_KIND[graph.kind], work),
    ]
    return join_rows(parts)


def _same(lane: Ints | int, start: Ints, end: Ints, activity: Ints | int, name: Ints) -> Spans:
    count = len(start)
    return Spans(
        np.broadcast_to(lane, count), start, end, np.broadcast_to(activity, count), name, np.ones(count, np.int64)
    )


def _within(spans: Spans, since: int, duration: int) -> Spans:
    start, end = (np.clip(moment - since, 0, duration) for moment in (spans.start_ns, spans.end_ns))
    return take_rows(replace(spans, start_ns=start, end_ns=end), end > start)


def _busiest(spans: Spans) -> tuple[list[int], int]:
    """Streams in the order of their numbers, and how many others have work."""
    on_device = take_rows(spans, spans.lane != _HOST)
    busy = np.bincount(on_device.lane, on_device.length_ns)
    used = np.flatnonzero(busy)
    return sorted(used[np.argsort(-busy[used], kind="stable")][:MAX_STREAMS].tolist()), max(len(used) - MAX_STREAMS, 0)


def _apart(spans: Spans) -> Spans:
    """In order; what overlaps the spans before, as on two threads of the host, is cut."""
    spans = take_rows(spans, np.argsort(spans.start_ns, kind="stable"))
    reached = np.maximum.accumulate(spans.end_ns)
    start = np.maximum(spans.start_ns, np.concatenate(([0], reached[:-1])))
    return take_rows(replace(spans, start_ns=start), spans.end_ns > start)


def _stream_name(rank: Traced, stream: int) -> str:
    row = rank.graph.work_row[int((rank.graph.stream == stream).argmax())]
    devices = np.unique(rank.trace.device[rank.graph.work_row])
    name = f"stream {rank.trace.stream[row]}"
    return name if len(devices) == 1 else f"gpu {rank.trace.device[row]} {name}"


def _joined(spans: Spans, slice_ns: int, duration_ns: int) -> Rectangles:
    """Spans of a slice and longer stay as they are. Others are joined by slice and activity, between the long ones."""
    long = spans.length_ns >= slice_ns
    kept = take_rows(spans, long)
    full = Rectangles(
        **vars(kept),
        busy_ns=kept.length_ns,
        bottom_ratio=np.zeros(len(kept.lane)),
        height_ratio=np.ones(len(kept.lane)),
    )
    if long.all():
        return full
    short = _short(spans, long, slice_ns, duration_ns)
    group, activities = short.group, len(Activity)
    room = np.zeros(int(group.max()) + 1, np.int64)
    room[group] = short.high_ns - short.low_ns
    pair, of = np.unique(group * activities + short.spans.activity, return_inverse=True)
    length = short.spans.length_ns
    busy = np.bincount(of, length).astype(np.int64)
    longest = np.zeros(len(pair), np.int64)
    by_length = np.argsort(length, kind="stable")
    longest[of[by_length]] = by_length  # of the same pair the last stays
    ratio = busy / room[pair // activities]
    below = np.cumsum(ratio) - ratio
    first = np.concatenate(([True], np.diff(pair // activities) > 0))
    bottom = below - np.maximum.accumulate(np.where(first, below, 0.0))
    slices = replace(
        take_rows(short.spans, longest),
        start_ns=short.low_ns[longest],
        end_ns=short.high_ns[longest],
        events=np.bincount(of, short.spans.events).astype(np.int64),
    )
    return join_rows((full, Rectangles(**vars(slices), busy_ns=busy, bottom_ratio=bottom, height_ratio=ratio)))


@dataclass(frozen=True)
class _Short:
    """Spans that are shorter than a slice, cut at its borders, and the room that they share."""

    spans: Spans
    group: Ints
    low_ns: Ints
    high_ns: Ints


def _short(spans: Spans, long: Bools, slice_ns: int, duration_ns: int) -> _Short:
    place = np.arange(len(long))
    last = np.maximum.accumulate(np.where(long, place, ABSENT))
    following = np.minimum.accumulate(np.where(long, place, len(long))[::-1])[::-1]
    after = np.where(_in_lane(spans, last), spans.end_ns[last], 0)
    inside = np.minimum(following, len(long) - 1)
    until = np.where((following < len(long)) & _in_lane(spans, inside), spans.start_ns[inside], duration_ns)
    border = -(-spans.start_ns // slice_ns) * slice_ns
    border = np.where(spans.start_ns == border, border + slice_ns, border)
    crosses = spans.end_ns > border
    first = replace(spans, end_ns=np.minimum(spans.end_ns, border))
    rest = replace(spans, start_ns=border, events=np.zeros_like(spans.events))
    cut = join_rows([take_rows(first, ~long), take_rows(rest, ~long & crosses)])
    slot = cut.start_ns // slice_ns
    low, high = (np.concatenate((one[~long], one[~long & crosses])) for one in (after, until))
    group, _ = number_groups(cut.lane, slot, low)
    return _Short(cut, group, np.maximum(low, slot * slice_ns), np.minimum(high, (slot + 1) * slice_ns))


def _in_lane(spans: Spans, other: Ints) -> Bools:
    found: Bools = (other >= 0) & (spans.lane[other] == spans.lane)
    return found


def _names(traces: Sequence[Trace], spans: Spans) -> tuple[str, ...]:
    """Names of the rectangles' longest events; each is shortened once."""
    short: dict[tuple[int, int], str] = {}
    for lane, name in set(zip(spans.lane.tolist(), spans.name.tolist(), strict=True)):
        text = "" if name == ABSENT else traces[lane].named(name)
        short[lane, name] = shorten_all([text], _NAME_CHARACTERS)[0]
    return tuple(short[one] for one in zip(spans.lane.tolist(), spans.name.tolist(), strict=True))
