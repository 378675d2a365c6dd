"""The work of ranks earlier in the run. A rank is compared with its own past where no other rank does the same, as in a
pipeline with one rank in each stage."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, grouped_median, median_or_nan, number_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.roles import Parts, Peers

MAX_WINDOWS = 30
MIN_WINDOWS = 5


class _Work(NamedTuple):
    """Means of one window, by rank and part of the program: a part that takes long in a few steps adds to what is
    usual, which a median over steps would not show."""

    rank: Ints
    part: Ints
    before: Ints
    own_ns: Floats
    host_ns: Floats


class PastWork:
    def __init__(self) -> None:
        self._windows: deque[_Work] = deque(maxlen=MAX_WINDOWS)

    def fill(self, graph: StepGraph, parts: Parts, peers: Peers) -> Peers:
        """The rows without a peer get what the rank needed in earlier windows. What made all of these ranks slower, as
        longer sequences do, is no fault of one of them."""
        alone = np.isnan(peers.own_ns[parts.rows])
        if len(self._windows) < MIN_WINDOWS or not alone.any():
            return peers
        rows = parts.rows[alone]
        rank, now = graph.operations.rank[rows], graph.own_ns[rows]
        past = _Work(*(np.concatenate(column) for column in zip(*self._windows, strict=True)))
        keys = ((past.rank, rank), (past.part, parts.number[alone]), (past.before, parts.before[alone]))
        number, count = number_groups(*(np.concatenate(key) for key in keys))
        earlier, current = number[: len(past.rank)], number[len(past.rank) :]
        own = grouped_median(past.own_ns, earlier, count)[current]
        host = grouped_median(past.host_ns, earlier, count)[current]
        growth = _growth(rank, now, own)
        filled = Peers(peers.own_ns.copy(), peers.host_ns.copy())
        filled.own_ns[rows], filled.host_ns[rows] = own * growth, host * growth
        return filled

    def learn(self, graph: StepGraph, parts: Parts, wanted: Bools) -> None:
        """`wanted`: the rows of ranks that are not slow."""
        chosen = wanted[parts.rows]
        rows = parts.rows[chosen]
        rank, part, before = graph.operations.rank[rows], parts.number[chosen], parts.before[chosen]
        number, count = number_groups(rank, part, before)
        first = np.zeros(count, dtype=np.int64)
        first[number] = np.arange(len(rows))
        own, host = (
            np.bincount(number, column[rows], count) / np.maximum(np.bincount(number, minlength=count), 1)
            for column in (graph.own_ns, graph.host_ns)
        )
        self._windows.append(_Work(rank[first], part[first], before[first], own, host))


def _growth(rank: Ints, now: Ints, past: Floats) -> float:
    """The ratio of the typical rank's work to its work before; at least 1."""
    known = ~np.isnan(past)
    number, count = number_groups(rank[known])
    sums = (np.bincount(number, weights=column, minlength=count) for column in (now[known], past[known]))
    total_now, total_past = sums
    growth = median_or_nan(total_now[total_past > 0] / total_past[total_past > 0])
    return max(growth, 1.0) if growth == growth else 1.0
