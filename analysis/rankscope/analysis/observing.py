"""One window of one job, looked at with every rule: what would each say if it stood alone?"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rankscope.analysis.imbalance import imbalance_impact, is_contended
from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import Bools
from rankscope.analysis.screening import Screen
from rankscope.analysis.splits import find_split
from rankscope.analysis.stages import SlowStage, find_slow_stage
from rankscope.analysis.summaries import JobSummary
from rankscope.analysis.transfers import SlowTransfer, TransferBaseline
from rankscope.analysis.windows import JobWindow, RankColumns


class ReadyWindow(NamedTuple):
    """What `absorb` returned, with what the comparison of all ranks said about it."""

    window: JobWindow
    all_ranks: Screen
    rows: slice  # this job's, in `all_ranks`
    summary: JobSummary

    @property
    def screen(self) -> Screen:
        return self.all_ranks.take(self.rows)


class Observation(NamedTuple):
    """A tuple, as one is made for every job at every tick of a fleet."""

    columns: RankColumns
    # Kept only where a rank stands out: nobody will ask for the stacks of the others, and a large job's would be
    # gigabytes over the windows that are remembered.
    window: JobWindow | None
    screen: Screen | None
    summary: JobSummary
    remarkable: bool  # some rule may want to see it
    outliers: frozenset[int]
    lingering: frozenset[int]
    impact_ratio: float  # of the outliers together
    stage: SlowStage | None
    stage_lingering: SlowStage | None
    transfer: SlowTransfer | None
    imbalance_impact_ratio: float | None


def observe(ready: ReadyWindow, baseline: TransferBaseline, policy: Policy) -> Observation:
    window, summary = ready.window, ready.summary
    screen = outlier = imbalance = stage = lingering_stage = transfer = None
    any_outlier = summary.outliers > 0
    # Absurd times have outliers without a spread.
    if any_outlier or summary.widest_cohort_spread >= 1 + policy.hysteresis * (summary.rank_ratio - 1):
        screen = ready.screen
        outlier = screen.outlier
    if screen is not None and not any_outlier and summary.widest_cohort_spread >= summary.rank_ratio:
        outlier, screen, imbalance = _look_for_splits(window, screen, summary, policy)
        any_outlier = bool(outlier.any())
    if not any_outlier:
        if summary.stages_known and summary.last_stage > 0:
            stage, lingering_stage = _look_at_stages(window, policy)
        transfer = baseline.compare(summary, policy)
        if imbalance is None and stage is None and transfer is None:
            imbalance = imbalance_impact(summary, policy)
    findings = (stage, transfer, imbalance)
    return Observation(
        window.columns,
        window if any_outlier else None,
        screen,
        summary,
        remarkable=any_outlier or any(f is not None for f in findings) or _concerns_everyone(summary, policy),
        outliers=frozenset(window.columns.rank[outlier].tolist()) if any_outlier else frozenset(),
        lingering=frozenset(window.columns.rank[screen.lingering].tolist()) if screen else frozenset(),
        impact_ratio=float(np.nanmax(screen.impact_ratio[outlier], initial=0.0)) if screen and any_outlier else 0.0,
        stage=stage,
        stage_lingering=lingering_stage,
        transfer=transfer,
        imbalance_impact_ratio=imbalance,
    )


def _concerns_everyone(summary: JobSummary, policy: Policy) -> bool:
    return summary.input_ratio >= policy.input_bound_ratio or summary.mfu_ratio < (policy.mfu_target_ratio or 0.0)


def _look_at_stages(window: JobWindow, policy: Policy) -> tuple[SlowStage | None, SlowStage | None]:
    stage = find_slow_stage(window.columns, policy)
    if stage is not None:
        return stage, None
    return None, find_slow_stage(window.columns, policy, 1 + policy.hysteresis * (policy.stage_ratio - 1))


def _look_for_splits(
    window: JobWindow, screen: Screen, summary: JobSummary, policy: Policy
) -> tuple[Bools, Screen, float | None]:
    """Half of a cohort may be slow: a median cannot see it. Where the split follows a node, that node is slow."""
    columns = window.columns
    outlier = screen.outlier.copy()
    reference, impact = screen.reference_seconds.copy(), screen.impact_ratio.copy()
    imbalance: float | None = None
    for stage in np.unique(columns.stage):
        rows = np.flatnonzero(columns.stage == stage)
        split = find_split(screen.own_seconds[rows], columns.place[rows], float(screen.rank_ratio[rows[0]]))
        if split is None:
            continue
        share = (split.slow_seconds - split.fast_seconds) / max(summary.step_seconds, split.slow_seconds)
        if not share >= policy.impact_ratio:
            continue
        is_wide = split.slow_seconds >= policy.rank_ratio * split.fast_seconds
        if split.follows_place:
            outlier[rows[split.slow]] = True
            reference[rows] = split.fast_seconds
            impact[rows[split.slow]] = share
        elif is_wide and not is_contended(summary, policy):
            imbalance = max(imbalance or 0.0, share)
    merged = replace(
        screen,
        reference_seconds=reference,
        impact_ratio=impact,
        outlier=outlier,
    )
    return outlier, merged, imbalance
