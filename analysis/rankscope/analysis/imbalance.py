"""Nobody in particular is slow, yet all wait: another rank is last each step (uneven data)."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import median_or_nan
from rankscope.analysis.windows import RankColumns


def imbalance_impact(columns: RankColumns, policy: Policy) -> float | None:
    """Share of the step that even data would give back, if the window looks like uneven data; else None."""
    step = median_or_nan(columns.step_seconds)
    transfer = float(np.nanmin(columns.transfer_seconds)) if not np.isnan(columns.transfer_seconds).all() else np.nan
    waited = (float(np.nanmean(columns.wait_seconds)) - transfer) / step if not np.isnan(transfer) else np.nan
    spread = median_or_nan(columns.self_spread_ratio)
    # On an oversubscribed machine the scheduler spreads the steps; that says nothing about the data.
    contended = np.nan_to_num(median_or_nan(columns.starved_seconds)) >= policy.contended_ratio * step
    if contended or not waited >= policy.imbalance_wait_ratio or not spread >= policy.imbalance_spread:
        return None
    return float(waited)
