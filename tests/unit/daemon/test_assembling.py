from __future__ import annotations

import numpy as np
import pytest

from rankscope.daemon.samples import ProbeFacts, Problem
from rankscope.daemon.windows.window import PROBLEMS_KEPT, RankSamples, assemble
from rankscope.v1.window_pb2 import SOURCE_PROBE, RankWindow
from tests.unit.daemon import window_makers as make

NAN = float("nan")


def window_of(samples: RankSamples) -> RankWindow:
    return assemble(make.rank(), "node-a", make.span(), 1, samples, {"H200": 1e15}.get)


def test_a_window_without_samples_holds_nothing_but_who_and_when() -> None:
    names = {field.name for field, _ in window_of(RankSamples()).ListFields()}
    assert names == {"identity", "sequence", "start_unix_nanos", "end_unix_nanos"}


def test_figures_sampled_on_some_steps_stand_for_all_steps_of_the_window() -> None:
    sample = make.steps(0.5, 0.5, 0.5, 0.5, wait=[0.1, NAN, 0.3, NAN], optimizer=[0.05, 0.05, 0.05, 0.05])
    window = window_of(RankSamples(sample))
    assert window.causes.wait == pytest.approx(0.8)
    assert window.causes.self == pytest.approx(1.2)
    assert window.causes.optimizer == pytest.approx(0.2)
    assert window.self.p50_seconds == pytest.approx(0.3)
    assert window.wait.max_seconds == pytest.approx(0.3)
    assert window.step.p50_seconds == pytest.approx(0.5)


def test_a_cause_that_was_never_measured_is_absent_and_not_zero() -> None:
    window = window_of(RankSamples(make.steps(0.5, 0.5, input=[0.0, 0.0])))
    assert {field.name for field, _ in window.causes.ListFields()} == {"input"}
    assert window.causes.input == 0
    assert not window.HasField("self")
    assert "self" not in window.sources
    assert window.sources["step"] == SOURCE_PROBE


def test_other_is_what_remains_of_self_and_needs_every_part() -> None:
    parts = {"forward": [0.2], "backward": [0.3], "optimizer": [0.1], "checkpoint": [0.0]}
    complete = window_of(RankSamples(make.steps(1.0, wait=[0.1], input=[0.05], **parts)))
    assert complete.causes.other == pytest.approx(0.25)
    without_input = window_of(RankSamples(make.steps(1.0, wait=[0.1], **parts)))
    assert not without_input.causes.HasField("other")
    overlapping = window_of(RankSamples(make.steps(1.0, wait=[0.9], input=[0.05], **parts)))
    assert overlapping.causes.other == 0


def test_a_window_in_which_no_step_ended_has_zero_steps_and_no_causes() -> None:
    window = window_of(RankSamples(make.steps(steps_total=9)))
    assert window.HasField("steps")
    assert window.steps == 0
    assert window.steps_total == 9
    assert not window.HasField("causes")
    assert not window.HasField("step")


def test_mfu_uses_the_declared_peak_and_else_the_device() -> None:
    declared = ProbeFacts(model_flops_per_step=4e14, peak_flops_per_second=2e15, device_name="H200")
    assert window_of(RankSamples(make.steps(0.5, 0.5, facts=declared))).mfu_ratio == pytest.approx(0.4)
    by_device = ProbeFacts(model_flops_per_step=4e14, device_name="H200")
    assert window_of(RankSamples(make.steps(0.5, 1.5, facts=by_device))).mfu_ratio == pytest.approx(0.4)
    unknown = ProbeFacts(model_flops_per_step=4e14, device_name="abacus")
    assert not window_of(RankSamples(make.steps(0.5, facts=unknown))).HasField("mfu_ratio")


def test_an_impossible_mfu_is_a_problem_that_names_what_to_correct() -> None:
    facts = ProbeFacts(model_flops_per_step=4e15, peak_flops_per_second=1e15)
    (problem,) = window_of(RankSamples(make.steps(0.5, facts=facts))).problems
    assert "MFU of 8" in problem
    assert "declared FLOPs" in problem


def test_figures_that_cannot_be_durations_are_not_measurements() -> None:
    hostile = make.steps(0.5, 0.5, 0.5, -1.0, np.inf, wait=[NAN, -3.0, np.inf, 1e300, 0.1], allocated_bytes=2**70)
    window = window_of(RankSamples(hostile))
    assert window.step.max_seconds == 0.5
    assert not window.causes.HasField("self")
    assert not window.HasField("memory")


def test_quantiles_are_those_of_numpy() -> None:
    seconds = np.random.default_rng(1).random(37)
    step = window_of(RankSamples(make.steps(*seconds))).step
    expected = np.quantile(seconds, (0.1, 0.5, 0.9))
    assert (step.p10_seconds, step.p50_seconds, step.p90_seconds) == pytest.approx(tuple(expected))


def test_coordinates_and_memory_come_from_the_probe() -> None:
    sample = make.steps(0.5, facts=ProbeFacts(pipeline=1, data=0), allocated_bytes=5)
    window = window_of(RankSamples(sample))
    assert window.identity.coordinates.pipeline == 1
    assert window.identity.coordinates.HasField("data")
    assert not window.identity.coordinates.HasField("tensor")
    assert window.memory.allocated_bytes == 5
    assert not window.memory.HasField("reserved_bytes")


def test_stack_counts_become_shares_of_the_samples() -> None:
    window = window_of(RankSamples(stacks=make.stacks()))
    assert dict(window.stacks.phase_shares) == {"forward": 0.75, "input": 0.25}
    assert window.stacks.frames[0].share == 1.0
    assert window.stacks.frames[0].leaf_share == 0.5


def test_problems_are_one_line_each_and_bounded_in_number() -> None:
    problems = [Problem("stacks", "permission", f"line one\nline two \x1b[31m {'x' * 1000}") for _ in range(20)]
    texts = list(window_of(RankSamples(problems=tuple(problems))).problems)
    assert len(texts) == PROBLEMS_KEPT
    assert texts[0].startswith("stacks: line one line two")
    assert all(len(text) <= 300 and text.isprintable() for text in texts)
    assert texts[-1] == "and 13 more problems"
