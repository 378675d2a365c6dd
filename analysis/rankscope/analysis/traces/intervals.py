"""Sets of time as sorted disjoint intervals [start, end): who was busy, together with whom, and when nobody was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.trace import ABSENT, Trace

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


# Which host event encloses which moment on the same thread: spans of a thread nest, they never cross.


@dataclass(frozen=True)
class Spans:
    """Some rows of a trace, ordered by thread and start. Numbers below are positions in `row`."""

    row: Ints
    start_ns: Ints
    end_ns: Ints
    key: Ints  # thread and start as one number that sorts; see key_at
    parent: Ints  # the innermost other span around it; -1 at the top
    thread_of_row: Ints
    moments_ns: Ints  # all starts once: keys count these, so that no time is too long for them

    def key_at(self, rows: Ints, moment_ns: Ints) -> Ints:
        """Sorts after the keys of all spans that began by then on that row's thread."""
        place = np.searchsorted(self.moments_ns, moment_ns, side="right")
        return self.thread_of_row[rows] * (len(self.moments_ns) + 1) + place

    def around(self, rows: Ints, moment_ns: Ints) -> Ints:
        """The innermost span that holds the moment on the thread of that row; -1 where there is none."""
        if not len(self.row):
            return np.full(len(rows), ABSENT)
        found = np.searchsorted(self.key, self.key_at(rows, moment_ns), side="right") - 1
        other_thread = (found >= 0) & (self.thread_of_row[self.row[found]] != self.thread_of_row[rows])
        found[other_thread] = ABSENT
        while np.any(outside := (found >= 0) & (self.end_ns[found] < moment_ns)):
            found[outside] = self.parent[found[outside]]
        return found


def nest(trace: Trace, rows: Ints) -> Spans:
    """The rows as spans of their threads. Spans that cross, which a broken trace may hold, have no right parent."""
    threads, _ = number_groups(trace.process, trace.thread)
    moments = np.unique(trace.start_ns[rows])
    key = threads[rows] * (len(moments) + 1) + np.searchsorted(moments, trace.start_ns[rows], side="right")
    # Equal starts: the longer span stands first, as the parent.
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
