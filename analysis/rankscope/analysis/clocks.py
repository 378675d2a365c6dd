"""Do the nodes' clocks agree? Synchronous ranks end the same step together, whatever their clocks say."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Floats, Ints


def clock_skew_seconds(
    steps_total: Floats, last_step_unix_seconds: Floats, step_seconds: float, place: Ints
) -> float | None:
    """Largest difference between nodes of (end of a rank's last step, moved to a common step); None for one node."""
    moved = last_step_unix_seconds - steps_total * step_seconds
    medians = [
        float(np.nanmedian(moved[place == node]))
        for node in np.unique(place)
        if not np.isnan(moved[place == node]).all()
    ]
    if len(medians) < 2:
        return None
    return max(medians) - min(medians)
