"""Replays a job with chosen durations: each operation starts as soon as everything it depends on has ended. The
model holds the graphs, the time each operation takes by itself, and the typical time of each type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.timelines.dependencies import Graph, Task, build_graph
from rankscope.analysis.timelines.layout import Layout, StepTable
from rankscope.analysis.timelines.timeline import Waits, describe

DATA_AXIS, TENSOR_AXIS = -2, -1
# Arrays of this size stay in a core's cache; larger batches only cost memory.
LANES_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class Part:
    """Steps of one shape."""

    table: StepTable
    graph: Graph
    net_seconds: Floats  # [node, step, data, tensor]
    typical_seconds: Floats  # [node]
    stage: Ints  # [node]
    family: Ints  # [node], index into Model.families
    own_work: Bools  # [node]


@dataclass(frozen=True)
class Model:
    layout: Layout
    parts: tuple[Part, ...]
    families: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def steps(self) -> Ints:
        return np.concatenate([part.table.steps for part in self.parts])


@dataclass(frozen=True)
class Scenario:
    """The operations of `workers` (only of `family`, if given) as recorded and all others replaced; inverted with
    `inverted`."""

    workers: Bools | None = None  # [stage, data, tensor]
    family: int | None = None
    inverted: bool = False


def build_model(layout: Layout) -> Model:
    names = sorted({node.name for table in layout.tables for node in table.nodes})
    families = sorted({describe(name).family for name in names})
    number_of = {name: number for number, name in enumerate(names)}
    graphs = [(table, build_graph(table.nodes, layout.lanes.stages)) for table in layout.tables]
    durations = [net_durations(table, graph) for table, graph in graphs]
    kinds = [np.array([number_of[node.name] for node in table.nodes]) for table, _ in graphs]
    typical = np.zeros(len(names))
    for number, name in enumerate(names):
        seen = np.concatenate([seconds[kind == number].ravel() for seconds, kind in zip(durations, kinds, strict=True)])
        typical[number] = seen.mean() if describe(name).own_work else np.median(seen)
    family_of = np.array([families.index(describe(name).family) for name in names])
    own = np.array([describe(name).own_work for name in names])
    parts = tuple(
        Part(
            table,
            graph,
            seconds,
            typical[kind],
            np.array([node.stage for node in table.nodes]),
            family_of[kind],
            own[kind],
        )
        for (table, graph), seconds, kind in zip(graphs, durations, kinds, strict=True)
    )
    notes = dict.fromkeys(note for _, graph in graphs for note in graph.notes)
    return Model(layout, parts, tuple(families), tuple(notes))


def replay_recorded(model: Model) -> Floats:
    """Seconds of each step with recorded durations and transfer times, without delays before operations."""
    return replay_durations(model, [part.net_seconds for part in model.parts])


def replay_durations(model: Model, durations: list[Floats]) -> Floats:
    """The same with other durations, per part [node, step, data, tensor]."""
    return np.concatenate(
        [replay(part.graph, own.__getitem__) for part, own in zip(model.parts, durations, strict=True)]
    )


def replay_typical(model: Model) -> Floats:
    """Seconds of each step with typical durations everywhere: the same for all steps of one shape."""
    made = []
    for part in model.parts:
        seconds = replay(part.graph, part.typical_seconds[:, None, None, None].__getitem__)
        made.append(np.repeat(seconds, len(part.table.steps)))
    return np.concatenate(made)


def replay_scenarios(model: Model, scenarios: list[Scenario], instead: list[Floats] | None = None) -> Floats:
    """[scenario, step] seconds. Operations that are not as recorded take their typical time, or `instead`, per part
    [node, step, data, tensor]."""
    made = []
    for number, part in enumerate(model.parts):
        other = part.typical_seconds[:, None, None, None] if instead is None else instead[number]
        lanes = part.net_seconds[0].size
        batch = max(1, LANES_AT_ONCE // lanes)
        rows = [_replay_batch(part, scenarios[at : at + batch], other) for at in range(0, len(scenarios), batch)]
        made.append(np.concatenate(rows) if rows else np.zeros((0, len(part.table.steps))))
    return np.concatenate(made, axis=1)


def replay_replicas(model: Model) -> Floats:
    """[data rank, step] seconds with one data-parallel rank as recorded and all others typical.

    The others are equal, so one represents all of them: two lanes instead of one per rank."""
    made = []
    for part in model.parts:
        ranks = part.net_seconds.shape[2]

        def duration_of(node: int, part: Part = part, ranks: int = ranks) -> Floats:
            recorded: Floats = part.net_seconds[node].transpose(1, 0, 2)[:, :, None]  # [data rank, step, 1, tensor]
            if ranks == 1:
                return recorded
            return np.concatenate([recorded, np.full_like(recorded, part.typical_seconds[node])], axis=2)

        made.append(replay(part.graph, duration_of))
    return np.concatenate(made, axis=1)


def _replay_batch(part: Part, scenarios: list[Scenario], other: Floats) -> Floats:
    everyone = np.ones((1, 1, 1), dtype=bool)
    stages = int(part.stage.max()) + 1
    shape = (stages, *part.net_seconds.shape[2:])
    workers = np.stack(
        [np.broadcast_to(everyone if s.workers is None else s.workers, shape) for s in scenarios]
    )  # [scenario, stage, data, tensor]
    inverted = np.array([s.inverted for s in scenarios])
    family = np.array([-1 if s.family is None else s.family for s in scenarios])

    def duration_of(node: int) -> Floats:
        chosen = workers[:, part.stage[node]]
        chosen = chosen & ((family < 0) | (family == part.family[node]))[:, None, None]
        recorded = (chosen != inverted[:, None, None])[:, None]
        durations: Floats = np.where(recorded, part.net_seconds[node], other[node])
        return durations

    return replay(part.graph, duration_of)


def replay(graph: Graph, duration_of: Callable[[int], Floats]) -> Floats:
    """Seconds per step. `duration_of` returns a node's durations as [..., data, tensor]; leading axes (steps,
    scenarios) are replayed in parallel and kept."""
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


def net_durations(table: StepTable, graph: Graph) -> Floats:
    """What each operation takes by itself: self time as recorded, communication from the latest start in its group."""
    durations: Floats = table.duration_seconds.copy()
    for task in graph.tasks:
        if task.waits is Waits.NONE:
            continue
        latest = _join(task, _latest([table.start_seconds[member] for member in task.members]))
        assert latest is not None
        for member in task.members:
            ended = table.start_seconds[member] + table.duration_seconds[member]
            durations[member] = np.maximum(ended - latest, 0.0)
    return durations


def _latest(times: list[Floats]) -> Floats | None:
    if not times:
        return None
    latest: Floats = reduce(np.maximum, times)
    return latest


def _join(task: Task, latest: Floats | None) -> Floats | None:
    if latest is None or task.waits not in (Waits.REPLICAS, Waits.ALL):
        return latest
    axes = (DATA_AXIS,) if task.waits is Waits.REPLICAS else (DATA_AXIS, TENSOR_AXIS)
    joined: Floats = latest.max(axis=axes, keepdims=True)
    return joined
