"""Whatever is planted in a generated job is what the verdict names, and nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rankscope.analysis.timelines.report import TimelineReport, analyze
from rankscope.analysis.timelines.timeline import read_columns
from rankscope.analysis.verdicts.verdict import Kind
from tests.unit.analysis.timelines.simulation import Fault, Place, Shape, simulate

STEPS = 22
BOUNDED = settings(
    max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
SEEDS = st.integers(0, 10_000)


@st.composite
def shapes(draw: st.DrawFn, least_stages: int = 1, least_replicas: int = 1, tensors: int = 2) -> Shape:
    stages = draw(st.integers(least_stages, 4))
    replicas = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n >= least_replicas]))
    lanes = draw(st.integers(1, tensors))
    assume(stages * replicas * lanes >= 2)
    chunks = draw(st.sampled_from([1, 1, 2])) if stages > 1 else 1
    batches = stages * draw(st.integers(1, 2)) if chunks > 1 else draw(st.integers(2, 8))
    assume(stages * replicas * lanes * batches * chunks <= 128)  # or the simulation takes too long
    return Shape(stages, replicas, lanes, batches, chunks)


def judged(shape: Shape, seed: int, fault: Fault | None = None, *, noise: float = 0.01, **how: bool) -> TimelineReport:
    return analyze(read_columns(simulate(shape, STEPS, fault=fault, noise=noise, seed=seed, **how)))


def found(report: TimelineReport) -> tuple[Kind, tuple[int, ...], int | None]:
    verdict = report.judgement.verdict
    return verdict.kind, verdict.culprits, verdict.stage


def slowing(culprit: Place, factor: float) -> Fault:
    return Fault(compute=lambda step, place: factor if place == culprit else 1.0)


@BOUNDED
@given(shapes(), SEEDS, st.floats(0.002, 0.03))
def test_a_healthy_job_is_healthy(shape: Shape, seed: int, noise: float) -> None:
    assert found(judged(shape, seed, noise=noise)) == (Kind.HEALTHY, (), None)


@BOUNDED
@given(shapes(least_replicas=2), SEEDS, st.floats(1.3, 3.0), st.data())
def test_a_planted_slow_rank_is_named_and_nobody_else(
    shape: Shape, seed: int, factor: float, data: st.DataObject
) -> None:
    culprit = data.draw(st.sampled_from(shape.places))
    report = judged(shape, seed, slowing(culprit, factor))
    assert found(report) == (Kind.SLOW_RANK, (shape.rank(culprit),), None)
    assert float(report.judgement.outliers.ratio[culprit]) == pytest.approx(factor, rel=0.15)


@BOUNDED
@given(shapes(least_replicas=2), SEEDS, st.floats(1.3, 3.0), st.data())
def test_tensor_parallel_mates_that_walk_in_step_are_named_together(
    shape: Shape, seed: int, factor: float, data: st.DataObject
) -> None:
    culprit = data.draw(st.sampled_from(shape.places))
    mates = tuple(shape.rank((*culprit[:2], tensor)) for tensor in range(shape.tensors))
    report = judged(shape, seed, slowing(culprit, factor), tensors_walk_in_step=True)
    assert found(report) == (Kind.SLOW_RANK, mates, None)


@BOUNDED
@given(shapes(least_stages=2), SEEDS, st.floats(1.3, 2.5), st.data())
def test_a_planted_slow_stage_is_named_and_no_rank(shape: Shape, seed: int, factor: float, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, shape.stages - 1))
    report = judged(shape, seed, Fault(compute=lambda step, place: factor if place[0] == stage else 1.0))
    assert found(report) == (Kind.SLOW_STAGE, (), stage)


@BOUNDED
@given(shapes(least_replicas=2), SEEDS, st.floats(1.5, 3.0), st.booleans())
def test_a_rank_that_changes_each_step_is_uneven_data(shape: Shape, seed: int, factor: float, replica: bool) -> None:
    unlucky = [random.Random(f"{seed}/{step}").choice(shape.places) for step in range(STEPS)]
    end = 2 if replica else 3  # all stages of a data-parallel rank get the long batch, or one rank has a bad step

    def compute(step: int, place: Place) -> float:
        return factor if place[1:end] == unlucky[step][1:end] and (replica or place[0] == unlucky[step][0]) else 1.0

    assert found(judged(shape, seed, Fault(compute=compute))) == (Kind.DATA_IMBALANCE, (), None)


@BOUNDED
@given(shapes(least_stages=2, least_replicas=2, tensors=1), SEEDS, st.data())
def test_a_slow_collective_is_no_slow_rank(shape: Shape, seed: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, shape.stages - 1))
    fault = Fault(scatter=lambda step, at: 50.0 if at == stage else 1.0)
    report = judged(shape, seed, fault)
    assert found(report) == (Kind.SLOW_COMMUNICATION, (), None)
    assert "grads-reduce-scatter" in report.judgement.verdict.reason


@BOUNDED
@given(shapes(least_replicas=2), SEEDS, st.data())
def test_a_rank_below_the_threshold_is_left_alone(shape: Shape, seed: int, data: st.DataObject) -> None:
    culprit = data.draw(st.sampled_from(shape.places))
    assert found(judged(shape, seed, slowing(culprit, 1.05)))[0] is Kind.HEALTHY


def test_a_job_with_one_bad_step_is_healthy() -> None:
    fault = Fault(compute=lambda step, place: 8.0 if (step, place) == (11, (1, 2, 0)) else 1.0)
    assert found(judged(Shape(2, 4), 1, fault))[0] is Kind.HEALTHY


def test_with_one_rank_per_stage_the_slow_stage_is_named() -> None:
    report = judged(Shape(4, 1, micro_batches=8), 1, slowing((2, 0, 0), 1.6))
    assert found(report) == (Kind.SLOW_STAGE, (), 2)
    assert any("cannot be distinguished" in note for note in report.notes)


def test_the_costlier_fault_is_the_verdict_and_the_other_noted() -> None:
    def compute(step: int, place: Place) -> float:
        return (2.5 if place == (0, 1, 0) else 1.0) * (1.3 if place[0] == 3 else 1.0)

    report = judged(Shape(4, 4, micro_batches=8), 1, Fault(compute=compute))
    assert found(report) == (Kind.SLOW_RANK, (1,), None)
    assert any("slow_stage: stage 3" in note for note in report.notes)


def test_a_rank_that_is_slow_now_and_then_is_slow() -> None:
    fault = Fault(compute=lambda step, place: 2.5 if place == (1, 2, 0) and step % 5 < 2 else 1.0)
    columns = simulate(Shape(2, 4), 40, fault=fault, seed=1)
    assert found(analyze(read_columns(columns))) == (Kind.SLOW_RANK, (6,), None)


def test_a_rank_slow_only_for_a_while_is_not_slow() -> None:
    fault = Fault(compute=lambda step, place: 2.5 if place == (1, 2, 0) and step < 14 else 1.0)
    columns = simulate(Shape(2, 4), 40, fault=fault, seed=1)
    assert found(analyze(read_columns(columns)))[0] is not Kind.SLOW_RANK


def test_occasional_bad_steps_do_not_make_a_stage_slow() -> None:
    def compute(step: int, place: Place) -> float:
        return 2.0 if place[0] == (step * 7 + step // 3) % 2 else 1.0

    assert found(judged(Shape(2, 1, micro_batches=4), 1, Fault(compute=compute)))[0] is Kind.DATA_IMBALANCE
