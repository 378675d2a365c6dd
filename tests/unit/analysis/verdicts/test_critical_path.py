"""Verdicts from the critical path: jobs of every layout with and without a fault, and what two real jobs recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.path_windows import PathFinder, PathWindow
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.verdicts.critical_path import judge_path
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from tests.support.step_programs import Fault, Layout, play

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"
LAYOUTS = {
    "dp4": Layout(data=4),
    "tp4": Layout(tensor=4),
    "tp2 pp2": Layout(tensor=2, pipeline=2),
    "pp2 dp2": Layout(pipeline=2, data=2),
    "tp2 pp2 dp2": Layout(tensor=2, pipeline=2, data=2),
    "pp4 dp2": Layout(pipeline=4, data=2, micro_batches=8),
    "one communicator for each pair": Layout(pipeline=3, data=2, pairs=True),
}
MANY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
HEALTHY_TWINS: tuple[dict[str, Any], ...] = (
    {},
    {"last_stage_ns": 8_000_000},  # the loss
    {"uneven": 0.3},  # sequences of different length
    {"faults": (Fault(1, 50_000_000, every=37),)},  # once
)


def judged(layout: Layout) -> Verdict:
    return judge_path(windows_of(play(layout)))


def windows_of(operations: Operations) -> list[PathWindow]:
    return list(PathFinder().find_all(operations))


def seconds(layout: Layout) -> float:
    """The time of all windows together."""
    return sum(window.step_seconds for window in windows_of(play(layout)))


@MANY
@pytest.mark.parametrize("twin", HEALTHY_TWINS, ids=["even", "last stage", "uneven data", "one long step"])
def test_nobody_is_named_in_a_healthy_job(layout: Layout, twin: dict[str, Any]) -> None:
    """Sequences of different length are a loss, but no rank's."""
    verdict = judged(replace(layout, **twin))
    assert verdict.kind is Kind.HEALTHY or ("uneven" in twin and verdict.kind is Kind.DATA_IMBALANCE)
    assert verdict.culprits == ()


@MANY
def test_a_slow_rank_is_named_with_what_it_costs(layout: Layout) -> None:
    rank = layout.world // 2
    slow = replace(layout, faults=(Fault(rank, 2_000_000),))
    verdict = judged(slow)
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (rank,))
    assert verdict.impact_ratio == pytest.approx(1 - seconds(layout) / seconds(slow), abs=0.05)


@pytest.mark.parametrize("layout", [Layout(data=4), Layout(pipeline=2, data=2)], ids=["dp4", "pp2 dp2"])
def test_a_rank_slow_in_every_10th_step_is_named(layout: Layout) -> None:
    fault = Fault(2, 15_000_000, every=10)
    assert judged(replace(layout, faults=(fault,), steps=200)).culprits == (2,)


def test_two_slow_ranks_are_named() -> None:
    """Either alone would bring back nothing: the step would wait for the other."""
    faults = (Fault(1, 2_000_000), Fault(6, 2_000_000))
    assert judged(Layout(data=8, faults=faults)).culprits == (1, 6)


@pytest.mark.parametrize("seed", [0, 2, 6])
def test_the_unlucky_rank_of_uneven_data_is_not_named(seed: int) -> None:
    """Every rank costs something; these are the seeds in which one cost most over several windows."""
    verdict = judged(Layout(data=8, uneven=0.5, steps=100, seed=seed))
    assert (verdict.kind, verdict.culprits) == (Kind.DATA_IMBALANCE, ())


@pytest.mark.parametrize("layout", [Layout(pipeline=4), Layout(data=4, steps=20)], ids=["no peers", "few steps"])
def test_what_cannot_be_compared_is_not_called_healthy(layout: Layout) -> None:
    assert judged(layout).kind is Kind.INSUFFICIENT_DATA


# Megatron-LM and DeepSpeed's pipeline example, unchanged, on four ranks of one H200, recorded: the ranks that are slow,
# and the job's own milliseconds a step before the fault and after it, in the mean.
RECORDED: dict[str, tuple[tuple[int, ...], int, int]] = {
    "dp4_healthy": ((), 81, 81),
    "dp4_late_host": ((2,), 80, 204),
    "pp2_dp2_healthy": ((), 84, 84),
    "pp2_dp2_late_host": ((2,), 88, 340),
    "pp4_interleaved_healthy": ((), 166, 166),
    "pp4_interleaved_late_host": ((2,), 166, 384),
    "pp4_late_host": ((2,), 235, 480),
    "tp2_pp2_slow_gpu": ((2,), 240, 356),
    "ep2_healthy": ((), 187, 187),
    "ep2_slow_gpu": ((1,), 187, 242),
    "deepspeed_pp2_dp2_healthy": ((), 290, 290),
    "deepspeed_pp4_healthy": ((), 241, 241),
    "deepspeed_pp4_late_host": ((2,), 243, 339),
    "pp2_dp2_gpu_every_10th": ((2,), 118, 158),
    "pp4_gpu_every_10th": ((2,), 229, 296),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_verdict_on_a_recorded_job_is_right(name: str) -> None:
    culprits, before, after = RECORDED[name]
    verdict = judge_path(read(f"{name}.npz"))
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK if culprits else Kind.HEALTHY, culprits)
    if culprits:
        assert verdict.impact_ratio == pytest.approx(1 - before / after, abs=0.1)


def test_a_rank_that_stalls_is_named_with_how_often() -> None:
    """Of a pipeline with one rank in each stage: all others pass their waits on."""
    verdict = judge_path(read("pp4_gpu_every_10th.npz"))
    assert verdict.reason.startswith("rank 2 stalls in every 10th step for 800 ms")


# Pipeline 2 x data 2; eight of 16 steps have no records.


def read(name: str) -> list[PathWindow]:
    return windows_of(read_recording(RECORDINGS / name).operations)


def test_a_healthy_real_job_is_healthy() -> None:
    """One step of rank 0 was 300 ms longer."""
    path = read("pp2_dp2_healthy.npz")
    verdict = judge_path(path)
    assert (verdict.kind, verdict.culprits) == (Kind.HEALTHY, ())
    assert path[-1].stages.tolist() == [0, 0, 1, 1] and len(path) >= 15


def test_the_late_host_of_a_real_job_is_named() -> None:
    """Rank 2's host is late by 15 ms a layer from about step 120 on: a step of 88 ms becomes one of 340 ms."""
    path = read("pp2_dp2_late_host.npz")
    verdict = judge_path(path)
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (2,))
    assert verdict.impact_ratio == pytest.approx(1 - 88 / 340, abs=0.05)
    before = [window for window in path if window.steps[-1] < 119]
    assert sum(float(window.returns.max()) >= 0.05 for window in before) <= 1, "none lasts"
    late = [float(window.issued_late_share[2]) for window in path if window.steps[0] > 130]
    assert min(late) > 0.8, "the host issues the operations late"
