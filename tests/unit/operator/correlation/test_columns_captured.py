"""Windows whose steps a capture recorded, as columns."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.v1 import window_pb2
from rankscope.v1.window_pb2 import StepStatistics
from tests.daemon_messages import job_window
from tests.unit.operator.correlation.test_columns import a_window


def captured(rank: int) -> window_pb2.RankWindow:
    window = a_window(
        rank,
        steps=2,
        step_seconds=StepStatistics(mean=0.1),
        self_seconds=StepStatistics(mean=0.06),
        wait_seconds=StepStatistics(mean=0.04, p10=0.03),
        process=window_pb2.ProcessUsage(starved_seconds=0.4),
    )
    window.sources["steps"] = window_pb2.SOURCE_CAPTURE
    return window


def test_cpu_queueing_is_a_share_of_the_captured_step() -> None:
    window = job_window([captured(0), captured(1)], 2)
    assert window.is_captured
    assert window.columns.self_seconds == pytest.approx([0.06, 0.06])
    assert window.columns.starved_seconds == pytest.approx([0.02, 0.02])  # a fifth of the window of 2 s


def test_captured_steps_are_not_compared_with_those_of_a_probe() -> None:
    probed = a_window(
        1,
        steps=20,
        step_seconds=StepStatistics(mean=0.09),
        self_seconds=StepStatistics(mean=0.05),
        wait_seconds=StepStatistics(mean=0.04),
    )
    window = job_window([captured(0), probed], 2)
    assert not window.is_captured
    assert np.isnan(window.columns.steps[0]) and window.columns.steps[1] == 20


def test_ranks_of_another_node_may_tell_of_their_capture_later() -> None:
    window = job_window([captured(0), a_window(1)], 2)
    assert window.is_captured
    assert window.columns.steps[0] == 2 and np.isnan(window.columns.steps[1])


def blind(rank: int) -> window_pb2.RankWindow:
    """A probe that counts steps and cannot tell what they wait for."""
    return a_window(rank, steps=20, step_seconds=StepStatistics(mean=0.09), figures={"host_seconds": 0.09})


def test_a_probe_blind_to_waiting_leaves_the_job_to_captures() -> None:
    window = job_window([captured(0), blind(1)], 2)
    assert window.is_captured
    assert window.columns.steps[0] == 2 and np.isnan(window.columns.steps[1])
    assert window.columns.self_seconds[0] == pytest.approx(0.06)
    between = job_window([blind(0), blind(1)], 2)
    assert not between.is_captured and between.columns.steps.tolist() == [20, 20]


def test_a_captured_device_step_keeps_its_minimum_wait() -> None:
    recorded = captured(0)
    recorded.figures["host_seconds"] = 0.1
    columns = job_window([recorded], 1).columns
    assert (columns.transfer_seconds[0], columns.wait_seconds[0]) == pytest.approx((0.03, 0.04))
