"""Cohorts in which the slow are too many for a median: one of two nodes is hot, or the data is uneven."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Floats, Ints


@dataclass(frozen=True)
class Split:
    slow: Bools  # per row
    fast_seconds: float  # median of the faster group
    slow_seconds: float
    follows_place: bool


def find_split(own_seconds: Floats, place: Ints, rank_ratio: float) -> Split | None:
    """Two clear groups of at least two ranks each, or None.

    Clear: the gap between the groups is larger than either group is wide, and their medians are `rank_ratio` apart."""
    if len(own_seconds) < 4 or bool(np.isnan(own_seconds).any()):
        return None
    ordered = np.sort(own_seconds)
    gaps = np.diff(ordered)[1:-1]  # leaves two on either side
    if len(gaps) == 0:
        return None
    cut = int(np.argmax(gaps)) + 2
    fast, slow = ordered[:cut], ordered[cut:]
    gap = slow[0] - fast[-1]
    fast_median, slow_median = float(np.median(fast)), float(np.median(slow))
    clear = slow_median >= rank_ratio * fast_median and gap > max(fast[-1] - fast[0], slow[-1] - slow[0])
    if not clear or len(slow) * 3 < len(ordered):
        return None  # a small slow group is the median's business
    is_slow = own_seconds >= slow[0]
    follows = not np.intersect1d(place[is_slow], place[~is_slow]).size
    return Split(is_slow, fast_median, slow_median, follows)
