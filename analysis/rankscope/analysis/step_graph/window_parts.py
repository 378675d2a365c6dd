"""Splits the time of a window's steps on the critical path into own work by rank and communication by kind of group."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import NamedTuple

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, bus_factor, size_bytes
from rankscope.analysis.stats.robust import (
    Bools,
    Floats,
    Ints,
    grouped_max,
    grouped_median,
    grouped_min,
    number_groups,
    order_by_group,
    rows_of_groups,
    take_rows,
)
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind, infer_group_kinds
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations

KINDS = tuple(GroupKind)
# Smaller messages than this share of the largest carry shapes, not a micro-batch.
MIN_MESSAGE_RATIO = 1 / 16
# No GPU holds as much, and no sum over records overflows.
MAX_BYTES = 1 << 40
# More stages than this are no pipeline.
MAX_STAGES = 64
# A group keeps its kind, and naming it costs as much as a third of the path: votes at first, then in some windows.
MAX_VOTES = 5
WINDOWS_BETWEEN_VOTES = 16
MAX_GROUPS_KNOWN = 1 << 14
# The last steps of a window are enough to name the groups of a large job.
MANY_ROWS = 1 << 15
STEPS_OF_MANY = 3


def one_forward_one_backward_ratio(stages: int, microbatches: int) -> float:
    """Idle share of a balanced 1F1B pipeline: (p−1)/(m+p−1). With an interleaved schedule, each chunk of a micro-batch
    counts as one."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and micro-batches must be positive, not {stages} and {microbatches}")
    return (stages - 1) / (microbatches + stages - 1)


class KindVotes:
    """The kinds of a job's groups, as most of the windows show that were looked at. Of a large job, each window has
    other groups."""

    def __init__(self) -> None:
        self._votes: dict[str, deque[GroupKind]] = {}
        self._alike: dict[tuple[int, int, int], GroupKind] = {}
        self._windows = 0

    def add(
        self, operations: Operations, stages: Mapping[int, int] | None = None, is_sample: bool = False
    ) -> tuple[GroupKind, ...]:
        """Return the kind of each of `operations.groups`. A group that some window names is not unknown. In a sample
        of a job's ranks, groups that were never looked at are what others are that do the same."""
        groups, profiles = operations.groups, _profiles(operations)
        if len(self._votes) > MAX_GROUPS_KNOWN:
            self._votes.clear()
            self._alike.clear()
        is_due = self._windows < MAX_VOTES or self._windows % WINDOWS_BETWEEN_VOTES == 0
        self._windows += 1
        alike = self._alike if is_sample else {}
        if is_due or any(
            group.name not in self._votes and profile not in alike
            for group, profile in zip(groups, profiles, strict=True)
        ):
            kinds = infer_group_kinds(_last_steps(operations), stages=stages)
            for group, kind in zip(groups, kinds, strict=True):
                votes = self._votes.setdefault(group.name, deque(maxlen=MAX_VOTES))
                if kind is not GroupKind.UNKNOWN:
                    votes.append(kind)
            alike |= {profile: self._kind(group.name) for group, profile in zip(groups, profiles, strict=True)}
        return tuple(
            self._kind(group.name) if group.name in self._votes else alike[profile]
            for group, profile in zip(groups, profiles, strict=True)
        )

    def _kind(self, name: str) -> GroupKind:
        votes = self._votes[name]
        return mode(reversed(votes)) if votes else GroupKind.UNKNOWN


def _profiles(operations: Operations) -> list[tuple[int, int, int]]:
    """Return the size of each group, its functions as bits, and its largest operation: the same for groups alike."""
    functions, largest = np.zeros((2, len(operations.groups)), dtype=np.int64)
    np.bitwise_or.at(functions, operations.group, 1 << operations.kind)
    np.maximum.at(largest, operations.group, operations.bytes)
    sizes = (len(group.ranks) for group in operations.groups)
    return list(zip(sizes, functions.tolist(), largest.tolist(), strict=True))


def _last_steps(operations: Operations) -> Operations:
    if len(operations) <= MANY_ROWS:
        return operations
    return take_rows(operations, np.isin(operations.step, np.unique(operations.step)[-STEPS_OF_MANY:]))


@dataclass(frozen=True)
class Inside:
    """The steps of a window, in order: the time of each, from the end of the step before to its own."""

    stretch: Ints
    begin_ns: Ints
    end_ns: Ints


class WindowTraffic(NamedTuple):
    """Sums over the ranks and steps of one window. Columns are by kind, in the order of KINDS."""

    transfer_ns: Floats
    bytes: Floats
    bus_bytes: Floats
    members: Floats  # ranks in such groups
    groups: Floats
    smallest: Floats  # group
    largest: Floats


