"""Finds the pipeline stage of each rank, and the rows of different ranks that are the same part of the program."""

from __future__ import annotations

from collections import deque

import numpy as np

from rankscope.analysis.collectives.kinds import CollectiveKind
from rankscope.analysis.stats.robust import Floats, Ints, number_groups, occurrence
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import MESSAGES


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
            if other not in visited:
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


def peers_own_ns(graph: StepGraph, stages: dict[int, int]) -> Floats:
    """The median own work before the same operation on the other ranks of the stage, per row; NaN without one."""
    operations, step = graph.operations, graph.meetings.step
    table = np.array([stages[rank] for rank in operations.ranks], dtype=np.int64)
    stage = table[np.searchsorted(operations.ranks, operations.rank)]
    others = np.searchsorted(operations.ranks, np.maximum(operations.peer, 0)).clip(max=len(table) - 1)
    toward = np.where(operations.peer >= 0, np.sign(table[others] - stage), 0)
    sizes = np.array([len(group.ranks) for group in operations.groups], dtype=np.int64)[operations.group]
    alike, _ = number_groups(operations.kind, sizes, toward)
    place = occurrence(number_groups(operations.rank, step, alike)[0])
    known = np.flatnonzero(graph.before >= 0)
    part = alike * (int(place.max(initial=0)) + 1) + place
    same, _ = number_groups(stage[known], step[known], part[known], part[graph.before[known]])
    result = np.full(len(graph), np.nan)
    result[known] = _median_of_others(graph.own_ns[known].astype(np.float64), same)
    return result


def _median_of_others(values: Floats, group: Ints) -> Floats:
    order = np.lexsort((values, group))
    ordered, of = values[order], group[order]
    begin = np.searchsorted(of, of)
    size = np.searchsorted(of, of, side="right") - begin
    mine = np.arange(len(of)) - begin
    low, high = (size - 2) // 2, (size - 1) // 2
    low, high = low + (low >= mine), high + (high >= mine)
    several = size > 1
    median = (ordered[np.where(several, begin + low, 0)] + ordered[np.where(several, begin + high, 0)]) / 2
    result = np.empty(len(values))
    result[order] = np.where(several, median, np.nan)
    return result
