"""Makes whole events of those written as a beginning and an end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints


@dataclass(frozen=True)
class Pairs:
    begin: Ints  # rows, parallel
    end: Ints
    alone: int  # beginnings and ends without their other half


def pair(thread: Ints, time_ns: Ints, begins: Bools) -> Pairs:
    """Rows are in the order of the file, which decides between events of the same thread and time. A beginning takes
    its thread one level up and an end one level down, so that at each level they alternate and neighbours belong
    together, also where the file starts in the middle of a stack."""
    order = np.lexsort((np.arange(len(thread)), time_ns, thread))
    step = np.where(begins[order], 1, -1)
    level = np.cumsum(step) + (step < 0)
    ranked = np.lexsort((np.arange(len(order)), level, thread[order]))
    rows, levels = order[ranked], level[ranked]
    together = (
        begins[rows[:-1]] & ~begins[rows[1:]] & (thread[rows[:-1]] == thread[rows[1:]]) & (levels[:-1] == levels[1:])
    )
    first = np.flatnonzero(together)
    return Pairs(rows[first], rows[first + 1], len(rows) - 2 * len(first))
