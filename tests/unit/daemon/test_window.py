from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.daemon.samples import ProbeFacts, Problem
from rankscope.daemon.windows.window import MAX_PROBLEMS, RankSamples, assemble
from rankscope.v1.window_pb2 import SOURCE_PROBE, RankWindow
from tests.unit.daemon import window_makers as make

NAN = float("nan")


def window_of(samples: RankSamples) -> RankWindow:
    return assemble(make.rank(), "node-a", make.span(), 1, samples, {"H200": 1e15}.get)


def test_a_window_without_samples_holds_nothing_but_who_and_when() -> None:
    names = {field.name for field, _ in window_of(RankSamples()).ListFields()}
    assert names == {"identity", "sequence", "start_unix_nanos", "end_unix_nanos"}


def test_figures_of_sampled_steps_represent_the_whole_window() -> None:
    sample = make.steps(0.5, 0.5, 0.5, 0.5, wait=[0.1, NAN, 0.3, NAN], optimizer=[0.05, 0.05, 0.05, 0.05])
    window = window_of(RankSamples(sample))
    assert (window.wait_seconds.mean, window.self_seconds.mean) == pytest.approx((0.2, 0.3))
    assert window.figures["optimizer_seconds"] == pytest.approx(0.05)
    assert window.self_seconds.p50 == pytest.approx(0.3)
    assert window.wait_seconds.max == pytest.approx(0.3)
    assert window.step_seconds.p50 == pytest.approx(0.5)


@pytest.mark.parametrize("wait", [[0.1, NAN, 0.1, NAN], [NAN, 0.1, NAN, 0.1]])
def test_own_work_includes_checkpoints_of_unsampled_steps(wait: list[float]) -> None:
    window = window_of(RankSamples(make.steps(0.5, 8.5, 0.5, 0.5, wait=wait, checkpoint=[0.0, 8.0, 0.0, 0.0])))
    assert window.figures["checkpoint_seconds"] == pytest.approx(2.0)
    assert window.self_seconds.mean == pytest.approx(2.4)


def test_own_work_is_never_longer_than_the_step() -> None:
    """The one step that was sampled is the longest."""
    window = window_of(RankSamples(make.steps(0.9, 0.3, 0.3, 0.3, wait=[0.1, NAN, NAN, NAN])))
    assert window.self_seconds.mean == pytest.approx((0.8 + 3 * 0.3) / 4)
    assert window.self_seconds.mean < window.step_seconds.mean


def test_an_unmeasured_phase_is_absent_and_not_zero() -> None:
    window = window_of(RankSamples(make.steps(0.5, 0.5, input=[0.0, 0.0])))
    measured = {field.name for field, _ in window.ListFields() if field.name.endswith("_seconds")}
    assert measured == {"step_seconds"} and window.figures == {"input_seconds": 0.0}
    assert "self_seconds" not in window.sources
    assert window.sources["step_seconds"] == SOURCE_PROBE


def test_other_is_what_remains_of_self_and_needs_every_part() -> None:
    parts = {"forward": [0.2], "backward": [0.3], "optimizer": [0.1], "checkpoint": [0.0]}
    complete = window_of(RankSamples(make.steps(1.0, wait=[0.1], input=[0.05], **parts)))
    assert complete.figures["other_seconds"] == pytest.approx(0.25)
    without_input = window_of(RankSamples(make.steps(1.0, wait=[0.1], **parts)))
    assert "other_seconds" not in without_input.figures
    overlapping = window_of(RankSamples(make.steps(1.0, wait=[0.9], input=[0.05], **parts)))
    assert overlapping.figures["other_seconds"] == 0


def test_a_window_without_an_ended_step_has_no_step_time() -> None:
    window = window_of(RankSamples(make.steps(steps_total=9)))
    assert window.HasField("steps")
    assert window.steps == 0
    assert window.steps_total == 9
    assert not any(name.endswith("_seconds") for name in window.sources)
    assert not window.HasField("step_seconds")


def test_mfu_uses_the_declared_peak_and_else_the_device() -> None:
    declared = ProbeFacts(model_flops_per_step=4e14, peak_flops_per_second=2e15, device_name="H200")
    assert window_of(RankSamples(make.steps(0.5, 0.5, facts=declared))).figures["mfu_ratio"] == pytest.approx(0.4)
    by_device = ProbeFacts(model_flops_per_step=4e14, device_name="H200")
    assert window_of(RankSamples(make.steps(0.5, 1.5, facts=by_device))).figures["mfu_ratio"] == pytest.approx(0.4)
    unknown = ProbeFacts(model_flops_per_step=4e14, device_name="abacus")
    assert "mfu_ratio" not in window_of(RankSamples(make.steps(0.5, facts=unknown))).figures


def test_an_impossible_mfu_is_a_problem_with_its_correction() -> None:
    facts = ProbeFacts(model_flops_per_step=4e15, peak_flops_per_second=1e15)
    (problem,) = window_of(RankSamples(make.steps(0.5, facts=facts))).problems
    assert "MFU of 8" in problem
    assert "declared FLOPs" in problem


def test_memory_that_no_device_has_is_not_a_measurement() -> None:
    assert not window_of(RankSamples(make.steps(0.5, memory={"allocated_bytes": 2**70}))).HasField("memory")


def test_quota_and_run_queue_are_not_counted_twice() -> None:
    def starved(**seconds: float) -> RankWindow:
        names = ("run_delay_seconds", "throttled_seconds", "stopped_seconds")
        return window_of(RankSamples(process=replace(make.process(), **{n: seconds.get(n) for n in names})))

    both = starved(run_delay_seconds=0.8, throttled_seconds=1.0, stopped_seconds=0.5)
    assert both.process.starved_seconds == pytest.approx(1.5)
    assert not starved(stopped_seconds=0.5).process.HasField("starved_seconds")


def test_quantiles_are_those_of_numpy() -> None:
    seconds = np.random.default_rng(1).random(37)
    step = window_of(RankSamples(make.steps(*seconds))).step_seconds
    expected = np.quantile(seconds, (0.1, 0.5, 0.9))
    assert (step.p10, step.p50, step.p90) == pytest.approx(tuple(expected))


def test_coordinates_and_memory_come_from_the_probe() -> None:
    sample = make.steps(0.5, facts=ProbeFacts(pipeline=1, data=0), memory={"allocated_bytes": 5})
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
    assert window.stacks.frames[0].own_share == 0.5


def test_problems_are_one_line_each_and_bounded_in_number() -> None:
    problems = [Problem("stacks", "permission", f"line one\nline two \x1b[31m {'x' * 1000}") for _ in range(20)]
    texts = list(window_of(RankSamples(problems=tuple(problems))).problems)
    assert len(texts) == MAX_PROBLEMS
    assert texts[0].startswith("stacks: line one line two")
    assert all(len(text) <= 300 and text.isprintable() for text in texts)
    assert texts[-1] == "and 13 more problems"
