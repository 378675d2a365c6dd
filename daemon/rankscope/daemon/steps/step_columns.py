"""Turns a ring's raw records into the columns of a StepSample: rejects impossible values, and assigns DDP's figures,
which the probe reads one step late, to their step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.verdicts.figures import FIGURES, MAX_STEP_SECONDS, OF_STEPS, PER_STEP, StepColumns
from rankscope.analysis.verdicts.window_columns import plausible_seconds
from rankscope.common.text import printable
from rankscope.daemon.samples import Column, GroupSpan, self_seconds
from rankscope.probe import ring_layout

Mask: TypeAlias = npt.NDArray[np.bool_]

MAX_CLOCK_NS = 1 << 62
# Clocks of one machine agree; this allows for an adjustment of the wall clock since the probe last read it.
FUTURE_NS = 60_000_000_000
# Rows per read: a ring whose every record claims the largest number of steps would otherwise take tens of gigabytes. No
# window of a real job has this many.
MAX_ROWS = 1 << 18
MAX_GROUP_NUMBER = 1 << 53
GROUP_KINDS = frozenset(
    {
        ring_layout.GROUP_EXPOSED,
        ring_layout.GROUP_OVERLAPPED,
        ring_layout.GROUP_POINT_TO_POINT,
        ring_layout.GROUP_DDP,
        ring_layout.GROUP_RECORDER,
    }
)
EXPOSED_KINDS = (ring_layout.GROUP_EXPOSED, ring_layout.GROUP_DDP)
MAX_TOTAL = 1e12
# Figures that the record has as they are. The others are worked out here.
_RECORDED = tuple(name for name in OF_STEPS if name in ring_layout.SECONDS)


def ends_unix_nanos(records: npt.NDArray[np.void], wall_minus_monotonic_ns: int) -> npt.NDArray[np.int64]:
    """Values out of range become -1: garbage in gives garbage out, but no overflow."""
    ends = records["end_ns"]
    in_range = (ends >= 0) & (ends < MAX_CLOCK_NS)
    shifted: npt.NDArray[np.int64] = np.where(in_range, ends + np.int64(wall_minus_monotonic_ns), -1)
    return shifted


def plausible(records: npt.NDArray[np.void], ends: npt.NDArray[np.int64], now_unix_nanos: int) -> Mask:
    span = records["span_ns"]
    good: Mask = (span >= 0) & (span <= MAX_STEP_SECONDS * 1e9) & (records["steps"] > 0)
    good &= (ends >= 0) & (ends <= now_unix_nanos + FUTURE_NS)
    return good


def newest(records: npt.NDArray[np.void], wanted: Mask, rows: int = MAX_ROWS) -> Mask:
    """The last of the wanted records that give at most so many rows."""
    steps = np.where(wanted, records["steps"], 0).astype(np.int64)
    from_here_on = np.cumsum(steps[::-1])[::-1]
    kept: Mask = wanted & (from_here_on <= rows)
    return kept


def columns(
    records: npt.NDArray[np.void], good: Mask, wanted: Mask, collective_seconds: Column | None = None
) -> StepColumns:
    """One row per step of the `wanted` records: the steps of one record share its time evenly. `good` marks the
    valid records; a DDP figure comes from the next record. `collective_seconds`: of the wanted records, where NCCL
    told it."""
    ddp = {name: _from_the_next(_seconds(records[f"ddp_{name}_seconds"]), good)[wanted] for name in _DDP_NAMES}
    rows = records[wanted]
    span = rows["span_ns"] * 1e-9
    blocking = np.minimum(_seconds(rows["blocking_seconds"]), span)
    exposed = np.maximum(ddp["communication"] - ddp["overlap"], 0.0)
    has_ddp = (rows["flags"] & ring_layout.FLAG_DDP) != 0
    on_device = (rows["flags"] & ring_layout.FLAG_DEVICE) != 0
    # On a device both are sampled, but not in the same steps: the mean of the other is used.
    spans = _seconds(rows["exposed_seconds"])
    known = ~np.isnan(spans)
    typical = float(spans[known].mean()) if known.any() else 0.0
    other = np.where(on_device, np.where(known, spans, typical), blocking)
    alone = np.where(on_device, spans, blocking)
    alone = np.where((rows["flags"] & ring_layout.FLAG_BLIND) != 0, np.nan, alone)
    steps = rows["steps"]
    communication = np.where(has_ddp, other + ddp["communication"], alone)
    if collective_seconds is not None:
        communication = np.minimum(collective_seconds, span)

    wait = np.minimum(np.where(has_ddp, other + exposed, alone), span)
    found = {
        "step_seconds": span,
        "self_seconds": self_seconds(span, wait),
        "wait_seconds": wait,
        "communication_seconds": communication,
        "forward_seconds": ddp["forward"],
        "backward_seconds": ddp["backward"],
    }
    for name in _RECORDED:
        seconds = _seconds(rows[name])
        found[name] = np.minimum(seconds, span) if FIGURES[name].is_cause else seconds
    per_step = (name for name in found if FIGURES[name].unit == PER_STEP)
    found |= {name: found[name] / steps for name in per_step}
    return StepColumns(**{name: np.repeat(column, steps) for name, column in found.items()})


def bounding_seconds(records: npt.NDArray[np.void]) -> Column:
    """What a step spent where a rank waits: in calls that block and, with DDP, in the backward pass. NaN on a device,
    and where it may wait elsewhere."""
    flags = records["flags"]
    is_bound = ((flags & ring_layout.FLAG_DDP) != 0) & ((flags & ring_layout.FLAG_BLIND) == 0)
    seconds = (_seconds(records["in_backward_seconds"]) + _seconds(records["blocking_seconds"])) / records["steps"]
    return np.where(is_bound, seconds, np.nan)


GroupTotals: TypeAlias = Mapping[tuple[int, int], tuple[int, float, float]]


def group_spans(table: npt.NDArray[np.void] | None, before: GroupTotals) -> tuple[tuple[GroupSpan, ...], GroupTotals]:
    """What was added to each group since `before`, and the totals to compare the next table with."""
    if table is None:
        return (), before
    found, totals = [], {}
    for row in table:
        number, size, position, kind, samples, seconds, step_seconds = row.item()
        key = (number, kind)
        if key in totals or not (number < MAX_GROUP_NUMBER and 0 <= position < size and kind in GROUP_KINDS):
            continue
        if not (0 <= seconds <= MAX_TOTAL and 0 <= step_seconds <= MAX_TOTAL and samples <= MAX_TOTAL):
            continue
        totals[key] = (samples, seconds, step_seconds)
        samples_before, seconds_before, step_seconds_before = before.get(key, (0, 0.0, 0.0))
        new = samples - samples_before
        if new <= 0 or seconds < seconds_before or step_seconds <= step_seconds_before:
            continue
        per_step = (seconds - seconds_before) / new
        found.append(GroupSpan(number, size, position, kind, new, per_step, (step_seconds - step_seconds_before) / new))
    return tuple(found), totals


RangeTotals: TypeAlias = Mapping[str, tuple[int, float]]


def range_seconds(table: npt.NDArray[np.void] | None, before: RangeTotals) -> tuple[Mapping[str, float], RangeTotals]:
    """Seconds of a step in each NVTX range since `before`, the longest first, and the totals to compare the next table
    with. Names are the program's."""
    if table is None:
        return {}, before
    totals: dict[str, tuple[int, float]] = {}
    for row in table:
        raw, steps, seconds = row.item()
        name = printable(raw.decode("utf-8", "ignore"))
        if name and 0 <= seconds <= MAX_TOTAL and steps <= MAX_TOTAL:
            totals[name] = (steps, totals.get(name, (0, 0.0))[1] + seconds)
    steps_before = max((steps for steps, _ in before.values()), default=0)
    found = {}
    for name, (steps, seconds) in totals.items():
        new = seconds - before.get(name, (0, 0.0))[1]
        if steps > steps_before and 0 < new <= (steps - steps_before) * MAX_STEP_SECONDS:
            found[name] = new / (steps - steps_before)
    return dict(sorted(found.items(), key=lambda item: -item[1])), totals


_DDP_NAMES = ("forward", "backward", "communication", "overlap")


def _seconds(column: npt.NDArray[np.float32]) -> Column:
    with np.errstate(invalid="ignore"):  # casting a signalling NaN, which only a forged ring contains, warns
        return plausible_seconds(column.astype(np.float64))


def _from_the_next(column: Column, good: Mask) -> Column:
    shifted = np.full(len(column), np.nan)
    shifted[:-1] = np.where(good[1:], column[1:], np.nan)
    return shifted