@dataclass(frozen=True)
class WindowParts:
    """Sums over the steps of one window. Columns are by rank, or by kind in the order of KINDS."""

    steps: int
    total_ns: int
    stages: Ints  # by rank
    own_ns: Floats  # on the path
    excess_ns: Floats  # of it, what the rank's peers need less
    idle_ns: Floats  # of it, what a rank of the busiest stage waits meanwhile
    bubble_ratio: float  # that the schedule has by construction
    path_ns: Floats  # transfers on the path, by kind
    traffic: WindowTraffic


def split_window(
    graph: StepGraph,
    path: Ints,
    steps: Inside,
    is_inside: Bools,
    stages: dict[int, int],
    kinds: Sequence[GroupKind],
    peers_ns: Floats,
) -> WindowParts:
    """`is_inside`: rows of the steps. `stages`: by rank, in their order. `peers_ns`: by row, as in Peers."""
    operations, late = graph.operations, graph.last[path]
    ranks = np.array(list(stages), dtype=np.int64)
    position = np.searchsorted(ranks, operations.rank)
    stage = np.array(list(stages.values()), dtype=np.int64)
    kind_of_group = np.array([KINDS.index(kind) for kind in kinds], dtype=np.int64)
    kind = kind_of_group[operations.group]
    stretch = graph.meetings.stretch[path]
    arrived, before = operations.start_ns[late], graph.before[late]
    resumed = np.where(before >= 0, operations.stop_ns[before], arrived)
    own = _overlap(steps, stretch, resumed, arrived).astype(np.float64)
    stop = operations.stop_ns[path]
    transfer = _overlap(steps, stretch, stop - graph.transfer_ns[path], stop).astype(np.float64)

    def by_rank(weights: Floats) -> Floats:
        return _sums(position[late], len(ranks), weights)

    own_ns = by_rank(own)
    beyond = np.nan_to_num(1 - peers_ns[late] / np.maximum(graph.own_ns[late], 1)) * own
    rows = np.flatnonzero(is_inside)
    return WindowParts(
        steps=len(steps.end_ns),
        total_ns=int((steps.end_ns - steps.begin_ns).sum()),
        stages=stage,
        own_ns=own_ns,
        excess_ns=np.clip(by_rank(beyond), 0.0, own_ns),
        idle_ns=by_rank(_idle_ns(graph, stage, position, (resumed, arrived), own)),
        bubble_ratio=_bubble_ratio(graph, stage, position, rows, ranks),
        path_ns=_sums(kind[path], len(KINDS), transfer),
        traffic=_traffic(graph, rows, kind, kind_of_group),
    )


def _overlap(steps: Inside, stretch: Ints, begin_ns: Ints, end_ns: Ints) -> Ints:
    """The time of each span inside the steps of its stretch."""
    inside = np.zeros(len(stretch), dtype=np.int64)
    count = 1 + int(max(stretch.max(initial=-1), steps.stretch.max(initial=-1)))
    of_steps = rows_of_groups(steps.stretch, count)
    for spans, own in zip(rows_of_groups(stretch, count), of_steps, strict=True):
        if len(own):
            begin, end = steps.begin_ns[own], steps.end_ns[own]
            inside[spans] = _until(end_ns[spans], begin, end) - _until(begin_ns[spans], begin, end)
    return inside


def _until(time_ns: Ints, begin: Ints, end: Ints) -> Ints:
    """How much of the spans from `begin` to `end`, which follow each other, lies before each time."""
    before = np.concatenate([[0], np.cumsum(end - begin)])
    number = np.searchsorted(begin, time_ns, side="right")
    return before[number] - np.where(number > 0, np.maximum(end[number - 1] - time_ns, 0), 0)


def _idle_ns(graph: StepGraph, stages: Ints, position: Ints, spans: tuple[Ints, Ints], within_ns: Floats) -> Floats:
    """How long a rank of the busiest stage waits for other stages, of the time within each span: it waits because of
    the schedule alone. The others also wait because they have less to do."""
    operations, last, stage = graph.operations, graph.last, stages[position]
    least = np.zeros(len(within_ns))
    numbers, sizes = np.unique(stages, return_counts=True)
    if not 1 < len(numbers) <= MAX_STAGES:
        return least
    waiting = graph.waits & (stage[last] != stage) & (operations.start_ns[last] > operations.start_ns)
    for place, (number, size) in enumerate(zip(numbers.tolist(), sizes.tolist(), strict=True)):
        rows = np.flatnonzero(waiting & (stage == number))
        if not len(rows):
            return np.zeros(len(within_ns))
        # A rank that waits in several messages at once is idle once.
        _, start, stop = _union(operations.rank[rows], operations.start_ns[rows], operations.start_ns[last[rows]])
        idle = within_ns * np.minimum(_mean_depth(start, stop, *spans) / size, 1.0)
        if not place or idle.sum() < least.sum():
            least = idle
    return least


