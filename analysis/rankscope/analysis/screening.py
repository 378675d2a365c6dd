"""Which ranks stand out of their cohort in one window. Works on all jobs of a fleet at once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

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

# Some of the queueing happens while a rank waits; never take it for more than this leaves of its self time.
LEAST_WORK_RATIO = 0.1
# Of a normal distribution.
P10_TO_P90_SIGMAS = 2.563


@dataclass(frozen=True)
class Screen:
    """Per rank, against its cohort (same job, same pipeline stage)."""

    own_seconds: Floats  # what was compared: own work, or for a starved rank own work and what it queued for a CPU
    reference_seconds: Floats
    impact_ratio: Floats  # share of the step that comes back if this rank ran like the rest; NaN if not an outlier
    starved: Bools  # it stands out by what it queued for a CPU, not by its work
    outlier: Bools
    lingering: Bools  # not an outlier, but not clearly back either (hysteresis)
    cohort_spread: Floats  # slowest ÷ fastest of the cohort, the same for all its ranks

    def take(self, rows: Ints | Bools | slice) -> Screen:
        return Screen(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class _Comparison:
    """One measure of every rank against its cohort."""

    values: Floats
    reference: Floats
    ratio: Floats
    score: Floats
    impact: Floats

    def exceeds(self, ratio: float, score: float) -> Bools:
        return (self.ratio >= ratio) & (self.score >= score)


def busy_seconds(columns: RankColumns) -> Floats:
    """Self time without checkpoints, which are excused."""
    return columns.self_seconds - np.nan_to_num(columns.checkpoint_seconds)


def work_seconds(columns: RankColumns) -> Floats:
    """Self time without checkpoints and without queueing for a CPU: that is the machine's doing, spreads by chance over
    the ranks that share it, and hides what a rank itself does."""
    busy = busy_seconds(columns)
    return np.maximum(busy - np.nan_to_num(columns.starved_seconds), LEAST_WORK_RATIO * busy)


def screen(columns: RankColumns, policy: Policy) -> Screen:
    cohort, cohort_count = number_groups(columns.job, columns.stage)
    noise = grouped_median(_step_noise(columns), cohort, cohort_count)[cohort]
    work = _compare(work_seconds(columns), columns, cohort, cohort_count, noise, policy)
    busy = _compare(busy_seconds(columns), columns, cohort, cohort_count, noise, policy)
    starving = grouped_median(columns.starved_seconds, cohort, cohort_count)[cohort]
    queued = np.nan_to_num(columns.starved_seconds - starving)
    mostly_queued = queued >= policy.starved_share * (busy.values - busy.reference)
    slow = work.exceeds(policy.rank_ratio, policy.rank_score) & (work.impact >= policy.impact_ratio)
    starved = ~slow & mostly_queued & busy.exceeds(policy.starved_rank_ratio, policy.rank_score)
    starved &= busy.impact >= policy.impact_ratio
    outlier = slow | starved
    half = policy.hysteresis
    lingering = work.exceeds(1 + half * (policy.rank_ratio - 1), half * policy.rank_score)
    lingering |= mostly_queued & busy.exceeds(1 + half * (policy.starved_rank_ratio - 1), half * policy.rank_score)
    with np.errstate(divide="ignore", invalid="ignore"):
        widest = grouped_max(work.values, cohort, cohort_count) / grouped_min(work.values, cohort, cohort_count)
        # A starved rank need not stand out by its work.
        widest = np.fmax(widest, grouped_max(np.where(starved, busy.ratio, np.nan), cohort, cohort_count))
    return Screen(
        own_seconds=np.where(starved, busy.values, work.values),
        reference_seconds=np.where(starved, busy.reference, work.reference),
        impact_ratio=np.where(outlier, np.where(starved, busy.impact, work.impact), np.nan),
        starved=starved,
        outlier=outlier,
        lingering=lingering & ~outlier,
        cohort_spread=widest[cohort],
    )


def _step_noise(columns: RankColumns) -> Floats:
    """Standard error of a rank's mean over the steps of the window, from its own p10 and p90."""
    sigma = columns.self_seconds * (columns.self_spread_ratio - 1) / P10_TO_P90_SIGMAS
    return np.nan_to_num(sigma / np.sqrt(np.maximum(columns.steps, 1.0)))


def _compare(
    values: Floats, columns: RankColumns, cohort: Ints, cohort_count: int, noise: Floats, policy: Policy
) -> _Comparison:
    size = np.bincount(cohort[~np.isnan(values)], minlength=cohort_count)[cohort]
    median = grouped_median(values, cohort, cohort_count)[cohort]
    # A cohort of two compares a rank with the other one; their median would be the mean of culprit and victim.
    pair = size == 2
    reference = np.where(size < 2, np.nan, np.where(pair, 2 * median - values, median))
    deviation = np.where(pair, 0.0, grouped_median(np.abs(values - median), cohort, cohort_count)[cohort])
    spread = np.maximum(MAD_TO_SIGMA * deviation, policy.spread_floor_ratio * reference)
    spread = np.maximum(spread, policy.step_noise_weight * noise)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = values / reference
        score = (values - reference) / spread
        # What would come back: down to the slowest of the others, who then set the pace.
        standing_out = (ratio >= policy.rank_ratio) & (score >= policy.rank_score)
        rest = grouped_max(np.where(standing_out, np.nan, values), cohort, cohort_count)[cohort]
        impact = np.maximum(values - np.fmax(reference, rest), 0) / columns.step_seconds
    return _Comparison(values, reference, ratio, score, np.nan_to_num(impact))


def concatenate(parts: list[RankColumns]) -> RankColumns:
    """One table of several jobs' windows; `job` is renumbered by position."""
    made = {f.name: np.concatenate([*map(attrgetter(f.name), parts)]) for f in fields(RankColumns)}
    made["job"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return RankColumns(**made)
