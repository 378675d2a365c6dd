"""Replay a step with chosen durations: every operation starts as soon as what it follows has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from rankscope.analysis.robust import Floats
from rankscope.analysis.timelines.laying import StepTable
from rankscope.analysis.timelines.operations import Waits
from rankscope.analysis.timelines.wiring import Graph, Task

DATA_AXIS, TENSOR_AXIS = -2, -1


def replay(graph: Graph, duration_of: Callable[[int], Floats]) -> Floats:
    """Seconds each step takes. `duration_of` gives a node's durations as [..., data, tensor]; what stands before the
    lanes (steps, scenarios) is replayed side by side and comes back."""
    ends: dict[int, Floats] = {}
    total: Floats | None = None
    final = set(graph.final)
    expiring: list[list[int]] = [[] for _ in graph.tasks]
    for number, place in enumerate(graph.last_use):
        if place < len(graph.tasks):
            expiring[place].append(number)
    for place, task in enumerate(graph.tasks):
        starts = [_latest([ends[n] for n in graph.before[member]]) for member in task.members]
        together = _join(task, _latest([start for start in starts if start is not None]))
        for member in task.members:
            duration = duration_of(member)
            end = duration if together is None else together + duration
            if graph.last_use[member] > place:
                ends[member] = end
            if member in final:
                whole = end.max(axis=(DATA_AXIS, TENSOR_AXIS))
                total = whole if total is None else np.maximum(total, whole)
        for number in expiring[place]:
            ends.pop(number, None)
    assert total is not None  # a graph has at least one final node
    return total


def transfer_seconds(table: StepTable, graph: Graph) -> Floats:
    """What each operation takes by itself: own work as recorded, a communication from the latest start in its group."""
    taken: Floats = table.duration_seconds.copy()
    for task in graph.tasks:
        if task.waits is Waits.NOBODY:
            continue
        latest = _join(task, _latest([table.start_seconds[member] for member in task.members]))
        assert latest is not None
        for member in task.members:
            ended = table.start_seconds[member] + table.duration_seconds[member]
            taken[member] = np.maximum(ended - latest, 0.0)
    return taken


def _latest(times: list[Floats]) -> Floats | None:
    if not times:
        return None
    latest: Floats = reduce(np.maximum, times)
    return latest


def _join(task: Task, latest: Floats | None) -> Floats | None:
    if latest is None or task.waits not in (Waits.REPLICAS, Waits.EVERYBODY):
        return latest
    axes = (DATA_AXIS,) if task.waits is Waits.REPLICAS else (DATA_AXIS, TENSOR_AXIS)
    joined: Floats = latest.max(axis=axes, keepdims=True)
    return joined
