"""Each job in one window as a few numbers, computed for all jobs at once: most jobs are healthy, and their verdict
must cost microseconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rankscope.analysis.robust import Floats, Ints, grouped_max, grouped_median, grouped_min
from rankscope.analysis.screening import Screen
from rankscope.analysis.windows import RankColumns


class JobSummary(NamedTuple):
    """Medians over the ranks, but where a name says otherwise; NaN where nothing was measured."""

    step_seconds: float
    own_seconds: float
    starved_seconds: float
    mean_wait_seconds: float
    least_transfer_seconds: float
    self_spread_ratio: float
    input_seconds: float
    mfu_ratio: float
    fewest_steps: float
    ranks_measured: float
    outliers: float
    widest_cohort_spread: float
    stages_known: float  # 1 if every rank's pipeline stage is known
    last_stage: float


def summarize(columns: RankColumns, screen: Screen, job_count: int) -> list[JobSummary]:
    """One summary per job number of `columns.job`, which runs from 0."""
    job = columns.job

    def median(values: Floats) -> Floats:
        return grouped_median(values, job, job_count)

    def mean(values: Floats) -> Floats:
        known = ~np.isnan(values)
        total = np.bincount(job[known], weights=values[known], minlength=job_count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(total / np.bincount(job[known], minlength=job_count))

    def count(flags: np.ndarray) -> Ints:
        return np.bincount(job[flags], minlength=job_count)

    stage = columns.stage.astype(np.float64)
    step = median(columns.step_seconds)
    table = np.column_stack(
        [
            np.where(step > 0, step, np.nan),  # a step without a length was not measured
            median(columns.self_seconds),
            median(columns.starved_seconds),
            mean(columns.wait_seconds),
            grouped_min(columns.transfer_seconds, job, job_count),
            median(columns.self_spread_ratio),
            median(columns.input_seconds),
            median(columns.mfu_ratio),
            grouped_min(columns.steps, job, job_count),
            count(~np.isnan(screen.own_seconds)),
            count(screen.outlier),
            grouped_max(screen.cohort_spread, job, job_count),
            grouped_min(stage, job, job_count) >= 0,
            grouped_max(stage, job, job_count),
        ]
    )
    return [JobSummary(*row) for row in table.tolist()]
