"""Sets of time as sorted disjoint intervals [start, end): who was busy, together with whom, and when nobody was."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from rankscope.analysis.robust import Bools, Ints

Intervals: TypeAlias = tuple[Ints, Ints]

NOTHING: Intervals = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start: Ints, end: Ints) -> Intervals:
    """Disjoint and sorted; intervals that touch become one, empty ones vanish."""
    merged_start, merged_end = merge(start, end)
    real = merged_end > merged_start
    return merged_start[real], merged_end[real]


def merge(start: Ints, end: Ints) -> Intervals:
    """Like `union`, but what stands alone stays even when it is empty."""
    if len(start) == 0:
        return NOTHING
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(end)
    first = np.ones(len(start), dtype=bool)
    first[1:] = start[1:] > reached[:-1]
    heads = np.flatnonzero(first)
    return start[heads], np.maximum.reduceat(end, heads)


def total(start: Ints, end: Ints) -> int:
    """Of disjoint intervals."""
    return int(end.sum() - start.sum())


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Of two disjoint sorted sets."""
    moments = _moments(left, right)
    return _runs(moments, contains(left, moments) & contains(right, moments))


def difference(left: Intervals, right: Intervals) -> Intervals:
    """What is in `left` and not in `right`, both disjoint and sorted."""
    moments = _moments(left, right)
    return _runs(moments, contains(left, moments) & ~contains(right, moments))


def gaps(busy: Intervals) -> Intervals:
    """What lies between neighbours."""
    return busy[1][:-1], busy[0][1:]


def clip(spans: Intervals, begin: int, finish: int) -> Intervals:
    """What of disjoint sorted intervals lies in [begin, finish)."""
    first, last = np.searchsorted(spans[1], begin, "right"), np.searchsorted(spans[0], finish, "left")
    start, end = np.maximum(spans[0][first:last], begin), np.minimum(spans[1][first:last], finish)
    real = end > start
    return start[real], end[real]


def covered_until(spans: Intervals, moments: Ints) -> Ints:
    """How much of disjoint sorted intervals lies before each moment: the difference of two moments is what lies
    between them."""
    if len(spans[0]) == 0:
        return np.zeros(len(moments), dtype=np.int64)
    lengths = np.concatenate(([0], np.cumsum(spans[1] - spans[0])))
    begun = np.searchsorted(spans[0], moments, "right")
    last = np.maximum(begun - 1, 0)
    inside = np.minimum(moments, spans[1][last]) - spans[0][last]
    return np.where(begun > 0, lengths[last] + inside, 0)


def contains(spans: Intervals, moments: Ints) -> Bools:
    """Whether each moment lies in one of the disjoint sorted intervals."""
    if len(spans[0]) == 0:
        return np.zeros(len(moments), dtype=bool)
    last = np.searchsorted(spans[0], moments, "right") - 1
    return (last >= 0) & (moments < spans[1][np.maximum(last, 0)])


def _moments(left: Intervals, right: Intervals) -> Ints:
    """When either set begins or ends, in order. A stable sort merges what is sorted in parts already."""
    return np.sort(np.concatenate((*left, *right)), kind="stable")


def _runs(moments: Ints, inside: Bools) -> Intervals:
    """From each moment that holds to the next one that does not; the last moment never holds."""
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    return moments[edges[0::2]], moments[edges[1::2]]
