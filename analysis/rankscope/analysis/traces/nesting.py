"""Which host event encloses which moment on the same thread: spans of a thread nest, they never cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints, number_groups
from rankscope.analysis.traces.columns import ABSENT, Trace


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
