"""A slow pipeline stage: a long stage is no fault of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import MAD_TO_SIGMA, median_or_nan
from rankscope.analysis.verdicts.job_summary import JobSummary, is_contended
from rankscope.analysis.verdicts.slow_rank import is_timed_on_device, step_noise, work_seconds
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import RankColumns

THE_OTHERS = "the other stages"
ITS_PAST = "earlier in the run"


@dataclass(frozen=True)
class SlowStage:
    stage: int
    ranks: tuple[int, ...]
    ratio: float
    impact_ratio: float
    against: str = THE_OTHERS

    @classmethod
    def verdict(cls, found: Sequence[SlowStage], severity: Severity) -> Verdict:
        """`found`: the stage in the last windows; the latest one is described."""
        last = found[-1]
        nobody = "; no rank in it stands out" if len(last.ranks) > 1 else ""
        return Verdict(
            Kind.SLOW_STAGE,
            f"stage {last.stage} works {last.ratio:.2f}× as long as {last.against}{nobody}",
            severity,
            culprits=last.ranks,
            stage=last.stage,
            impact_ratio=float(np.mean([one.impact_ratio for one in found])),
            cause=Cause("stage", (), f"the stage's median self time against that of {last.against}"),
        )


def find_slow_stage(columns: RankColumns, summary: JobSummary, policy: Policy, part: float = 1.0) -> SlowStage | None:
    """The stage with a median of own work that exceeds that of the other stages, if one has. `part` of the way to the
    thresholds is enough.

    It must stand out of the spread of ranks around their stages, as a rank must out of its cohort. Where ranks queue
    for a CPU, their work takes longer too, by chance: there a stage needs the ratio of a rank that queues."""
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
    # A device does not queue.
    queues = is_contended(summary, policy) and not is_timed_on_device(columns).all()
    needed = max(policy.stage_ratio, policy.starved_rank_ratio if queues else 0.0)
    deviation = median_or_nan(np.abs(own - medians[np.searchsorted(stages, columns.stage)]))
    spread = max(MAD_TO_SIGMA * deviation, policy.spread_floor_ratio * usual)
    spread = max(spread, policy.step_noise_weight * median_or_nan(step_noise(columns)))
    if ratio < 1 + part * (needed - 1) or not impact >= policy.impact_ratio:
        return None
    if not medians[slowest] - usual >= part * policy.rank_score * spread:
        return None
    inside = columns.rank[columns.stage == stages[slowest]]
    return SlowStage(int(stages[slowest]), tuple(inside.tolist()), float(ratio), float(impact))
