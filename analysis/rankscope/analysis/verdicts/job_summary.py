"""Each job in one window as a few numbers, computed for all jobs at once: most jobs are healthy, and their verdict
must cost microseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints, grouped_max, grouped_median, grouped_min
from rankscope.analysis.verdicts.slow_rank import Screen, is_timed_on_device, waited_seconds
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.windows import RankColumns


class JobSummary(NamedTuple):
    """Medians over the ranks, unless a name says otherwise; NaN where nothing was measured."""

    step_seconds: float
    self_seconds: float
    starved_seconds: float
    mean_waited_ratio: float  # of the step, for others; without the transfer itself
    slowest_excess_ratio: float  # of the step: the slowest rank beyond its cohort
    least_transfer_seconds: float
    self_spread_ratio: float
    input_ratio: float  # of the step
    mfu_ratio: float
    fewest_steps: float
    ranks_measured: float
    outliers: float
    widest_cohort_spread: float
    rank_ratio: float  # the least ratio from which a rank of a cohort is slow
    stages_known: float  # 1 if every rank's pipeline stage is known
    last_stage: float
    long_seconds: float

    @property
    def usual_step_seconds(self) -> float:
        return self.step_seconds - self.long_seconds if self.long_seconds > 0 else self.step_seconds


@np.errstate(all="ignore")
def summarize(columns: RankColumns, screen: Screen, job_count: int) -> list[JobSummary]:
    """One summary per job number of `columns.job`, which runs from 0."""
    job = columns.job

    def median(values: Floats) -> Floats:
        return grouped_median(values, job, job_count)

    def mean(values: Floats) -> Floats:
        known = ~np.isnan(values)
        total = np.bincount(job[known], weights=values[known], minlength=job_count)
        return np.asarray(total / np.bincount(job[known], minlength=job_count))

    def count(flags: np.ndarray) -> Ints:
        return np.bincount(job[flags], minlength=job_count)

    stage = columns.stage.astype(np.float64)
    least_transfer = grouped_min(columns.transfer_seconds, job, job_count)
    # A step without a length was not measured.
    steps = np.where(columns.step_seconds > 0, columns.step_seconds, np.nan)
    on_device = is_timed_on_device(columns)
    waited = np.where(on_device, waited_seconds(columns), columns.wait_seconds - least_transfer[job])
    # A wait that is longer than the step it is part of was not measured either.
    waited = np.where(columns.wait_seconds > FIXED.wait_of_step_ratio * steps, np.nan, waited)
    waited_ratio = np.clip(waited / steps, 0.0, 1.0)
    input_ratio = np.clip(columns.input_seconds / steps, 0.0, 1.0)
    excess_ratio = (screen.compared_seconds - screen.reference_seconds) / steps
    figures = {
        "step_seconds": median(steps),
        "self_seconds": median(columns.self_seconds),
        "starved_seconds": median(columns.starved_seconds),
        "mean_waited_ratio": mean(waited_ratio),
        "slowest_excess_ratio": grouped_max(excess_ratio, job, job_count),
        "least_transfer_seconds": least_transfer,
        "self_spread_ratio": median(columns.self_spread_ratio),
        "input_ratio": median(input_ratio),
        "mfu_ratio": median(columns.mfu_ratio),
        "fewest_steps": grouped_min(columns.steps, job, job_count),
        "ranks_measured": count(~np.isnan(screen.compared_seconds)),
        "outliers": count(screen.outlier),
        "widest_cohort_spread": grouped_max(screen.cohort_spread, job, job_count),
        "rank_ratio": grouped_min(screen.rank_ratio, job, job_count),
        "stages_known": grouped_min(stage, job, job_count) >= 0,
        "last_stage": grouped_max(stage, job, job_count),
        "long_seconds": median(columns.long_seconds),
    }
    table = np.column_stack([figures[name] for name in JobSummary._fields])
    return [JobSummary(*row) for row in table.tolist()]


def is_contended(summary: JobSummary, policy: Policy) -> bool:
    """On an oversubscribed machine the scheduler spreads the steps: no sign of uneven data or of a slow stage."""
    return summary.starved_seconds >= policy.contended_ratio * summary.step_seconds
