"""Who came last to each collective, how long the others waited for it, and how long the transfer itself took."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.joins.aligning import Clocks
from rankscope.analysis.traces.joins.matching import Matched


@dataclass(frozen=True)
class Arrivals:
    """By member of a collective (in the order of `Matched`) and, where said, by collective. Times are common."""

    start_ns: Ints
    end_ns: Ints
    wait_ns: Ints  # for others; the rest of the duration is transfer
    transfer_ns: Ints  # by collective: what it takes when everybody is there
    last: Ints  # by collective: the member (row) that came last
    lead_ns: Ints  # by collective: how long before the last the one before it came
    spread_ns: Ints  # by collective: from the first arrival to the last
    possible: Bools  # by collective: nobody left before another came, as far as the clocks can tell


def find_arrivals(matched: Matched, clocks: Clocks) -> Arrivals:
    """transfer = the least, over the group, of (own end − latest start); wait = own duration − transfer."""
    calls, collective, count = matched.calls, matched.collective, matched.count
    start = clocks.common(calls.rank, calls.start_ns)
    end = clocks.common(calls.rank, calls.end_ns)
    nothing = np.zeros(0, dtype=np.int64)
    if count == 0:
        return Arrivals(start, end, nothing, nothing, nothing, nothing, nothing, np.zeros(0, dtype=bool))
    heads = np.searchsorted(collective, np.arange(count))
    earliest, latest = np.minimum.reduceat(start, heads), np.maximum.reduceat(start, heads)
    first_end = np.minimum.reduceat(end, heads)
    transfer = np.maximum(first_end - latest, 0)
    duration = calls.end_ns - calls.start_ns
    wait = np.maximum(duration - transfer[collective], 0)
    order = np.lexsort((start, collective))
    tails = np.append(heads[1:], len(collective)) - 1
    tolerance = 10_000 + int(10_000 * (clocks.residual_us or 0.0))
    return Arrivals(
        start,
        end,
        wait,
        transfer,
        last=order[tails],
        lead_ns=start[order[tails]] - start[order[tails - 1]],
        spread_ns=latest - earliest,
        possible=~matched.together | (latest <= first_end + tolerance),
    )
