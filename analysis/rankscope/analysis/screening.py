"""Which ranks stand out of their cohort in one window. Works on all jobs of a fleet at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import (
    MAD_TO_SIGMA,
    Bools,
    Floats,
    Ints,
    grouped_max,
    grouped_median,
    grouped_min,
    number_groups,
)
from rankscope.analysis.windows import RankColumns


@dataclass(frozen=True)
class Screen:
    """Per rank, against its cohort (same job, same pipeline stage)."""

    own_seconds: Floats  # self time without checkpoints, which are excused
    reference_seconds: Floats
    ratio: Floats
    score: Floats
    impact_ratio: Floats  # share of the step that comes back if this rank ran like the rest; NaN if not an outlier
    starved: Bools  # the excess is mostly time on a run queue, without quota or in a stop signal
    outlier: Bools
    lingering: Bools  # not an outlier, but not clearly back either (hysteresis)
    cohort_spread: Floats  # slowest ÷ fastest of the cohort, the same for all its ranks

    def take(self, rows: Ints | Bools | slice) -> Screen:
        return Screen(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def own_seconds(columns: RankColumns) -> Floats:
    return columns.self_seconds - np.nan_to_num(columns.checkpoint_seconds)


def screen(columns: RankColumns, policy: Policy) -> Screen:
    own = own_seconds(columns)
    cohort, cohort_count = number_groups(columns.job, columns.stage)
    known = ~np.isnan(own)
    size = np.bincount(cohort[known], minlength=cohort_count)[cohort]
    median = grouped_median(own, cohort, cohort_count)[cohort]
    # A cohort of two compares a rank with the other one; their median would be the mean of culprit and victim.
    pair = size == 2
    reference = np.where(pair, 2 * median - own, median)
    deviation = grouped_median(np.abs(own - median), cohort, cohort_count)[cohort]
    floor = policy.spread_floor_ratio * reference
    spread = np.where(pair, floor, np.maximum(MAD_TO_SIGMA * deviation, floor))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = own / reference
        score = (own - reference) / spread
        cohort_spread = grouped_max(own, cohort, cohort_count)[cohort] / grouped_min(own, cohort, cohort_count)[cohort]
    return _decide(columns, own, reference, ratio, score, cohort, cohort_count, cohort_spread, size, policy)


def _decide(
    columns: RankColumns,
    own: Floats,
    reference: Floats,
    ratio: Floats,
    score: Floats,
    cohort: Ints,
    cohort_count: int,
    cohort_spread: Floats,
    size: Ints,
    policy: Policy,
) -> Screen:
    starved_excess = columns.starved_seconds - grouped_median(columns.starved_seconds, cohort, cohort_count)[cohort]
    starved = np.nan_to_num(starved_excess) >= policy.starved_share * (own - reference)
    starved &= own > reference
    needed = np.where(starved, policy.starved_rank_ratio, policy.rank_ratio)
    comparable = size >= 2
    outlier = comparable & (ratio >= needed) & (score >= policy.rank_score)
    lingering = (
        comparable
        & ~outlier
        & (ratio >= 1 + policy.hysteresis * (needed - 1))
        & (score >= policy.hysteresis * policy.rank_score)
    )
    # What would come back: down to the slowest of the others, who then set the pace.
    rest = grouped_max(np.where(outlier, np.nan, own), cohort, cohort_count)[cohort]
    pace = np.fmax(reference, rest)
    impact = np.where(outlier, np.maximum(own - pace, 0) / columns.step_seconds, np.nan)
    outlier &= np.nan_to_num(impact) >= policy.impact_ratio
    return Screen(own, reference, ratio, score, impact, starved, outlier, lingering, cohort_spread)


def concatenate(parts: list[RankColumns]) -> RankColumns:
    """One table of several jobs' windows; `job` is renumbered by position."""
    made = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(RankColumns)}
    made["job"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return RankColumns(**made)
