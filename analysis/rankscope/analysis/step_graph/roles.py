"""Finds the pipeline stage of each rank, and the rows of different ranks that are the same part of the program."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Floats, Ints, number_groups, occurrence, order_within_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import MESSAGES

# The number of a part has so many bits for its place in the step.
PLACE_BITS = 24


def find_stages(graph: StepGraph) -> dict[int, int]:
    """A step goes forward first: of two ranks, the one that sends first is before the other. Where every rank sends and
    receives at once, as in a ring, there are no stages."""
    stages = dict.fromkeys(graph.operations.ranks, 0)
    following = _following(graph)
    visited: set[int] = set()
    waiting = deque(_first_ranks(graph))
    visited.update(waiting)
    while waiting:
        rank = waiting.popleft()
        for other in following.get(rank, ()):
            if other in stages and other not in visited:  # a peer may have sent nothing
                visited.add(other)
                stages[other] = stages[rank] + 1
                waiting.append(other)
    return stages


def _following(graph: StepGraph) -> dict[int, list[int]]:
    """Lists for each rank those to which it sends before it receives from them, in most steps."""
    operations = graph.operations
    rows = np.flatnonzero((operations.kind == CollectiveKind.SEND) & (operations.peer >= 0))
    rows = rows[np.lexsort((operations.start_ns[rows], graph.meetings.step[rows]))]
    source, target = operations.rank[rows], operations.peer[rows]
    pair, count = number_groups(np.minimum(source, target), np.maximum(source, target))
    first = occurrence(number_groups(pair, graph.meetings.step[rows])[0]) == 0
    upward = np.bincount(pair[first & (source < target)], minlength=count)
    downward = np.bincount(pair[first & (source > target)], minlength=count)
    following: dict[int, list[int]] = {}
    for row in np.unique(pair, return_index=True)[1].tolist():
        low, high = sorted((int(source[row]), int(target[row])))
        number = pair[row]
        if upward[number] != downward[number]:
            before, after = (low, high) if upward[number] > downward[number] else (high, low)
            following.setdefault(before, []).append(after)
    return following


def _first_ranks(graph: StepGraph) -> list[int]:
    """Ranks that send before they receive anything, in most steps."""
    operations = graph.operations
    rows = np.flatnonzero(np.isin(operations.kind, MESSAGES))
    received = operations.kind[rows] == CollectiveKind.RECV
    # The receipt counts first where a message is sent and another is received at once.
    rows = rows[np.lexsort((~received, operations.start_ns[rows]))]
    turn, _ = number_groups(operations.rank[rows], graph.meetings.step[rows])
    first = rows[occurrence(turn) == 0]
    begins = operations.kind[first] == CollectiveKind.SEND
    ranks, number = np.unique(operations.rank[first], return_inverse=True)
    share = np.bincount(number, weights=begins) / np.bincount(number)
    return [int(rank) for rank in ranks[share > 0.5]]


@dataclass(frozen=True)
class Parts:
    """The part of the program that each row is. Kind, size of the group, direction of a message, and the count of such
    operations earlier in the step identify it, in any window. Only rows with an operation before them are there."""

    rows: Ints
    number: Ints
    before: Ints  # the number of the operation before

    @classmethod
    def of(cls, graph: StepGraph, stages: dict[int, int]) -> Parts:
        operations = graph.operations
        table = _stages_of(graph, stages)
        others = np.searchsorted(operations.ranks, np.maximum(operations.peer, 0)).clip(max=len(table) - 1)
        own = table[np.searchsorted(operations.ranks, operations.rank)]
        toward = np.where(operations.peer >= 0, np.sign(table[others] - own), 0)
        sizes = np.array([len(group.ranks) for group in operations.groups], dtype=np.int64)[operations.group]
        alike = ((sizes << 4 | operations.kind) << 2) + toward + 1
        place = occurrence(number_groups(operations.rank, graph.meetings.step, alike)[0])
        number = alike << PLACE_BITS | np.minimum(place, (1 << PLACE_BITS) - 1)
        rows = np.flatnonzero(graph.before >= 0)
        return cls(rows, number[rows], number[graph.before[rows]])


def _stages_of(graph: StepGraph, stages: dict[int, int]) -> Ints:
    return np.array([stages[rank] for rank in graph.operations.ranks], dtype=np.int64)


@dataclass(frozen=True)
class Peers:
    """The median work of the other ranks of the stage before the same operation, per row; NaN where there is none."""

    own_ns: Floats
    host_ns: Floats  # of it, until their hosts issue the operation

    @classmethod
    def of(cls, graph: StepGraph, stages: dict[int, int], parts: Parts) -> Peers:
        rows = parts.rows
        stage = _stages_of(graph, stages)[np.searchsorted(graph.operations.ranks, graph.operations.rank[rows])]
        same, count = number_groups(stage, graph.meetings.step[rows], parts.number, parts.before)
        own, host = np.full((2, len(graph)), np.nan)
        own[rows] = _median_of_others(graph.own_ns[rows].astype(np.float64), same, count)
        host[rows] = _median_of_others(graph.host_ns[rows].astype(np.float64), same, count)
        return cls(own, host)


def _median_of_others(values: Floats, group: Ints, count: int) -> Floats:
    order = order_within_groups(values, group, count)
    ordered, of = values[order], group[order]
    sizes = np.bincount(of, minlength=count)
    begin, size = (np.cumsum(sizes) - sizes)[of], sizes[of]
    mine = np.arange(len(of)) - begin
    low, high = (size - 2) // 2, (size - 1) // 2
    low, high = low + (low >= mine), high + (high >= mine)
    several = size > 1
    median = (ordered[np.where(several, begin + low, 0)] + ordered[np.where(several, begin + high, 0)]) / 2
    result = np.empty(len(values))
    result[order] = np.where(several, median, np.nan)
    return result