def _mean_depth(start_ns: Ints, stop_ns: Ints, begin_ns: Ints, end_ns: Ints) -> Floats:
    """How many of the spans from `start_ns` to `stop_ns` are open, in the mean from `begin_ns` to `end_ns`."""
    origin = int(start_ns.min())
    times = np.concatenate([start_ns, stop_ns]) - origin
    order = np.argsort(times, kind="stable")
    times = times[order].astype(np.float64)
    depth = np.cumsum(np.repeat([1.0, -1.0], len(start_ns))[order])
    area = np.concatenate([[0.0], np.cumsum(depth[:-1] * np.diff(times))])
    begin, end = (np.interp((moment - origin).astype(np.float64), times, area) for moment in (begin_ns, end_ns))
    return np.asarray(np.maximum(end - begin, 0.0) / np.maximum(end_ns - begin_ns, 1))


def _union(key: Ints, start_ns: Ints, stop_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """The spans of each key without overlaps, in pieces."""
    keys, times = np.tile(key, 2), np.concatenate([start_ns, stop_ns])
    begins = np.repeat([1, -1], len(key))
    by_time = np.argsort(times, kind="stable")  # a span that begins when another ends is first
    order = by_time[order_by_group(keys[by_time], int(keys.max(initial=-1)) + 1)]
    keys, times, depth = keys[order], times[order], np.cumsum(begins[order])
    covered = np.flatnonzero((depth[:-1] > 0) & (times[1:] > times[:-1]))
    return keys[covered], times[covered], times[covered + 1]


def _bubble_ratio(graph: StepGraph, stage: Ints, position: Ints, rows: Ints, ranks: Ints) -> float:
    """Estimate the bubble from the number of stages, and of messages that a stage sends to another one in a step."""
    operations, count = graph.operations, len(np.unique(stage))
    sends = rows[(operations.kind[rows] == CollectiveKind.SEND) & np.isin(operations.peer[rows], ranks)]
    between = stage[position[sends]] != stage[np.searchsorted(ranks, operations.peer[sends])]
    sends = sends[between & (operations.bytes[sends] >= MIN_MESSAGE_RATIO * operations.bytes[sends].max(initial=0))]
    if count < 2 or not len(sends):
        return 0.0
    source, target, step = operations.rank[sends], operations.peer[sends], graph.meetings.step[sends]
    visit, visits = number_groups(source, target, step)
    link, links = number_groups(source, target)
    link_of_visit = np.zeros(visits, dtype=np.int64)
    link_of_visit[visit] = link
    usual = grouped_median(np.bincount(visit, minlength=visits).astype(np.float64), link_of_visit, links)
    return one_forward_one_backward_ratio(count, int(usual.max()))


def _traffic(graph: StepGraph, rows: Ints, kind: Ints, kind_of_group: Ints) -> WindowTraffic:
    operations, count = graph.operations, len(KINDS)
    rows = rows[operations.kind[rows] != CollectiveKind.SEND]  # the other end of a message that is received
    size, factor = bus_sizes(operations, rows)
    of = kind[rows]
    key, start, stop = _union(
        operations.rank[rows] * count + of,
        operations.stop_ns[rows] - graph.transfer_ns[rows],
        operations.stop_ns[rows],
    )
    used = np.unique(operations.group[rows])
    members = np.array([len(group.ranks) for group in operations.groups], dtype=np.float64)
    smallest, largest = (
        np.nan_to_num(extreme(members[used], kind_of_group[used], count)) for extreme in (grouped_min, grouped_max)
    )
    return WindowTraffic(
        _sums(key % count, count, (stop - start).astype(np.float64)),
        _sums(of, count, size),
        _sums(of, count, size * factor),
        _sums(np.unique(operations.rank[rows] * count + of) % count, count),
        _sums(kind_of_group[used], count),
        smallest,
        largest,
    )


def _sums(number: Ints, count: int, weights: Floats | None = None) -> Floats:
    return np.bincount(number, weights, minlength=count).astype(np.float64)


def bus_sizes(operations: Operations, rows: Ints) -> tuple[Floats, Floats]:
    """NCCL counts what a rank gives, what it takes from a reduce-scatter, and what it gives to one peer of many."""
    kind = operations.kind[rows]
    ranks = np.array([len(group.ranks) for group in operations.groups], dtype=np.int64)[operations.group[rows]]
    counted = np.minimum(operations.bytes[rows], MAX_BYTES) * np.where(kind == CollectiveKind.ALL_TO_ALL, ranks, 1)
    is_taken = np.isin(kind, (CollectiveKind.REDUCE_SCATTER, CollectiveKind.SCATTER))
    size = size_bytes(kind, np.where(is_taken, UNKNOWN, counted), np.where(is_taken, counted, UNKNOWN), ranks)
    return np.maximum(size, 0).astype(np.float64), np.nan_to_num(bus_factor(kind, ranks))
