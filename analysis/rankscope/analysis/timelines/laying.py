"""Lay a timeline out as arrays: steps that hold the same operations share one graph, and are lanes of one table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Floats, Ints
from rankscope.analysis.timelines.columns import JobSizes, Timeline, TimelineError
from rankscope.analysis.timelines.grouping import number_groups, pack
from rankscope.analysis.timelines.lanes import Lanes, find_lanes, take
from rankscope.analysis.timelines.operations import COMPUTES, is_known
from rankscope.analysis.timelines.tidying import tidy

STEPS_NAMED = 4


@dataclass(frozen=True)
class Node:
    """One operation of one stage, the same in every step and lane of a table."""

    stage: int
    name: str
    index: int  # among those of its name on its stage
    chunk: int
    position: int  # in the stage's chain of own work; -1 is not in it
    start_seconds: float  # in the step that the graph was read from
    end_seconds: float


@dataclass(frozen=True)
class StepTable:
    steps: Ints
    nodes: tuple[Node, ...]
    start_seconds: Floats  # [node, step, data, tensor]
    duration_seconds: Floats


@dataclass(frozen=True)
class Layout:
    lanes: Lanes
    tables: tuple[StepTable, ...]
    steps_recorded: int
    notes: tuple[str, ...]

    @property
    def steps_used(self) -> int:
        return sum(len(table.steps) for table in self.tables)


def lay_out(timeline: Timeline, sizes: JobSizes) -> Layout:
    steps_recorded = len(np.unique(timeline.step))
    timeline, lanes, data, tensor = find_lanes(timeline, sizes)
    _require_computes(timeline, lanes)
    rows, index, notes = tidy(timeline, data, tensor, lanes)
    timeline, data, tensor = take(timeline, rows), data[rows], tensor[rows]
    in_chain = np.array([name in COMPUTES or not is_known(name) for name in timeline.names])[timeline.operation]
    code, _ = number_groups(timeline.stage, timeline.operation, index, timeline.chunk)
    block, block_count = number_groups(timeline.step, data, tensor)
    content, order = _fingerprints(timeline, code, block, block_count, in_chain)
    step_of_block = np.zeros(block_count, dtype=np.int64)
    step_of_block[block] = timeline.step
    tables, odd, reordered = [], [], 0
    lane_count = lanes.rank.shape[1] * lanes.tensors
    shapes: dict[int, list[int]] = {}
    for step in np.unique(timeline.step):
        blocks = _blocks_of(step_of_block, step)
        if len(blocks) == lane_count and (content[blocks] == content[blocks[0]]).all():
            shapes.setdefault(int(content[blocks[0]]), []).append(int(step))
        else:
            odd.append(int(step))
    for steps in shapes.values():
        inside = np.isin(timeline.step, steps)
        inside_blocks = np.unique(block[inside])
        kinds, counts = np.unique(order[inside_blocks], return_counts=True)
        pattern = int(inside_blocks[np.argmax(order[inside_blocks] == kinds[np.argmax(counts)])])
        reordered += int(len(inside_blocks) - counts.max())
        chosen = np.flatnonzero(inside)
        chosen = chosen[_order(code[chosen], timeline.step[chosen], data[chosen], tensor[chosen])]
        tables.append(_table(timeline, chosen, block, pattern, in_chain, np.array(steps), lanes))
    if odd:
        named = ", ".join(map(str, odd[:STEPS_NAMED])) + (", …" if len(odd) > STEPS_NAMED else "")
        notes.append(
            f"{len(odd)} of {steps_recorded} steps left out: ranks do not hold the same operations (step {named})"
        )
    if reordered:
        notes.append(f"{reordered} rank-steps ran their computes in another order; replayed in the usual one")
    if not tables:
        raise TimelineError("no step in which all ranks hold the same operations; record whole steps of every rank")
    tables.sort(key=lambda table: int(table.steps[0]))
    return Layout(lanes, tuple(tables), steps_recorded, (*lanes.notes, *notes))


def _require_computes(timeline: Timeline, lanes: Lanes) -> None:
    computes = np.array([name in COMPUTES for name in timeline.names])[timeline.operation]
    if not computes.any():
        raise TimelineError("no forward-compute or backward-compute rows; is it a timeline of operations?")
    idle = np.flatnonzero(np.bincount(timeline.stage[computes], minlength=lanes.stages) == 0)
    if len(idle):
        raise TimelineError(f"stage {idle[0]} has no forward-compute or backward-compute rows; record its ranks, too")


def _order(*keys: Ints) -> Ints:
    """Sorts by the first key, then the next …; rows that are alike stay in their order."""
    packed = pack(*keys)
    return np.lexsort(keys[::-1]) if packed is None else np.argsort(packed[0], kind="stable")


def _blocks_of(step_of_block: Ints, step: int) -> Ints:
    low, high = np.searchsorted(step_of_block, [step, step + 1])  # blocks are numbered by step first
    return np.arange(low, high)


def _fingerprints(timeline: Timeline, code: Ints, block: Ints, block_count: int, in_chain: Bools) -> tuple[Ints, Ints]:
    """Per block a number for what it holds, and one for the order in which its own work ran."""
    dice = _scatter(np.arange(int(code.max()) + 1))
    content = np.zeros(block_count, dtype=np.int64)
    with np.errstate(over="ignore"):
        np.add.at(content, block, dice[code])
        chain = np.flatnonzero(in_chain)
        chain = chain[np.argsort(timeline.start_seconds[chain], kind="stable")]
        order = np.zeros(block_count, dtype=np.int64)
        # Stages of one block run side by side: the order of each counts, not how they interleave.
        chain = chain[_order(block[chain], timeline.stage[chain])]
        place = np.arange(len(chain)) - np.searchsorted(block[chain], block[chain])
        np.add.at(order, block[chain], dice[code[chain]] * (place + 1))
    return content, order


def _scatter(numbers: Ints) -> Ints:
    """Numbers whose sums do not meet by chance (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        scattered: Ints = (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
        return scattered


def _table(
    timeline: Timeline,
    rows: Ints,
    block: Ints,
    pattern: int,
    in_chain: Bools,
    steps: Ints,
    lanes: Lanes,
) -> StepTable:
    shape = (-1, len(steps), lanes.rank.shape[1], lanes.tensors)
    start = timeline.start_seconds[rows].reshape(shape)
    duration = timeline.duration_seconds[rows].reshape(shape)
    model = rows[block[rows] == pattern]  # one row per node, in node order
    chained = model[in_chain[model]]
    running = chained[np.argsort(timeline.start_seconds[chained], kind="stable")]
    position = {int(row): place for place, row in enumerate(running)}
    counted: dict[tuple[int, int], int] = {}
    nodes = []
    for row in model.tolist():
        key = (int(timeline.stage[row]), int(timeline.operation[row]))
        index = counted.get(key, 0)
        counted[key] = index + 1
        begin = float(timeline.start_seconds[row])
        nodes.append(
            Node(
                key[0],
                timeline.names[key[1]],
                index,
                int(timeline.chunk[row]),
                position.get(row, -1),
                begin,
                begin + float(timeline.duration_seconds[row]),
            )
        )
    return StepTable(steps, tuple(nodes), start, duration)
