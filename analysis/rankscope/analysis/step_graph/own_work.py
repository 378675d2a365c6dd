"""Own work of ranks by step: how unevenly it is spread within a role, and which stage needs longer than it did or than
the other stages do."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints

MAX_WINDOWS = 30
MIN_WINDOWS = 5
# A rank's quick steps show what it needs without a fault, which may be in most of the steps.
QUICK_STEPS_SHARE = 1 / 4
# Less is not replayed.
MIN_UNEVEN_SHARE = 0.05
MIN_STAGE_SHARE = 0.03
MIN_STAGE_GROWTH = 1.1
MIN_STAGE_RATIO = 2.5


class Pace(NamedTuple):
    """Nanoseconds of the median step."""

    ranks: Ints
    step_ns: float
    own_ns: Floats  # by rank

    @classmethod
    def of(cls, ranks: Ints, own_ns: Floats, step_ns: Floats) -> Pace:
        """`own_ns`: by step and rank."""
        return cls(ranks, float(np.median(step_ns)), np.maximum(np.median(own_ns, axis=0), 1.0))

    def by_stage(self, stages: Ints) -> Pace:
        """The median rank of each stage, in place of ranks: of a sample of a job's ranks, others in each window."""
        numbers = np.unique(stages)
        own = np.array([np.median(self.own_ns[stages == stage]) for stage in numbers])
        return Pace(numbers, self.step_ns, own)

    def of_ranks(self, ranks: Ints, stages: Ints) -> Pace:
        """The reverse of `by_stage`: each rank has the pace of its stage."""
        return Pace(ranks, self.step_ns, self.own_ns[np.searchsorted(self.ranks, stages)])

    def growth_since(self, past: Pace) -> tuple[float, Floats]:
        """The ratios of the step and of each rank's own work to those of the past."""
        return self.step_ns / max(past.step_ns, 1.0), self.own_ns / past.own_ns


class PastPace:
    """The pace of a job in its last windows in which no loss was found."""

    def __init__(self) -> None:
        self._windows: deque[Pace] = deque(maxlen=MAX_WINDOWS)

    def learn(self, pace: Pace) -> None:
        if self._windows and not np.array_equal(self._windows[-1].ranks, pace.ranks):
            self._windows.clear()
        self._windows.append(pace)

    def usual(self, ranks: Ints) -> Pace | None:
        """None while too few windows of the same ranks are known."""
        if len(self._windows) < MIN_WINDOWS or not np.array_equal(self._windows[-1].ranks, ranks):
            return None
        _, steps, own = zip(*self._windows, strict=True)
        return Pace(ranks, float(np.median(steps)), np.median(np.stack(own), axis=0))


class Spread(NamedTuple):
    """How unevenly the ranks of each stage work, as it changes from step to step."""

    even: Floats  # by step and rank: what own work is multiplied by to make the rank's work even with the others'
    held_ns: Floats  # by rank: excess over the quickest of the stage, in the steps in which the rank has the largest

    @classmethod
    def of(cls, own_ns: Floats, stages: Ints) -> Spread:
        """`own_ns`: by step and rank. What a rank needs longer in all steps is not uneven data."""
        even, held = np.ones(own_ns.shape), np.zeros(len(stages))
        steps = np.arange(len(own_ns))
        for stage in np.unique(stages).tolist():
            ranks = np.flatnonzero(stages == stage)
            if len(ranks) < 2:
                continue
            own = np.maximum(own_ns[:, ranks], 1.0)
            quick = np.sort(own, axis=0)[int(QUICK_STEPS_SHARE * (len(own) - 1))]
            relative = own / quick
            even[:, ranks] = relative.mean(axis=1, keepdims=True) / relative
            last = relative.argmax(axis=1)
            excess = quick[last] * (relative[steps, last] - relative.min(axis=1))
            held[ranks] = np.bincount(last, excess, minlength=len(ranks))
        return cls(even, held)

    def share(self, own_ns: Floats, step_ns: Floats) -> float:
        """An estimate of what even work would bring back, without a replay: the share of the median step."""
        beyond = (own_ns * (1 - self.even)).max(axis=1, initial=0.0)
        return float(np.median(beyond) / max(float(np.median(step_ns)), 1.0))


@dataclass(frozen=True)
class UnevenWork:
    loss_ns: Floats  # by step, that would come back if the ranks of each stage did equal parts of its work
    held_ns: Floats  # by rank, as in Spread


class SuspectedStage(NamedTuple):
    stage: int
    growth: float  # of its own work against its past, beyond what other stages grew; 1 where the past is not known
    least_growth: float  # of its ranks
    job_growth: float  # of the step
    ratio: float  # of its own work to that of the slowest of the other stages
    factor: Floats  # by rank: what brings own work back to the past, or to the other stages

    @property
    def is_against_past(self) -> bool:
        return self.growth >= MIN_STAGE_GROWTH


@dataclass(frozen=True)
class StageWork:
    stage: int
    ranks: Ints
    growth: float
    least_growth: float
    job_growth: float
    ratio: float
    is_against_past: bool
    loss_ns: Floats  # by step, that would come back if the stage worked as before, or else as the other stages

    @classmethod
    def of(cls, suspected: SuspectedStage, ranks: Ints, loss_ns: Floats) -> StageWork:
        stage, growth, least, job, ratio, _ = suspected
        return cls(stage, ranks, growth, least, job, ratio, suspected.is_against_past, loss_ns)


def suspect_stage(pace: Pace, past: Pace | None, stages: Ints, path_shares: Floats) -> SuspectedStage | None:
    """The stage that grew most beyond the others, or else the longest one. `path_shares`: of own work on the path, by
    rank. A stage of one rank has no past here: that rank is compared with its own."""
    numbers, sizes = np.unique(stages, return_counts=True)
    if len(numbers) < 2:
        return None
    work = np.array([np.median(pace.own_ns[stages == stage]) for stage in numbers])
    slowest = int(work.argmax())
    ratio = float(work[slowest] / np.delete(work, slowest).max())
    if past is not None:
        job_growth, growth = pace.growth_since(past)
        of_stage = np.array([np.median(growth[stages == stage]) for stage in numbers])
        most = int(of_stage.argmax())
        others = max(1.0, float(np.delete(of_stage, most).max()))
        inside = stages == numbers[most]
        beyond = float(of_stage[most] / others)
        share = float(path_shares[inside].sum()) * (1 - 1 / max(beyond, 1.0))
        if sizes[most] > 1 and beyond >= MIN_STAGE_GROWTH and share >= MIN_STAGE_SHARE:
            factor = np.where(inside, np.minimum(others / growth, 1.0), 1.0)
            least = float(growth[inside].min() / others)
            own_ratio = float(work[most] / np.delete(work, most).max())
            return SuspectedStage(int(numbers[most]), beyond, least, job_growth, own_ratio, factor)
    inside = stages == numbers[slowest]
    if ratio < MIN_STAGE_RATIO or float(path_shares[inside].sum()) * (1 - 1 / ratio) < MIN_STAGE_SHARE:
        return None
    return SuspectedStage(int(numbers[slowest]), 1.0, 1.0, 1.0, ratio, np.where(inside, 1 / ratio, 1.0))
