"""Aligns the clocks of all ranks: no rank leaves a collective before all ranks have entered it, so all leave it
together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.analysis.stats.robust import (
    MAD_TO_SIGMA,
    Bools,
    Floats,
    Ints,
    grouped_median,
    number_groups,
    order_within_groups,
    rows_of_groups,
)

ROUNDS = 30
SETTLED_NS = 50.0
# Quartz clocks drift by about 50 ppm. A slope is fitted if the capture is long enough to show it above the noise.
DRIFT_SPAN_NS = 200_000_000
DRIFT_COLLECTIVES = 16
MAX_DRIFT_RATIO = 1e-3
DRIFT_TO_NOISE = 3.0


@dataclass(frozen=True)
class SharedEnds:
    """The ends of operations in which ranks meet, a row per rank and meeting."""

    meeting: Ints
    rank: Ints
    end_ns: Ints
    is_together: Bools  # all ranks leave the meeting at the same time


@dataclass(frozen=True)
class ClockShift:
    """Converts a rank's clock: common time = t + offset + drift × (t − origin)."""

    offset_ns: int = 0
    drift_ratio: float = 0.0
    origin_ns: int = 0

    def common(self, time_ns: Ints) -> Ints:
        drifted = np.rint(self.drift_ratio * (time_ns - self.origin_ns)).astype(np.int64)
        return np.asarray(time_ns + self.offset_ns + drifted)


@dataclass(frozen=True)
class Clocks:
    shifts: Mapping[int, ClockShift]  # all ranks; those that share no collective keep their own clock
    residual_us: float | None  # how far the ends of a collective still differ, as a standard deviation
    components: tuple[tuple[int, ...], ...]  # sets of ranks that could be aligned with each other

    def common(self, rank: Ints, time_ns: Ints) -> Ints:
        ranks = np.array(list(self.shifts), dtype=np.int64)
        table = list(self.shifts.values())
        order = np.argsort(ranks)
        index = order[np.searchsorted(ranks[order], rank)]
        origin = np.array([shift.origin_ns for shift in table], dtype=np.int64)[index]
        drift = np.array([shift.drift_ratio for shift in table])[index]
        offset = np.array([shift.offset_ns for shift in table], dtype=np.int64)[index]
        return np.asarray(time_ns + offset + np.rint(drift * (time_ns - origin)).astype(np.int64))


def align(ends: SharedEnds, ranks: list[int]) -> Clocks:
    """The lowest rank of each set of ranks that can be aligned keeps its clock."""
    index = np.searchsorted(np.array(ranks, dtype=np.int64), ends.rank)
    meeting, end, tight = ends.meeting, ends.end_ns, ends.is_together
    origin = int(end.min()) if len(end) else 0
    offset = np.zeros(len(ranks), dtype=np.int64)
    component = np.arange(len(ranks))
    # Collectives with a root and transfers of pairs end at different times: used only if nothing better links the
    # ranks.
    for rows in (tight, ~tight):
        offset, component = _link(meeting[rows], index[rows], end[rows], offset, component)
    # Float is exact enough from here on: all times lie within the capture.
    moved = (end + offset[index] - origin).astype(np.float64)
    fitted = _Fit(np.zeros(len(ranks)), np.zeros(len(ranks)))
    middle = float(np.median(moved)) if len(moved) else 0.0
    if tight.any():
        sample = _Sample.of(meeting[tight], index[tight], moved[tight], middle)
        fitted = _settle(sample, fitted, drifting=np.zeros(len(ranks), dtype=bool))
        drifting = _drifting(sample, fitted)
        if drifting.any():
            fitted = _settle(sample, fitted, drifting)
        fitted = _anchor(fitted, component)
    used = tight if tight.any() else ~tight
    residual = _residual(_Sample.of(meeting[used], index[used], moved[used], middle), fitted)
    shifts = {}
    for position, rank in enumerate(ranks):
        own_origin = round(middle) + origin - int(offset[position])
        total = int(offset[position]) + round(float(fitted.offset[position]))
        shifts[rank] = ClockShift(total, float(fitted.slope[position]), own_origin)
    parts = [tuple(r for r, c in zip(ranks, component, strict=True) if c == which) for which in np.unique(component)]
    return Clocks(shifts, residual, tuple(sorted(parts, key=lambda part: (-len(part), part))))


def _link(collective: Ints, index: Ints, end: Ints, offset: Ints, component: Ints) -> tuple[Ints, Ints]:
    """Join components of ranks by the median difference of the ends they share, most shared collectives first."""
    offset, component = offset.copy(), component.copy()
    order = np.argsort(collective, kind="stable")
    collective, index, end = collective[order], index[order], end[order]
    rows = rows_of_groups(index, len(offset))
    for left, right, _ in _edges(collective, index):
        if component[left] == component[right]:
            continue
        here, there = rows[left], rows[right]
        common, at_left, at_right = np.intersect1d(collective[here], collective[there], return_indices=True)
        if not len(common):
            continue
        difference = end[here][at_left] + offset[left] - end[there][at_right] - offset[right]
        moved = component == component[right]
        offset[moved] += _median(difference)
        component[moved] = component[left]
    return offset, component


