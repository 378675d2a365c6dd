"""How much longer a recorded rank works in a step than the others, how sure that is, and how many steps make it sure.

Ranks meet in every step, so each step gives one difference between a rank and the others. The interval of the mean
difference is Student's: with two steps it is so wide that it names nobody."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.quantities import quantity
from rankscope.analysis.stats.step_time_comparison import quantile
from rankscope.analysis.verdicts.slow_rank import P10_TO_P90_SIGMAS
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words

if TYPE_CHECKING:
    from rankscope.analysis.stats.robust import Floats
    from rankscope.analysis.step_graph.path_windows import PathWindow
    from rankscope.analysis.traces.joins.self_time import StepTimes

# Two steps have a spread, but no estimate of it that can be relied on.
MIN_STEPS = 3
# The probability that a recording of equal ranks has an interval without zero, over all of its ranks.
MAX_FALSE_PROBABILITY = 0.02
# A recording contradicts a verdict if the rank costs at most this share of what the verdict says.
CONTRADICTED_RATIO = 0.5


@dataclass(frozen=True)
class RankExcess:
    """The self time of a rank less that of the median of the others, mean per step, with its interval."""

    rank: int
    steps: int
    excess_seconds: float
    low_seconds: float
    high_seconds: float

    @property
    def is_clear(self) -> bool:
        return self.steps >= MIN_STEPS and self.low_seconds > 0

    def sentence(self, recorded: Collection[int]) -> str:
        """`rank 2 works 58 ms longer in a step than rank 1 (54 to 62 ms, 12 steps)`"""
        others = sorted(set(recorded) - {self.rank})
        than = ranks_in_words(others) if len(others) == 1 else "the other ranks"
        length = quantity(abs(self.excess_seconds), "s")
        longer = f"{length} longer" if self.excess_seconds >= 0 else f"{length} less"
        ends = (self.low_seconds, self.high_seconds)
        low, high = (quantity(end, "s") for end in (ends if self.excess_seconds >= 0 else (-ends[1], -ends[0])))
        return f"rank {self.rank} works {longer} in a step than {than} (between {low} and {high}, {self.steps} steps)"


def compare_ranks(times: StepTimes, stage_of: Mapping[int, int]) -> tuple[RankExcess, ...]:
    """Each rank against the others of its pipeline stage, the largest excess first."""
    excesses = []
    stages = np.array([stage_of.get(rank, -1) for rank in times.rank.tolist()])
    for row, rank in enumerate(times.rank.tolist()):
        others = (stages == stages[row]) & (times.rank != rank)
        if not others.any():
            continue
        own, peers = times.self_ns[row], times.self_ns[others]
        known = ~np.isnan(own) & ~np.isnan(peers).all(axis=0)
        if known.sum() < 2:
            continue
        excesses.append(_excess(rank, own[known] - np.nanmedian(peers[:, known], axis=0), len(times.rank)))
    return tuple(sorted(excesses, key=lambda excess: -excess.excess_seconds))


def compare_losses(path: PathWindow | None) -> tuple[RankExcess, ...]:
    """Return what would come back in a step if each rank worked as its peers, less what they cost in the mean. The
    largest excess comes first."""
    if path is None or len(path.steps) < 2:
        return ()
    losses, excesses = np.nan_to_num(path.losses_ns), []
    for row, rank in enumerate(path.ranks.tolist()):
        others = (path.stages == path.stages[row]) & (path.ranks != rank)
        usual = max(float(np.median(losses[:, others].mean(axis=0))), 0.0) if others.any() else 0.0
        excesses.append(_excess(rank, losses[:, row] - usual, len(path.ranks)))
    return tuple(sorted(excesses, key=lambda excess: -excess.excess_seconds))


def _excess(rank: int, differences_ns: Floats, ranks: int) -> RankExcess:
    count, differences = len(differences_ns), differences_ns / 1e9
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    half = error * quantile(1 - MAX_FALSE_PROBABILITY / ranks, count - 1)
    return RankExcess(rank, count, mean, mean - half, mean + half)


# What a recording says about the verdict that the job had when the recording was asked for.


def judgement(verdict: Verdict, excesses: Sequence[RankExcess], job_step_seconds: float | None) -> str:
    """`the recording confirms it: rank 2 works 58 ms longer …`; empty if no ranks were compared, or the verdict
    is not about them. `job_step_seconds` is the job's step without a profiler."""
    recorded = [excess.rank for excess in excesses]
    step = job_step_seconds or 0.0
    if verdict.kind is Kind.HEALTHY:
        slow_from = max((DEFAULT_POLICY.rank_ratio - 1) * step, 0.0)
        slow = [excess for excess in excesses if excess.is_clear and excess.low_seconds > slow_from]
        return f"the recording contradicts it: {slow[0].sentence(recorded)}" if slow else ""
    of_culprits = [excess for excess in excesses if excess.rank in verdict.culprits]
    if verdict.kind is not Kind.SLOW_RANK or not of_culprits:
        return ""
    worst = of_culprits[0]
    text = worst.sentence(recorded)
    if worst.is_clear:
        return f"the recording confirms it: {text}"
    # A rank that stalls now and then need not have stalled while it was recorded.
    can_contradict = worst.steps >= MIN_STEPS and not verdict.cause.stalls
    if can_contradict and worst.high_seconds < CONTRADICTED_RATIO * (verdict.impact_ratio or 0.0) * step:
        return f"the recording contradicts it: {text}"
    return f"the recording is too short to tell: {text}"


