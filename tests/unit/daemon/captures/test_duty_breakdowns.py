"""Figures of a trace that a container wrote, on their way into a window."""

from __future__ import annotations

import math

import pytest

from rankscope.daemon.captures.duty_breakdowns import breakdown_of, fill
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.window_pb2 import SOURCE_PROBE, RankWindow


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
    assert breakdown.own.tolist() == pytest.approx([0.06, 0.15])


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
    assert (window.causes.self, window.causes.wait) == (0.0, pytest.approx(0.1))


def test_figures_of_the_probe_are_not_touched() -> None:
    window = RankWindow(steps=0)
    window.sources["steps"] = SOURCE_PROBE
    breakdown = breakdown_of(entry([0.1], [0.05], [0.05]))
    assert breakdown is not None
    fill(window, breakdown)
    assert window == RankWindow(steps=0, sources={"steps": SOURCE_PROBE})
