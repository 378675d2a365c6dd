"""Do the nodes' clocks agree? Synchronous ranks end the same step together, whatever their clocks say."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Floats, Ints, grouped_median, number_groups


def clock_skew_seconds(
    steps_total: Floats, last_step_unix_seconds: Floats, step_seconds: float, place: Ints
) -> float | None:
    """Largest difference between nodes of (end of a rank's last step, moved to a common step); None for one node."""
    moved = last_step_unix_seconds - steps_total * step_seconds
    medians = grouped_median(moved, *number_groups(place))
    known = medians[~np.isnan(medians)]
    return float(known.max() - known.min()) if len(known) > 1 else None
