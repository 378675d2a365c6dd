from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.fleet import FleetJudge
from rankscope.analysis.policy import DEFAULT_POLICY
from rankscope.analysis.throttles import merge_gpus, name_throttle
from rankscope.analysis.verdict import Kind, Verdict
from rankscope.analysis.windows import GpuEvidence, RankEvidence
from tests.unit.analysis.synthetic import SyntheticJob

MHZ = 1e6
HEALTHY = GpuEvidence(1900 * MHZ, 1980 * MHZ, 1.0, {"power_cap": 1.0})
HOT = GpuEvidence(1200 * MHZ, 1980 * MHZ, 1.0, {"hw_thermal": 0.4, "power_cap": 0.02})
# 1,900 ÷ 1,200 MHz.
SLOWDOWN = 1.5


def named(mine: GpuEvidence | None, *peers: GpuEvidence, slowdown: float = SLOWDOWN) -> str | None:
    cause = name_throttle(mine, peers or (HEALTHY,) * 3, slowdown, DEFAULT_POLICY)
    return None if cause is None else cause.evidence


def test_a_hot_gpu_is_named_with_its_clock_its_reason_and_its_peers() -> None:
    assert named(HOT) == "GPU at 1,200 of 1,980 MHz, hw_thermal 40% of the time; peers at 1,900 MHz"


def test_a_lower_power_limit_than_the_peers_is_named_too() -> None:
    capped = replace(HOT, throttled_shares={"power_cap": 1.0})
    assert named(capped) == "GPU at 1,200 of 1,980 MHz, power_cap 100% of the time; peers at 1,900 MHz"


@pytest.mark.parametrize(
    ("mine", "peers", "slowdown"),
    [
        (HEALTHY, [HEALTHY] * 3, 1.5),  # all equally capped
        (HOT, [HOT] * 3, 1.5),  # all equally hot: slow, but not this rank's fault
        (replace(HEALTHY, throttled_shares={"hw_thermal": 1.0}), [HEALTHY] * 3, 1.5),  # a reason that lowers no clock
        (replace(HEALTHY, sm_clock_hertz=1860 * MHZ), [HEALTHY] * 3, 1.02),  # within what clocks do anyway
        (replace(HEALTHY, sm_clock_hertz=1700 * MHZ), [HEALTHY] * 3, 1.6),  # explains a fifth of the excess
        (replace(HOT, utilization_ratio=0.5), [HEALTHY] * 3, 1.5),  # it waits for its CPU and clocks down meanwhile
        (replace(HOT, throttled_shares={"idle": 0.5}), [HEALTHY] * 3, 1.5),
        (None, [HEALTHY] * 3, 1.5),
        (HOT, [], 1.5),
    ],
)
def test_what_the_clock_does_not_explain_is_not_blamed_on_it(
    mine: GpuEvidence | None, peers: list[GpuEvidence], slowdown: float
) -> None:
    assert name_throttle(mine, peers, slowdown, DEFAULT_POLICY) is None


def test_without_clocks_heat_that_the_peers_do_not_have_is_named_and_a_power_cap_is_not() -> None:
    unknown = GpuEvidence(throttled_shares={"power_cap": 1.0})
    assert named(replace(unknown, throttled_shares={"hw_thermal": 0.6}), unknown) is not None
    assert named(unknown, GpuEvidence()) is None


def test_windows_are_averaged() -> None:
    merged = merge_gpus([HOT, replace(HOT, sm_clock_hertz=1400 * MHZ, throttled_shares={})])
    assert merged is not None and merged.sm_clock_hertz == 1300 * MHZ
    assert merged.throttled_shares["hw_thermal"] == pytest.approx(0.2)
    assert merge_gpus([]) is None


def verdict_of(job: SyntheticJob, gpus: Mapping[int, GpuEvidence]) -> Verdict:
    judge = FleetJudge(DEFAULT_POLICY)
    random = np.random.default_rng(7)
    evidence = {rank: RankEvidence(gpu=gpus.get(rank)) for rank in range(job.world_size)}
    verdict = Verdict(Kind.HEALTHY, "")
    for number in range(8):
        verdict = judge.evaluate({"job": job.window(random, number, evidence)})["job"]
    return verdict


SLOW = SyntheticJob(slow_ranks={2: SLOWDOWN})


def test_a_job_with_a_throttled_gpu_is_told_so() -> None:
    verdict = verdict_of(SLOW, {rank: HOT if rank == 2 else HEALTHY for rank in range(4)})
    assert verdict.culprits == (2,) and verdict.cause.phase == "throttled"
    assert "1,200 of 1,980 MHz" in verdict.cause.evidence


def test_a_slow_rank_with_a_gpu_like_the_others_is_told_by_its_phase() -> None:
    verdict = verdict_of(SLOW, dict.fromkeys(range(4), HEALTHY))
    assert verdict.culprits == (2,) and verdict.cause.phase == "forward"


def test_a_rank_that_waits_for_its_input_is_not_excused_by_a_slow_clock() -> None:
    slow_input = replace(SLOW, excess_phase="input")
    verdict = verdict_of(slow_input, {rank: HOT if rank == 2 else HEALTHY for rank in range(4)})
    assert verdict.culprits == (2,) and verdict.cause.phase == "input"


def test_a_job_whose_gpus_are_all_capped_is_healthy() -> None:
    capped = replace(HOT, throttled_shares={"power_cap": 1.0})
    assert verdict_of(SyntheticJob(), dict.fromkeys(range(4), capped)).kind is Kind.HEALTHY
