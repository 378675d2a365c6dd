"""Arranges a timeline as arrays [operation, step, data rank, tensor rank]: steps with the same operations share one
graph and one table. Removes duplicates, unknown operations and incomplete ranks first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, take_rows
from rankscope.analysis.timelines.timeline import (
    COMPUTES,
    GC,
    OPTIMIZER,
    JobSizes,
    Timeline,
    TimelineError,
    is_known,
    number_groups,
    pack,
)
from rankscope.analysis.verdicts.verdict import ranks as name_ranks

# An unknown operation that overlaps known ones in a larger share of its rows runs concurrently or inside them.
CONCURRENT_RATIO = 0.1
OVERLAP_TOLERANCE_SECONDS = 1e-5
STEPS_NAMED = 4


@dataclass(frozen=True)
class Node:
    """One operation of one stage, the same in all steps and lanes of a table."""

    stage: int
    name: str
    index: int  # among those of its name on its stage
    chunk: int
    position: int  # in the stage's chain of its own operations; -1 if not part of it
    start_seconds: float  # in the step that the graph was read from
    end_seconds: float


@dataclass(frozen=True)
class StepTable:
    steps: Ints
    nodes: tuple[Node, ...]
    start_seconds: Floats  # [node, step, data, tensor]
    duration_seconds: Floats


@dataclass(frozen=True)
class Lanes:
    """Positions of ranks: pipeline stage × data-parallel rank × tensor-parallel lane. Data-parallel ranks without
    all stages are excluded."""

    data_ranks: Ints
    rank: Ints  # [stage, data, tensor]
    ranks_seen: int
    ranks_expected: int
    notes: tuple[str, ...]

    @property
    def stages(self) -> int:
        return int(self.rank.shape[0])

    @property
    def tensors(self) -> int:
        return int(self.rank.shape[2])


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
    rows, index, notes = clean_rows(timeline, data, tensor, lanes)
    timeline, data, tensor = take_rows(timeline, rows), data[rows], tensor[rows]
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
            f"{len(odd)} of {steps_recorded} steps left out: ranks do not have the same operations (step {named})"
        )
    if reordered:
        notes.append(f"{reordered} rank-steps ran their computes in another order; replayed in the most common one")
    if not tables:
        raise TimelineError("no step in which all ranks have the same operations; record whole steps of every rank")
    tables.sort(key=lambda table: int(table.steps[0]))
    return Layout(lanes, tuple(tables), steps_recorded, (*lanes.notes, *notes))


def _require_computes(timeline: Timeline, lanes: Lanes) -> None:
    computes = np.array([name in COMPUTES for name in timeline.names])[timeline.operation]
    if not computes.any():
        raise TimelineError("no forward-compute or backward-compute rows; is it a timeline of operations?")
    idle = np.flatnonzero(np.bincount(timeline.stage[computes], minlength=lanes.stages) == 0)
    if len(idle):
        raise TimelineError(f"stage {idle[0]} has no forward-compute or backward-compute rows; record its ranks too")


def _order(*keys: Ints) -> Ints:
    """Sort by the first key, then the next, …; stable."""
    packed = pack(*keys)
    return np.lexsort(keys[::-1]) if packed is None else np.argsort(packed[0], kind="stable")


def _blocks_of(step_of_block: Ints, step: int) -> Ints:
    low, high = np.searchsorted(step_of_block, [step, step + 1])  # blocks are numbered by step first
    return np.arange(low, high)


def _fingerprints(timeline: Timeline, code: Ints, block: Ints, block_count: int, in_chain: Bools) -> tuple[Ints, Ints]:
    """Per block, a hash of its operations and one of the order in which its own operations ran."""
    hashes = _hashes(np.arange(int(code.max()) + 1))
    content = np.zeros(block_count, dtype=np.int64)
    with np.errstate(over="ignore"):
        np.add.at(content, block, hashes[code])
        chain = np.flatnonzero(in_chain)
        chain = chain[np.argsort(timeline.start_seconds[chain], kind="stable")]
        order = np.zeros(block_count, dtype=np.int64)
        # Stages of one block run concurrently: the order within each matters, not how they interleave.
        chain = chain[_order(block[chain], timeline.stage[chain])]
        place = np.arange(len(chain)) - np.searchsorted(block[chain], block[chain])
        np.add.at(order, block[chain], hashes[code[chain]] * (place + 1))
    return content, order


def _hashes(numbers: Ints) -> Ints:
    """Hashes with sums that do not collide by chance (the finaliser of splitmix64)."""
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


def find_lanes(timeline: Timeline, sizes: JobSizes) -> tuple[Timeline, Lanes, Ints, Ints]:
    """The timeline without incomplete lanes, the lanes, and per row its data and tensor index."""
    stages = _count_stages(timeline, sizes)
    timeline, notes = _unique_ranks(timeline)
    place, places = _places(timeline)
    worker_starts = np.flatnonzero(np.r_[True, np.any(places[1:, :2] != places[:-1, :2], axis=1)])
    sizes_of_workers = np.diff(np.r_[worker_starts, len(places)])
    tensor_of_place = np.arange(len(places)) - np.repeat(worker_starts, sizes_of_workers)
    tensors = int(np.median(sizes_of_workers))
    data_ranks, data_of_place = np.unique(places[:, 0], return_inverse=True)
    stages_of = np.zeros(len(data_ranks), dtype=np.int64)
    usable = tensor_of_place < tensors
    np.add.at(stages_of, data_of_place[usable], 1)
    complete = stages_of == stages * tensors
    if not complete.any():
        raise TimelineError(f"no data-parallel rank has rows for all of its {stages} stages; record every rank")
    if not complete.all():
        lost = ", ".join(map(str, data_ranks[~complete][:8]))
        notes.append(f"data-parallel ranks without all stages excluded: {lost}")
    renumbered = np.cumsum(complete) - 1
    kept_place = usable & complete[data_of_place]
    rank = np.full((stages, int(complete.sum()), tensors), -1, dtype=np.int64)
    rank[places[kept_place, 1], renumbered[data_of_place[kept_place]], tensor_of_place[kept_place]] = places[
        kept_place, 2
    ]
    rows = kept_place[place]
    expected = stages * (sizes.data or len(data_ranks)) * tensors
    lanes = Lanes(data_ranks[complete], rank, int(kept_place.sum()), max(expected, len(places)), tuple(notes))
    kept = timeline if rows.all() else take_rows(timeline, rows)
    return kept, lanes, renumbered[data_of_place[place[rows]]], tensor_of_place[place[rows]]


def _places(timeline: Timeline) -> tuple[Ints, Ints]:
    """Per row the number of its position, and the positions in order: data-parallel rank, stage, rank."""
    keys = (timeline.data_rank, timeline.stage, timeline.rank)
    place, count = number_groups(*keys)
    row = np.zeros(count, dtype=np.int64)
    row[place] = np.arange(len(place))
    return place, np.stack([key[row] for key in keys], axis=1)


def _count_stages(timeline: Timeline, sizes: JobSizes) -> int:
    stages = int(timeline.stage.max()) + 1
    if sizes.pipeline is not None:
        if stages > sizes.pipeline:
            raise TimelineError(f"the metadata says pp_size {sizes.pipeline}, but there is a stage {stages - 1}")
        stages = sizes.pipeline
    data = int(timeline.data_rank.max()) + 1
    if sizes.data is not None and data > sizes.data:
        raise TimelineError(f"the metadata says dp_size {sizes.data}, but there is a dp_rank {data - 1}")
    if stages > len(timeline) or (np.bincount(timeline.stage, minlength=stages) == 0).any():
        raise TimelineError(f"a stage of 0 … {stages - 1} has no rows; record every stage")
    return stages


def _unique_ranks(timeline: Timeline) -> tuple[Timeline, list[str]]:
    """A rank number used in two positions does not identify a rank."""
    _, places = _places(timeline)
    numbers, counts = np.unique(places[:, 2], return_counts=True)
    if (counts == 1).all():
        return timeline, []
    replicas, number = np.unique(timeline.data_rank, return_inverse=True)
    made = timeline.stage * len(replicas) + number
    twice = tuple(numbers[counts > 1][:3].tolist())
    note = f"the rank column gives several places to {name_ranks(twice)}: ranks numbered by stage and dp_rank instead"
    return replace(timeline, rank=made), [note]


def clean_rows(timeline: Timeline, data: Ints, tensor: Ints, lanes: Lanes) -> tuple[Ints, Ints, list[str]]:
    """The rows to keep, the index of each among those of its type in the step, and notes."""
    worker, _ = number_groups(timeline.step, data, tensor, timeline.stage)
    kept = np.ones(len(timeline), dtype=bool)
    notes: list[str] = []
    _drop_unknown(timeline, worker, kept, notes)
    _drop_partial(timeline, data, tensor, lanes, kept, notes)
    order = timeline.order
    if _is_constant(order, worker, timeline.operation):
        order = np.full(len(order), -1, dtype=np.int64)
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(timeline.start_seconds[rows], kind="stable")]
    packed = pack(worker[rows], timeline.operation[rows], order[rows])
    keys = (order[rows], timeline.operation[rows], worker[rows])
    rows = rows[np.lexsort(keys) if packed is None else np.argsort(packed[0], kind="stable")]
    same_group = np.r_[False, _same(rows, worker, timeline.operation)]
    same_time = np.r_[False, _same(rows, timeline.start_seconds, timeline.duration_seconds)]
    twice = same_group & np.r_[False, _same(rows, order)] & ((order[rows] >= 0) | same_time)
    if twice.any():
        notes.append(f"{int(twice.sum())} duplicate rows (same rank, step, optype, seq_id): the first one is used")
        rows, same_group = rows[~twice], same_group[~twice]
    starts = np.flatnonzero(~same_group)
    index = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    return rows, index, notes


def _same(rows: Ints, *columns: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Bools:
    same = np.ones(len(rows) - 1, dtype=bool)
    for column in columns:
        ordered = column[rows]
        same &= ordered[1:] == ordered[:-1]
    return same


def _is_constant(order: Ints, worker: Ints, operation: Ints) -> bool:
    """A seq_id that is the same everywhere gives no order."""
    _, count = number_groups(worker, operation)
    return count < len(order) and int(order.min()) == int(order.max())


def _drop_unknown(timeline: Timeline, worker: Ints, kept: Bools, notes: list[str]) -> None:
    own = np.array([name in (*COMPUTES, GC, OPTIMIZER) for name in timeline.names])[timeline.operation]
    end = timeline.start_seconds + timeline.duration_seconds
    for number, name in enumerate(timeline.names):
        if is_known(name):
            continue
        unknown = timeline.operation == number
        rows = np.flatnonzero(own | unknown)
        rows = rows[np.lexsort((end[rows], timeline.start_seconds[rows], worker[rows]))]
        neighbours = worker[rows][1:] == worker[rows][:-1]
        overlap = neighbours & (timeline.start_seconds[rows][1:] < end[rows][:-1] - OVERLAP_TOLERANCE_SECONDS)
        touched = unknown[rows][1:] | unknown[rows][:-1]
        concurrent = int((overlap & touched).sum()) > CONCURRENT_RATIO * int(unknown.sum())
        if concurrent:
            kept &= ~unknown
        how = "it overlaps known ones and is excluded" if concurrent else "treated as the rank's self time"
        notes.append(f"unknown optype {name!r}: {how}")


def _drop_partial(timeline: Timeline, data: Ints, tensor: Ints, lanes: Lanes, kept: Bools, notes: list[str]) -> None:
    """Drop a type that only some lanes of a stage have: it would make every step differ between lanes."""
    presence = np.zeros((len(timeline.names), *lanes.rank.shape), dtype=bool)
    presence[timeline.operation, timeline.stage, data, tensor] = True
    some = presence.any(axis=(2, 3)) & ~presence.all(axis=(2, 3))
    for number, stage in np.argwhere(some).tolist():
        name = timeline.names[number]
        if name in COMPUTES:
            continue
        kept &= ~((timeline.operation == number) & (timeline.stage == stage))
        notes.append(f"{name} of stage {stage} excluded: some of its ranks have none")
