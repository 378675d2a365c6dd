"""Figures of a trace that a container wrote, on their way into a window."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rankscope.daemon.captures.duty_cycle import breakdown_of, fill, fill_gauges
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, SOURCE_PROBE, GroupSpan, RankWindow, StepStatistics


def entry(
    step: list[float], exposed: list[float], communication: list[float], state: int = pb.CAPTURE_STATE_ANALYSED
) -> pb.RankCapture:
    summary = pb.TraceSummary(
        each_step_seconds=step,
        each_exposed_communication_seconds=exposed,
        each_communication_seconds=communication,
    )
    return pb.RankCapture(state=state, summary=summary)  # type: ignore[arg-type]


def test_own_work_is_the_step_less_communication_that_nothing_hides() -> None:
    breakdown = breakdown_of(entry([0.1, 0.2], [0.04, 0.05], [0.06, 0.07]))
    assert breakdown is not None
    assert breakdown.self_seconds.tolist() == pytest.approx([0.06, 0.15])


@pytest.mark.parametrize(
    "given",
    [
        entry([], [], []),
        entry([0.1, 0.1], [0.1], [0.1, 0.1]),
        entry([0.1], [math.nan], [0.1]),
        entry([math.inf], [0.1], [0.1]),
        entry([-0.1], [0.1], [0.1]),
        entry([0.0], [0.0], [0.0]),
        entry([0.1], [0.0], [0.1], pb.CAPTURE_STATE_FAILED),
        pb.RankCapture(state=pb.CAPTURE_STATE_ANALYSED),  # stacks have no summary
    ],
)
def test_what_cannot_be_a_step_is_no_breakdown(given: pb.RankCapture) -> None:
    assert breakdown_of(given) is None


def test_waiting_longer_than_the_step_leaves_no_negative_work() -> None:
    window = RankWindow()
    breakdown = breakdown_of(entry([0.1], [0.5], [0.5]))
    assert breakdown is not None
    fill(window, breakdown)
    assert (window.self_seconds.mean, window.wait_seconds.mean) == (0.0, pytest.approx(0.1))


@pytest.mark.parametrize("measured", [{"wait_seconds": StepStatistics(mean=0.1)}, {"groups": [GroupSpan(number=7)]}])
def test_figures_of_a_probe_that_measures_waiting_are_not_touched(measured: dict[str, Any]) -> None:
    window = RankWindow(steps=9, sources={"steps": SOURCE_PROBE}, **measured)
    before = RankWindow.FromString(window.SerializeToString())
    breakdown = breakdown_of(entry([0.1], [0.05], [0.05]))
    assert breakdown is not None
    fill(window, breakdown)
    fill_gauges(window, breakdown)
    assert window == before


def test_a_probe_that_only_counts_steps_is_helped_out() -> None:
    breakdown = breakdown_of(entry([0.1, 0.1], [0.04, 0.04], [0.05, 0.05]))
    assert breakdown is not None
    window = RankWindow(steps=20, steps_total=500, figures={"host_seconds": 0.02}, sources={"steps": SOURCE_PROBE})
    window.step_seconds.mean = 0.08
    window.figures["input_seconds"] = 0.035  # of all steps of the window: not beside those of two
    shown = RankWindow.FromString(window.SerializeToString())
    fill(window, breakdown)
    assert (window.steps, window.steps_total, window.wait_source) == (2, 500, "capture")
    assert window.step_seconds.mean == pytest.approx(0.1)
    assert (window.self_seconds.mean, window.wait_seconds.mean) == pytest.approx((0.06, 0.04))
    assert "input_seconds" not in window.figures
    names = ("steps", "step_seconds", "self_seconds", "wait_seconds", "communication_seconds")
    assert {window.sources[name] for name in names} == {SOURCE_CAPTURE}

    fill_gauges(shown, breakdown)  # the probe's step time is newer
    assert (shown.steps, shown.step_seconds.mean, shown.wait_source) == (20, 0.08, "capture")
    assert (shown.self_seconds.mean, shown.wait_seconds.mean) == pytest.approx((0.06, 0.04))
    assert shown.sources["steps"] == SOURCE_PROBE and shown.sources["wait_seconds"] == SOURCE_CAPTURE
