"""Finds the few steps of a run that took at least twice as long as the others."""

from __future__ import annotations

from typing import Final

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats

LONG_RATIO: Final = 2.0
# Steps of a few milliseconds vary by as much.
MIN_EXCESS_SECONDS: Final = 0.010
# A window with fewer steps is compared together with those before it.
RECENT_STEPS: Final = 64
STEPS_NEEDED: Final = 16
# A long step is compared with the longest of the others. Where more than a fifth are long, that is how the job runs.
OTHERS_SHARE: Final = 0.8
# More in a row are no stalls either: the job has become slower.
MAX_IN_A_ROW: Final = 3
# A rank that holds this share of what a step took beyond the usual is the one that is late in it.
LATE_SHARE: Final = 0.5


def find_long(before: Floats, step_seconds: Floats) -> Bools:
    """Return which steps of a window are long. `before` has the last steps before it."""
    compared = np.append(before, step_seconds)[-max(RECENT_STEPS, len(step_seconds)) :]
    if len(compared) < STEPS_NEEDED:
        return np.zeros(len(step_seconds), dtype=bool)
    others = float(np.quantile(compared, OTHERS_SHARE, method="lower"))
    is_long = compared > max(LONG_RATIO * others, others + MIN_EXCESS_SECONDS)
    return (is_long & ~_in_a_row(is_long))[len(compared) - len(step_seconds) :]


def _in_a_row(steps: Bools) -> Bools:
    """Return the steps that are in runs of too many."""
    edges = np.flatnonzero(np.diff(steps.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    edges = edges[np.diff(edges)[:, 0] > MAX_IN_A_ROW]
    turns = np.zeros(len(steps) + 1, dtype=np.int8)
    turns[edges[:, 0]], turns[edges[:, 1]] = 1, -1
    rows: Bools = np.cumsum(turns[:-1]) > 0
    return rows
