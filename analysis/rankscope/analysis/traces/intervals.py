"""Sets of time as sorted disjoint intervals [start, end), and the nesting of spans on a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.trace import ABSENT, Trace, take_or_absent

Intervals: TypeAlias = tuple[Ints, Ints]
# Deeper nesting than operators have.
_CLIMBS = 64
NOTHING: Intervals = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def union(start: Ints, end: Ints) -> Intervals:
    """Disjoint and sorted. Touching intervals are joined, empty ones dropped."""
    merged_start, merged_end = merge(start, end)
    real = merged_end > merged_start
    return merged_start[real], merged_end[real]


def unite(*sets: Intervals) -> Intervals:
    """The union of several sets."""
    return union(np.concatenate([start for start, _ in sets]), np.concatenate([end for _, end in sets]))


def merge(start: Ints, end: Ints) -> Intervals:
    """Like `union`, but keeps empty intervals that touch no other."""
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
    """Total length of disjoint intervals."""
    return int(end.sum() - start.sum())


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """Both sets must be disjoint and sorted."""
    moments = _moments(left, right)
    return _runs(moments, contains(left, moments) & contains(right, moments))


def difference(left: Intervals, right: Intervals) -> Intervals:
    """What is in `left` but not in `right`. Both must be disjoint and sorted."""
    moments = _moments(left, right)
    return _runs(moments, contains(left, moments) & ~contains(right, moments))


def gaps(busy: Intervals) -> Intervals:
    """The gaps between neighbours."""
    return busy[1][:-1], busy[0][1:]


def clip(spans: Intervals, begin: int, finish: int) -> Intervals:
    """The part of disjoint sorted intervals that lies in [begin, finish)."""
    first, last = np.searchsorted(spans[1], begin, "right"), np.searchsorted(spans[0], finish, "left")
    start, end = np.maximum(spans[0][first:last], begin), np.minimum(spans[1][first:last], finish)
    real = end > start
    return start[real], end[real]


def covered_until(spans: Intervals, moments: Ints) -> Ints:
    """How much of disjoint sorted intervals lies before each moment. The difference of two moments is what lies
    between them."""
    if len(spans[0]) == 0:
        return np.zeros(len(moments), dtype=np.int64)
    lengths = np.concatenate(([0], np.cumsum(spans[1] - spans[0])))
    begun = np.searchsorted(spans[0], moments, "right")
    last = np.maximum(begun - 1, 0)
    inside = np.minimum(moments, spans[1][last]) - spans[0][last]
    return np.where(begun > 0, lengths[last] + inside, 0)


def uncovered(sets: Sequence[Intervals], cover: Intervals) -> list[int]:
    """Of each set, how much lies outside of `cover`; all sets at once, as a large cover takes long to prepare."""
    if not sets:
        return []
    starts, ends = (np.concatenate([spans[side] for spans in sets]) for side in (0, 1))
    left = ends - starts - (covered_until(cover, ends) - covered_until(cover, starts))
    borders = np.cumsum([0, *(len(spans[0]) for spans in sets)])
    totals = np.concatenate(([0], np.cumsum(left)))[borders]
    return [int(total) for total in np.diff(totals)]


def contains(spans: Intervals, moments: Ints) -> Bools:
    """Whether each moment lies in one of the disjoint sorted intervals."""
    if len(spans[0]) == 0:
        return np.zeros(len(moments), dtype=bool)
    last = np.searchsorted(spans[0], moments, "right") - 1
    return (last >= 0) & (moments < spans[1][np.maximum(last, 0)])


def _moments(left: Intervals, right: Intervals) -> Ints:
    """All moments at which either set begins or ends, in order. A stable sort merges parts that are already sorted."""
    return np.sort(np.concatenate((*left, *right)), kind="stable")


def _runs(moments: Ints, inside: Bools) -> Intervals:
    """Intervals from each moment that is inside to the next one that is not. The last moment is never inside."""
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    return moments[edges[0::2]], moments[edges[1::2]]


@dataclass(frozen=True)
class Spans:
    """Rows of a trace, ordered by thread and start. Spans of a thread nest; they never cross. The numbers below are
    positions in `row`."""

    row: Ints
    start_ns: Ints
    end_ns: Ints
    key: Ints  # thread and start as one sortable number; see key_at
    parent: Ints  # the innermost enclosing span; -1 at the top
    thread_of_row: Ints
    moments_ns: Ints  # all distinct starts: keys use positions in it, so that long times cannot overflow

    def key_at(self, rows: Ints, moment_ns: Ints) -> Ints:
        """A key that sorts after all spans that had started on the row's thread by then."""
        place = np.searchsorted(self.moments_ns, moment_ns, side="right")
        return self.thread_of_row[rows] * (len(self.moments_ns) + 1) + place

    def around(self, rows: Ints, moment_ns: Ints) -> Ints:
        """The innermost span that contains the moment on the row's thread; -1 if there is none."""
        if not len(self.row):
            return np.full(len(rows), ABSENT)
        found = np.searchsorted(self.key, self.key_at(rows, moment_ns), side="right") - 1
        other_thread = (found >= 0) & (self.thread_of_row[self.row[found]] != self.thread_of_row[rows])
        found[other_thread] = ABSENT
        for _ in range(_CLIMBS):
            outside = np.flatnonzero((found >= 0) & (self.end_ns[found] < moment_ns))
            if not len(outside):
                return found
            found[outside] = self.parent[found[outside]]
        return self._climb(found, moment_ns)

    def _climb(self, found: Ints, moment_ns: Ints) -> Ints:
        """For nesting as deep as a forged trace has it: ancestors 1, 2, 4, … levels up, then from the furthest down."""
        ancestors = [self.parent]
        while np.any((up := take_or_absent(ancestors[-1], ancestors[-1])) >= 0):
            ancestors.append(up)
        rows = np.flatnonzero((found >= 0) & (self.end_ns[found] < moment_ns))
        place, moments = found[rows], moment_ns[rows]
        for ancestor in reversed(ancestors):
            higher = take_or_absent(ancestor, place)
            place = np.where((higher >= 0) & (self.end_ns[higher] < moments), higher, place)
        found[rows] = take_or_absent(self.parent, place)
        return found


def nest(trace: Trace, rows: Ints) -> Spans:
    """The rows as spans of their threads. Spans that cross, as in a corrupt trace, have an arbitrary parent."""
    threads, _ = number_groups(trace.process, trace.thread)
    moments = np.unique(trace.start_ns[rows])
    key = threads[rows] * (len(moments) + 1) + np.searchsorted(moments, trace.start_ns[rows], side="right")
    # At equal starts the longer span comes first, as the parent.
    order = np.lexsort((-trace.duration_ns[rows], key))
    rows, key = rows[order], key[order]
    start, end, thread = trace.start_ns[rows], trace.end_ns[rows], threads[rows]
    parent = np.arange(len(rows)) - 1
    if len(rows):
        parent[1:][thread[1:] != thread[:-1]] = ABSENT
    for _ in range(64):  # pointer jumping: each pass doubles the reach
        outside = (parent >= 0) & (end[parent] < end)
        if not np.any(outside):
            break
        parent[outside] = parent[parent[outside]]
    return Spans(rows, start, end, key, parent, threads, moments)