# The number of steps to record.

# A recording is as long as it must be to tell a rank from the others, within these bounds. They bound its size, too:
# a traced second of a busy process is about 60 MB before compression.
MIN_RECORDED_STEPS, MAX_RECORDED_STEPS = 8, 40
MAX_RECORDED_SECONDS = 10.0
# The half of the interval, relative to what a culprit costs: the whole interval then lies far from zero.
SURE_RATIO = 0.5
# Where no steps are measured.
UNMEASURED_SECONDS = 3.0


@dataclass(frozen=True)
class LiveSteps:
    """The steps of a rank in its latest window. None is what was not measured."""

    step_seconds: float
    self_seconds: float | None = None
    self_p10_seconds: float | None = None
    self_p90_seconds: float | None = None

    @property
    def sigma_seconds(self) -> float | None:
        if self.self_p10_seconds is None or self.self_p90_seconds is None:
            return None
        return max(self.self_p90_seconds - self.self_p10_seconds, 0.0) / P10_TO_P90_SIGMAS


def steps_to_record(
    live: Mapping[int, LiveSteps], culprits: Collection[int], policy: Policy = DEFAULT_POLICY
) -> int | None:
    """How many steps tell the culprits from the other ranks; without culprits, whether a rank is slow. None if no steps
    are measured: then the recording is UNMEASURED_SECONDS long. `live` is by rank, of the ranks to record."""
    if not live:
        return None
    step = max(steps.step_seconds for steps in live.values())
    longest = MAX_RECORDED_STEPS if step <= 0 else int(MAX_RECORDED_SECONDS / step)
    longest = min(max(longest, MIN_STEPS), MAX_RECORDED_STEPS)
    needed = _steps_for(live, culprits, policy)
    return min(max(needed, MIN_RECORDED_STEPS), longest)


def _steps_for(live: Mapping[int, LiveSteps], culprits: Collection[int], policy: Policy) -> int:
    self_seconds = {rank: steps.self_seconds for rank, steps in live.items() if steps.self_seconds is not None}
    sigmas = [steps.sigma_seconds for steps in live.values() if steps.sigma_seconds is not None]
    others = [seconds for rank, seconds in self_seconds.items() if rank not in culprits]
    slow = [seconds for rank, seconds in self_seconds.items() if rank in culprits]
    if not sigmas or not others:
        return MIN_RECORDED_STEPS
    usual = float(np.median(others))
    smallest = (policy.rank_ratio - 1) * usual
    wanted = SURE_RATIO * max(float(np.median(slow)) - usual, smallest) if slow else smallest
    noise = math.sqrt(2) * float(np.median(sigmas))
    confidence = 1 - MAX_FALSE_PROBABILITY / max(len(live), 2)
    for count in range(MIN_STEPS, MAX_RECORDED_STEPS):
        if noise * quantile(confidence, count - 1) <= wanted * math.sqrt(count):
            return count
    return MAX_RECORDED_STEPS
