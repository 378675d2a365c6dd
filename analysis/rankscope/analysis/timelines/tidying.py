"""Rows that a recorder wrote twice, wrote for some ranks only, or that nobody knows: sorted out before the replay."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.timelines.columns import Timeline
from rankscope.analysis.timelines.grouping import number_groups, pack
from rankscope.analysis.timelines.lanes import Lanes
from rankscope.analysis.timelines.operations import COMPUTES, GC, OPTIMIZER, is_known

# An unknown operation that overlaps the known ones in more rows than this runs beside or inside them.
BESIDE_RATIO = 0.1
OVERLAP_TOLERANCE_SECONDS = 1e-5


def tidy(timeline: Timeline, data: Ints, tensor: Ints, lanes: Lanes) -> tuple[Ints, Ints, list[str]]:
    """The rows to keep, in which place among those of its type in the step each one comes, and what was noticed."""
    worker, _ = number_groups(timeline.step, data, tensor, timeline.stage)
    kept = np.ones(len(timeline), dtype=bool)
    notes: list[str] = []
    _drop_strangers(timeline, worker, kept, notes)
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
        notes.append(f"{int(twice.sum())} rows are there twice (same rank, step, optype, seq_id): the first counts")
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
    """A seq_id that never counts is no order."""
    _, count = number_groups(worker, operation)
    return count < len(order) and int(order.min()) == int(order.max())


def _drop_strangers(timeline: Timeline, worker: Ints, kept: Bools, notes: list[str]) -> None:
    own = np.array([name in (*COMPUTES, GC, OPTIMIZER) for name in timeline.names])[timeline.operation]
    end = timeline.start_seconds + timeline.duration_seconds
    for number, name in enumerate(timeline.names):
        if is_known(name):
            continue
        stranger = timeline.operation == number
        rows = np.flatnonzero(own | stranger)
        rows = rows[np.lexsort((end[rows], timeline.start_seconds[rows], worker[rows]))]
        neighbours = worker[rows][1:] == worker[rows][:-1]
        overlap = neighbours & (timeline.start_seconds[rows][1:] < end[rows][:-1] - OVERLAP_TOLERANCE_SECONDS)
        touched = stranger[rows][1:] | stranger[rows][:-1]
        beside = int((overlap & touched).sum()) > BESIDE_RATIO * int(stranger.sum())
        if beside:
            kept &= ~stranger
        how = "it runs beside known ones, so it is left out" if beside else "taken for the rank's own work"
        notes.append(f"unknown optype {name!r}: {how}")


def _drop_partial(timeline: Timeline, data: Ints, tensor: Ints, lanes: Lanes, kept: Bools, notes: list[str]) -> None:
    """A type that some lanes of a stage never have would make every step differ from lane to lane."""
    presence = np.zeros((len(timeline.names), *lanes.rank.shape), dtype=bool)
    presence[timeline.operation, timeline.stage, data, tensor] = True
    some = presence.any(axis=(2, 3)) & ~presence.all(axis=(2, 3))
    for number, stage in np.argwhere(some).tolist():
        name = timeline.names[number]
        if name in COMPUTES:
            continue
        kept &= ~((timeline.operation == number) & (timeline.stage == stage))
        notes.append(f"{name} of stage {stage} left out: some of its ranks have none")
