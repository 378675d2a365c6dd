"""Recorded ranks against each other, and what that says about the verdict on the running job."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.traces.joins.comparison import (
    MAX_RECORDED_SECONDS,
    MAX_RECORDED_STEPS,
    MIN_RECORDED_STEPS,
    LiveSteps,
    RankExcess,
    compare_ranks,
    judgement,
    steps_to_record,
)
from rankscope.analysis.traces.joins.self_time import StepTimes
from rankscope.analysis.verdicts.verdict import Cause, Kind, Verdict

SLOW = Verdict(Kind.SLOW_RANK, "slow", culprits=(2,), impact_ratio=0.5)
HEALTHY = Verdict(Kind.HEALTHY, "healthy")
STEP_SECONDS = 0.1


def times(self_seconds: list[list[float]]) -> StepTimes:
    own = 1e9 * np.array(self_seconds)
    zero = np.zeros(own.shape)
    return StepTimes(np.arange(1, 1 + len(own)), np.arange(own.shape[1]), own, zero, zero, zero, on_host=True)


def pair(steps: int, excess_seconds: float, sigma_seconds: float = 0.003) -> tuple[RankExcess, ...]:
    noise = sigma_seconds * np.random.default_rng(1).standard_normal((2, steps))
    return compare_ranks(times([list(0.04 + noise[0]), list(0.04 + excess_seconds + noise[1])]), {})


def test_slowness_that_ranks_share_widens_no_interval() -> None:
    common = np.array([0.0, 0.2, 0.05, 0.3])
    worst, best = compare_ranks(times([list(common + 0.05), list(common + 0.11)]), {})
    assert (worst.rank, best.rank) == (2, 1)
    assert worst.low_seconds == pytest.approx(0.06) == worst.high_seconds


def test_ranks_are_compared_within_their_stage() -> None:
    found = compare_ranks(times([[0.1, 0.1, 0.1], [0.3, 0.3, 0.3], [0.1, 0.1, 0.1]]), {1: 0, 2: 1, 3: 0})
    assert {excess.rank for excess in found} == {1, 3}


@pytest.mark.parametrize(
    ("steps", "excess_seconds", "says"),
    [
        (12, 0.05, "the recording confirms it: rank 2 works 49.3 ms longer"),
        (12, 0.0, "the recording contradicts it: rank 2 works "),
        (12, 0.03, "the recording confirms it"),
        (2, 0.05, "the recording is too short to tell: rank 2 works"),
    ],
)
def test_a_recording_confirms_contradicts_or_cannot_tell(steps: int, excess_seconds: float, says: str) -> None:
    assert judgement(SLOW, pair(steps, excess_seconds), STEP_SECONDS).startswith(says)


def test_a_rank_that_stalls_now_and_then_is_not_contradicted() -> None:
    stalls = Verdict(Kind.SLOW_RANK, "", culprits=(2,), impact_ratio=0.5, cause=Cause(stalls="in every 50th step"))
    assert judgement(stalls, pair(12, 0.0), STEP_SECONDS).startswith("the recording is too short to tell")


def test_a_healthy_verdict_is_contradicted_by_a_slow_rank_only() -> None:
    assert judgement(HEALTHY, pair(12, 0.0), STEP_SECONDS) == ""
    assert judgement(HEALTHY, pair(2, 0.05), STEP_SECONDS) == ""
    assert judgement(HEALTHY, pair(12, 0.05), STEP_SECONDS).startswith("the recording contradicts it: rank 2 works")


def test_a_verdict_on_other_ranks_is_not_judged() -> None:
    other = Verdict(Kind.SLOW_RANK, "", culprits=(7,), impact_ratio=0.5)
    assert judgement(other, pair(12, 0.05), STEP_SECONDS) == ""
    assert judgement(SLOW, (), STEP_SECONDS) == ""


def live(own_seconds: float, sigma_seconds: float, step_seconds: float = STEP_SECONDS) -> LiveSteps:
    width = 2.563 * sigma_seconds
    return LiveSteps(step_seconds, own_seconds, own_seconds - width / 2, own_seconds + width / 2)


def test_noise_asks_for_more_steps_than_a_large_excess() -> None:
    quiet = steps_to_record({0: live(0.04, 0.001), 2: live(0.09, 0.001)}, [2])
    noisy = steps_to_record({0: live(0.04, 0.02), 2: live(0.09, 0.02)}, [2])
    noisier = steps_to_record({0: live(0.04, 0.02), 2: live(0.07, 0.02)}, [2])
    assert quiet == MIN_RECORDED_STEPS
    assert noisy is not None and noisier is not None
    assert MIN_RECORDED_STEPS < noisy < noisier <= MAX_RECORDED_STEPS


def test_the_chosen_number_of_steps_is_enough() -> None:
    """Whatever the noise, the steps that it asks for make the rank clear."""
    for sigma in (0.001, 0.005, 0.01, 0.02):
        steps = steps_to_record({1: live(0.04, sigma), 2: live(0.09, sigma)}, [2])
        assert steps is not None
        assert judgement(SLOW, pair(steps, 0.05, sigma), STEP_SECONDS).startswith("the recording confirms it")


def test_long_steps_and_missing_figures_stay_within_bounds() -> None:
    assert steps_to_record({}, []) is None
    assert steps_to_record({0: LiveSteps(0.01)}, []) == MIN_RECORDED_STEPS
    two_seconds = steps_to_record({0: live(1, 0.5, 2.0), 2: live(1.5, 0.5, 2.0)}, [2])
    assert two_seconds == MAX_RECORDED_SECONDS / 2.0
    assert steps_to_record({0: LiveSteps(600.0), 1: LiveSteps(600.0)}, []) == 3
    assert steps_to_record({0: live(0.0, 0.0, 0.0), 1: live(0.0, 0.0, 0.0)}, []) is not None