def _edges(collective: Ints, index: Ints) -> list[tuple[int, int, int]]:
    """Pairs of ranks that are neighbours in a collective, with the number they share. A chain links each group, so a
    thousand ranks make a thousand pairs and not half a million."""
    if len(collective) < 2:
        return []
    order = np.lexsort((index, collective))
    same = collective[order][1:] == collective[order][:-1]
    left, right = index[order][:-1][same], index[order][1:][same]
    pair, count = number_groups(left, right)
    shared = np.bincount(pair, minlength=count)
    first = np.zeros(count, dtype=np.int64)
    first[pair] = np.arange(len(pair))
    by_strength = np.argsort(-shared, kind="stable")
    return [(int(left[first[p]]), int(right[first[p]]), int(shared[p])) for p in by_strength]


def _median(values: Ints) -> int:
    """Exact for integers of any size; a float would round to a quarter of a microsecond."""
    return int(values[0]) + round(float(np.median((values - values[0]).astype(np.float64))))


@dataclass(frozen=True)
class _Fit:
    offset: Floats
    slope: Floats


@dataclass(frozen=True)
class _Sample:
    """Ends of meetings, which have numbers from 0."""

    meeting: Ints
    count: int
    index: Ints
    time: Floats
    middle: float

    @classmethod
    def of(cls, meeting: Ints, index: Ints, time: Floats, middle: float) -> _Sample:
        return cls(*number_groups(meeting), index, time, middle)

    @cached_property
    def half_apart(self) -> tuple[Ints, Ints]:
        """Pairs of rows of each rank with enough of them: the second is later by half of all that it has."""
        count = int(self.index.max(initial=-1)) + 1
        order = order_within_groups(self.time, self.index, count)
        size = np.bincount(self.index, minlength=count)
        first, size = (np.cumsum(size) - size)[self.index[order]], size[self.index[order]]
        place = np.arange(len(order))
        begins = (size >= DRIFT_COLLECTIVES) & (place - first < size - size // 2)
        return order[begins], order[(place + size // 2)[begins]]

    def deviation(self, fit: _Fit) -> Floats:
        """The distance of each end from the median of its meeting."""
        own = self.time + fit.offset[self.index] + fit.slope[self.index] * (self.time - self.middle)
        return own - grouped_median(own, self.meeting, self.count)[self.meeting]


def _settle(sample: _Sample, fit: _Fit, drifting: Bools) -> _Fit:
    """Alternating medians: of each collective over its ranks, of each rank over its collectives."""
    count = len(fit.offset)
    for _ in range(ROUNDS):
        slope = fit.slope
        if drifting.any():
            slope = slope - np.where(drifting, _slopes(sample, sample.deviation(fit), count), 0.0)
            fit = replace(fit, slope=slope)
        change = np.nan_to_num(grouped_median(sample.deviation(fit), sample.index, count))
        fit = replace(fit, offset=fit.offset - change)
        if np.abs(change).max(initial=0.0) < SETTLED_NS:
            break
    return fit


def _slopes(sample: _Sample, deviation: Floats, count: int) -> Floats:
    """Per rank, the slope of its deviation over time: the median slope between calls half a capture apart (after
    Theil and Sen)."""
    before, after = sample.half_apart
    apart = sample.time[after] - sample.time[before]
    real = apart > 0
    before, after = before[real], after[real]
    slopes = grouped_median((deviation[after] - deviation[before]) / apart[real], sample.index[before], count)
    return np.clip(np.nan_to_num(slopes), -MAX_DRIFT_RATIO, MAX_DRIFT_RATIO)


def _drifting(sample: _Sample, fit: _Fit) -> Bools:
    """Ranks with a slope that moves ends clearly beyond their scatter. If one drifts, all are fitted: which of two
    clocks is wrong is unknown."""
    count = len(fit.offset)
    span = float(np.ptp(sample.time))
    if span < DRIFT_SPAN_NS:
        return np.zeros(count, dtype=bool)
    deviation = sample.deviation(fit)
    slope = _slopes(sample, deviation, count)
    flat = deviation - slope[sample.index] * (sample.time - sample.middle)
    noise = MAD_TO_SIGMA * float(np.median(np.abs(flat - np.median(flat))))
    shared = np.bincount(sample.index, minlength=count)
    # The approximate error of a slope between halves.
    error = 4.0 * noise / (span * np.sqrt(np.maximum(shared, 1)))
    drifts = (np.abs(slope) > DRIFT_TO_NOISE * error) & (np.abs(slope) * span > noise)
    return (shared >= DRIFT_COLLECTIVES) & bool(drifts.any())


def _anchor(fit: _Fit, component: Ints) -> _Fit:
    """Offsets and slopes are relative: the first rank of a component is the reference."""
    first = np.array([int(np.flatnonzero(component == which)[0]) for which in component])
    return _Fit(fit.offset - fit.offset[first], fit.slope - fit.slope[first])


def _residual(sample: _Sample, fit: _Fit) -> float | None:
    if not len(sample.time):
        return None
    deviation = sample.deviation(fit)
    size = np.bincount(sample.meeting, minlength=sample.count)[sample.meeting]
    # The median of a few values lies among them: two values are twice as far apart as each deviates.
    corrected = np.abs(deviation) * np.sqrt(size / np.maximum(size - 1, 1))
    return float(MAD_TO_SIGMA * np.median(corrected)) / 1000
