"""Pipeline stages are compared by their medians: a long stage is nobody's fault in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import median_or_nan
from rankscope.analysis.screening import work_seconds
from rankscope.analysis.windows import RankColumns


@dataclass(frozen=True)
class SlowStage:
    stage: int
    ratio: float
    impact_ratio: float


def find_slow_stage(columns: RankColumns, policy: Policy, threshold: float | None = None) -> SlowStage | None:
    """The stage whose median self time exceeds that of the other stages, if one does."""
    stages = np.unique(columns.stage)
    if len(stages) < 2 or stages[0] < 0:
        return None
    own = work_seconds(columns)
    medians = np.array([median_or_nan(own[columns.stage == stage]) for stage in stages])
    if np.isnan(medians).any():
        return None
    slowest = int(np.argmax(medians))
    others = np.delete(medians, slowest)
    usual = float(np.median(others))
    if not usual > 0:
        return None
    ratio = medians[slowest] / usual
    # A step is never shorter than the work in it.
    impact = (medians[slowest] - others.max()) / max(medians[slowest], median_or_nan(columns.step_seconds))
    if ratio < (threshold or policy.stage_ratio) or not impact >= policy.impact_ratio:
        return None
    return SlowStage(int(stages[slowest]), float(ratio), float(impact))
