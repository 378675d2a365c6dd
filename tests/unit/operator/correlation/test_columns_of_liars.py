from __future__ import annotations

import numpy as np
import pytest

from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow, StepStatistics
from tests.daemon_messages import job_window


def window(mean_seconds: float = 0.1, wait_seconds: float = 0.05) -> RankWindow:
    return RankWindow(
        identity=RankIdentity(job="j", rank=0, world_size=1, node="n"),
        start_unix_nanos=0,
        end_unix_nanos=5_000_000_000,
        steps=10,
        step_seconds=StepStatistics(mean=mean_seconds),
        self_seconds=StepStatistics(mean=0.05),
        wait_seconds=StepStatistics(mean=wait_seconds),
    )


@pytest.mark.parametrize("wait_seconds", [float("inf"), float("-inf"), 1e300, -1.0])
def test_a_figure_that_cannot_be_is_not_measured(wait_seconds: float) -> None:
    columns = job_window([window(wait_seconds=wait_seconds)], 1).columns
    assert np.isnan(columns.wait_seconds).all()
    assert columns.self_seconds.tolist() == [0.05] and columns.step_seconds.tolist() == [0.1]


@pytest.mark.parametrize("mean_seconds", [float("inf"), -1.0, 0.0, 1e-320])
def test_steps_of_zero_or_endless_time_are_unknown(mean_seconds: float) -> None:
    columns = job_window([window(mean_seconds=mean_seconds)], 1).columns
    assert np.isnan(columns.step_seconds).all() and np.isnan(columns.self_seconds).all()
