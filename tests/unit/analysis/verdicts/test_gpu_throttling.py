from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.gpu_throttling import compare_errors, merge_gpus, name_throttle
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.windows import GpuEvidence, RankEvidence
from tests.unit.analysis.synthetic import SyntheticJob

MHZ = 1e6
HEALTHY = GpuEvidence(1900 * MHZ, 1980 * MHZ, 1.0, {"power_cap": 1.0})
HOT = GpuEvidence(1200 * MHZ, 1980 * MHZ, 1.0, {"hw_thermal": 0.4, "power_cap": 0.02})
# 1,900 ÷ 1,200 MHz.
SLOWDOWN = 1.5


def named(mine: GpuEvidence | None, *peers: GpuEvidence, slowdown: float = SLOWDOWN) -> str | None:
    cause = name_throttle(mine, peers or (HEALTHY,) * 3, slowdown, DEFAULT_POLICY)
    return None if cause is None else cause.evidence


def test_a_hot_gpu_is_named_with_clock_reason_and_peers() -> None:
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
def test_the_clock_is_blamed_only_for_what_it_explains(
    mine: GpuEvidence | None, peers: list[GpuEvidence], slowdown: float
) -> None:
    assert name_throttle(mine, peers, slowdown, DEFAULT_POLICY) is None


def test_without_clocks_heat_is_named_and_power_caps_are_not() -> None:
    unknown = GpuEvidence(throttled_shares={"power_cap": 1.0})
    assert named(replace(unknown, throttled_shares={"hw_thermal": 0.6}), unknown) is not None
    assert named(unknown, GpuEvidence()) is None


def test_windows_are_averaged() -> None:
    merged = merge_gpus([HOT, replace(HOT, sm_clock_hertz=1400 * MHZ, throttled_shares={})])
    assert merged is not None and merged.sm_clock_hertz == 1300 * MHZ
    assert merged.throttled_shares["hw_thermal"] == pytest.approx(0.2)
    assert merge_gpus([]) is None


NO_ERRORS = replace(
    HEALTHY, seconds=10.0, ecc_uncorrected_errors=0, ecc_corrected_errors=0, xids=0, row_remap_pending=False
)


def test_errors_of_several_windows_are_summed() -> None:
    first = replace(NO_ERRORS, seconds=2.0, ecc_corrected_errors=5, xids=None, row_remap_pending=True)
    second = replace(NO_ERRORS, seconds=2.0, ecc_corrected_errors=7, ecc_uncorrected_errors=1, row_remap_pending=None)
    merged = merge_gpus([first, second])
    assert merged is not None
    assert (merged.ecc_corrected_errors, merged.ecc_uncorrected_errors, merged.ecc_errors) == (12, 1, 13)
    assert (merged.xids, merged.row_remap_pending, merged.seconds) == (0, True, 4.0)
    unknown = merge_gpus([HEALTHY, HEALTHY])
    assert unknown is not None
    assert (unknown.ecc_errors, unknown.xids, unknown.row_remap_pending) == (None, None, None)


@pytest.mark.parametrize(
    ("mine", "peers", "says"),
    [
        ({"ecc_corrected_errors": 12}, [{}] * 3, "12 ECC errors on its GPU in 10 s, its peers none"),
        (
            {"ecc_corrected_errors": 1200, "ecc_uncorrected_errors": 2, "xids": 1},
            [{}] * 3,
            "1,202 ECC errors (2 uncorrected) and 1 XID error on its GPU in 10 s, its peers none",
        ),
        ({"row_remap_pending": True}, [{}] * 3, "a pending row remap on its GPU in 10 s, its peers none"),
        ({"xids": 3}, [{}, {}, {"xids": 1}], "3 XID errors on its GPU in 10 s, most of its peers none"),
        ({"xids": 3, "seconds": 0.0}, [{}], "3 XID errors on its GPU, its peers none"),
        ({}, [{}] * 3, ""),
        ({"xids": 3}, [{"xids": 1}] * 3, ""),  # all have them: a fault of the program, more likely
        ({"xids": 3}, [{"xids": None}] * 3, ""),  # nothing to compare with
        ({"xids": 3}, [], ""),
        ({}, [{"xids": 3}] * 3, ""),
    ],
)
def test_errors_that_the_peers_do_not_have_are_named(
    mine: dict[str, Any], peers: list[dict[str, Any]], says: str
) -> None:
    assert compare_errors(replace(NO_ERRORS, **mine), [replace(NO_ERRORS, **peer) for peer in peers]) == says


def test_without_a_gpu_there_are_no_errors_to_name() -> None:
    assert compare_errors(None, [NO_ERRORS]) == ""


def verdict_of(job: SyntheticJob, gpus: Mapping[int, GpuEvidence]) -> Verdict:
    judge = FleetDetector(DEFAULT_POLICY)
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


def test_a_slow_rank_with_an_ordinary_gpu_keeps_its_phase() -> None:
    verdict = verdict_of(SLOW, dict.fromkeys(range(4), HEALTHY))
    assert verdict.culprits == (2,) and verdict.cause.phase == "forward"


def test_a_slow_clock_does_not_explain_waiting_for_input() -> None:
    slow_input = replace(SLOW, excess_phase="input")
    verdict = verdict_of(slow_input, {rank: HOT if rank == 2 else HEALTHY for rank in range(4)})
    assert verdict.culprits == (2,) and verdict.cause.phase == "input"


def test_a_job_whose_gpus_are_all_capped_is_healthy() -> None:
    capped = replace(HOT, throttled_shares={"power_cap": 1.0})
    assert verdict_of(SyntheticJob(), dict.fromkeys(range(4), capped)).kind is Kind.HEALTHY
