"""One window of one job, looked at with every rule: what would each say if it stood alone?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.imbalance import imbalance_impact
from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import Bools, median_or_nan
from rankscope.analysis.screening import Screen
from rankscope.analysis.splits import find_split
from rankscope.analysis.stages import SlowStage, find_slow_stage
from rankscope.analysis.transfers import SlowTransfer, TransferBaseline
from rankscope.analysis.windows import JobWindow


@dataclass(frozen=True)
class Observation:
    window: JobWindow
    screen: Screen
    outliers: frozenset[int]
    lingering: frozenset[int]
    impact_ratio: float  # of the outliers together
    stage: SlowStage | None
    stage_lingering: SlowStage | None
    transfer: SlowTransfer | None
    imbalance_impact_ratio: float | None
    input_ratio: float | None
    mfu_ratio: float | None


def observe(window: JobWindow, screen: Screen, baseline: TransferBaseline, policy: Policy) -> Observation:
    columns = window.columns
    outlier, imbalance = screen.outlier, None
    if not outlier.any() and bool(np.nanmax(screen.cohort_spread, initial=1.0) >= policy.rank_ratio):
        outlier, screen, imbalance = _look_for_splits(window, screen, policy)
    stage = lingering_stage = transfer = None
    if not outlier.any():
        stage = find_slow_stage(columns, policy)
        lower = 1 + policy.hysteresis * (policy.stage_ratio - 1)
        lingering_stage = None if stage else find_slow_stage(columns, policy, lower)
        transfer = baseline.compare(columns, policy)
        if imbalance is None and stage is None and transfer is None:
            imbalance = imbalance_impact(columns, policy)
    step = median_or_nan(columns.step_seconds)
    return Observation(
        window,
        screen,
        outliers=frozenset(columns.rank[outlier].tolist()),
        lingering=frozenset(columns.rank[screen.lingering].tolist()),
        impact_ratio=float(np.nanmax(screen.impact_ratio[outlier], initial=0.0)),
        stage=stage,
        stage_lingering=lingering_stage,
        transfer=transfer,
        imbalance_impact_ratio=imbalance,
        input_ratio=_known(median_or_nan(columns.input_seconds) / step),
        mfu_ratio=_known(median_or_nan(columns.mfu_ratio)),
    )


def _look_for_splits(window: JobWindow, screen: Screen, policy: Policy) -> tuple[Bools, Screen, float | None]:
    """Half of a cohort may be slow: a median cannot see it. Where the split follows a node, that node is slow."""
    columns = window.columns
    outlier = screen.outlier.copy()
    reference, impact = screen.reference_seconds.copy(), screen.impact_ratio.copy()
    imbalance: float | None = None
    step = median_or_nan(columns.step_seconds)
    contended = np.nan_to_num(median_or_nan(columns.starved_seconds)) >= policy.contended_ratio * step
    for stage in np.unique(columns.stage):
        rows = np.flatnonzero(columns.stage == stage)
        split = find_split(screen.own_seconds[rows], columns.place[rows], policy)
        if split is None:
            continue
        share = (split.slow_seconds - split.fast_seconds) / step
        if share < policy.impact_ratio:
            continue
        if split.follows_place:
            outlier[rows[split.slow]] = True
            reference[rows] = split.fast_seconds
            impact[rows[split.slow]] = share
        elif not contended:
            imbalance = max(imbalance or 0.0, share)
    merged = Screen(
        screen.own_seconds,
        reference,
        screen.own_seconds / reference,
        screen.score,
        impact,
        screen.starved,
        outlier,
        screen.lingering,
        screen.cohort_spread,
    )
    return outlier, merged, imbalance


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
