"""Windows whose steps a capture recorded, as columns."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.operator.correlation.columns import job_window
from rankscope.v1 import window_pb2
from tests.unit.operator.test_columns import a_window


def captured(rank: int) -> window_pb2.RankWindow:
    window = a_window(
        rank,
        steps=2,
        step=window_pb2.StepStatistics(mean_seconds=0.1),
        causes=window_pb2.CauseSeconds(self=0.12, wait=0.08, communication=0.1),
        process=window_pb2.ProcessUsage(run_delay_seconds=0.4),
    )
    window.sources["steps"] = window_pb2.SOURCE_CAPTURE
    return window


def test_what_a_rank_queued_for_a_cpu_is_a_share_of_its_step_and_not_the_windows_by_two_steps() -> None:
    window = job_window([captured(0), captured(1)], 2)
    assert window.is_captured
    assert window.columns.self_seconds == pytest.approx([0.06, 0.06])
    assert window.columns.starved_seconds == pytest.approx([0.02, 0.02])  # a fifth of the window of 2 s


def test_captured_steps_are_not_compared_with_those_of_a_probe() -> None:
    probed = a_window(
        1,
        steps=20,
        step=window_pb2.StepStatistics(mean_seconds=0.09),
        causes=window_pb2.CauseSeconds(self=1.0, wait=0.8),
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
    return a_window(rank, steps=20, step=window_pb2.StepStatistics(mean_seconds=0.09), host_seconds=0.09)


def test_a_probe_that_cannot_tell_what_steps_wait_for_leaves_the_job_to_captures() -> None:
    window = job_window([captured(0), blind(1)], 2)
    assert window.is_captured
    assert window.columns.steps[0] == 2 and np.isnan(window.columns.steps[1])
    assert window.columns.self_seconds[0] == pytest.approx(0.06)
    between = job_window([blind(0), blind(1)], 2)
    assert not between.is_captured and between.columns.steps.tolist() == [20, 20]


def test_a_captured_step_on_a_device_keeps_what_it_waited_at_least() -> None:
    recorded = captured(0)
    recorded.host_seconds = 0.1
    recorded.wait.CopyFrom(window_pb2.StepStatistics(p10_seconds=0.03))
    columns = job_window([recorded], 1).columns
    assert (columns.transfer_seconds[0], columns.wait_seconds[0]) == pytest.approx((0.03, 0.04))
