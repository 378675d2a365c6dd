"""Ranks that are timed on a device, whose waiting is worked out from what the members of their groups say together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rankscope.analysis.verdicts.exposed_communication import EXPOSED, NCCL, OVERLAPPED
from rankscope.operator.correlation.columns import Tick, job_windows
from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.operator.correlation.job_service import job_status
from rankscope.v1 import window_pb2
from rankscope.v1.window_pb2 import GroupSpan, StepStatistics
from tests.daemon_messages import hold, job_window
from tests.unit.operator.correlation.test_columns import SECOND, a_window

STEP = 0.1


def group(rank: int, number: int, kind: int, seconds: float, samples: int = 3) -> GroupSpan:
    return GroupSpan(
        number=number, size=4, position=rank, kind=kind, samples=samples, seconds=seconds, step_seconds=STEP
    )


def on_device(rank: int, *groups: tuple[int, int, float], **measured: StepStatistics) -> window_pb2.RankWindow:
    """`groups`: number, kind and seconds per step."""
    return a_window(
        rank,
        steps=20,
        step_seconds=StepStatistics(mean=STEP, p50=STEP),
        figures={"host_seconds": 0.02, "run_ahead_seconds": 0.3},
        groups=[group(rank, *told) for told in groups],
        wait_source="collective spans" if groups else "",
        **measured,
    )


def on_cpu(rank: int) -> window_pb2.RankWindow:
    return a_window(
        rank,
        steps=20,
        step_seconds=StepStatistics(mean=STEP),
        self_seconds=StepStatistics(mean=0.06),
        wait_seconds=StepStatistics(mean=0.04, p10=0.01),
        groups=[group(rank, 7, EXPOSED, 0.001, samples=20)],
    )


def columns_of(*windows: window_pb2.RankWindow) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    columns = job_window(list(windows), len(windows)).columns
    return columns.self_seconds.tolist(), columns.wait_seconds.tolist(), columns.transfer_seconds.tolist()


def test_self_time_and_wait_come_from_groups_not_the_rank() -> None:
    by_itself = {"self_seconds": StepStatistics(mean=0.005), "wait_seconds": StepStatistics(mean=0.095)}
    windows = [on_device(rank, (7, EXPOSED, 0.01 if rank == 2 else 0.07), **by_itself) for rank in range(4)]
    own, wait, transfer = columns_of(*windows)
    assert own == pytest.approx([0.03, 0.03, 0.09, 0.03])
    assert wait == pytest.approx([0.07, 0.07, 0.01, 0.07])
    assert transfer == pytest.approx([0.01] * 4)


def test_overlapped_and_exposed_groups_are_added_up() -> None:
    windows = [
        on_device(rank, (7, OVERLAPPED, 0.02 + extra), (9, EXPOSED, 0.01)) for rank, extra in enumerate((0.03, 0.0))
    ]
    own, wait, transfer = columns_of(*windows)
    assert own == pytest.approx([0.06, 0.09])
    assert wait == pytest.approx([0.04, 0.01])
    assert transfer == pytest.approx([0.01, 0.01])


def test_ranks_on_a_cpu_are_left_as_they_are() -> None:
    own, wait, transfer = columns_of(on_cpu(0), on_cpu(1))
    assert own == pytest.approx([0.06] * 2)
    assert wait == pytest.approx([0.04] * 2)
    assert transfer == pytest.approx([0.01] * 2)


def test_a_device_whose_collectives_are_not_seen_is_not_measured() -> None:
    own, wait, transfer = columns_of(on_device(0), on_device(1))
    assert np.isnan([*own, *wait, *transfer]).all()


def test_jobs_of_one_tick_with_equal_group_numbers_stay_apart() -> None:
    first = {rank: hold(on_device(rank, (7, EXPOSED, seconds))) for rank, seconds in enumerate((0.05, 0.02))}
    second = {rank: hold(on_device(rank, (7, EXPOSED, 0.001))) for rank in range(2)}
    made = job_windows({"one": Tick(first, 2), "two": Tick(second, 2)})
    assert made["one"].columns.wait_seconds == pytest.approx([0.05, 0.02])
    assert made["one"].columns.transfer_seconds == pytest.approx([0.02, 0.02])
    assert made["two"].columns.wait_seconds == pytest.approx([0.001, 0.001])


def test_job_status_has_self_and_wait_unknown_to_ranks_alone() -> None:
    states: list[JobState] = []
    now = 100.1
    correlator = Correlator(clock=lambda: now, monotonic=lambda: now)
    correlator.listen(states.extend)
    for number in range(3):
        windows = [on_device(rank, (7, EXPOSED, 0.01 if rank == 2 else 0.07)) for rank in range(4)]
        for window in windows:
            window.identity.world_size = 4
            window.start_unix_nanos += 2 * number * SECOND
            window.end_unix_nanos += 2 * number * SECOND
        now = 100.1 + 2 * number
        correlator.take(map(hold, windows))
        correlator.tick()
    status = job_status(states[-1])
    assert [window.self_seconds.mean for window in status.ranks] == pytest.approx([0.03, 0.03, 0.09, 0.03])
    assert [window.wait_seconds.mean for window in status.ranks] == pytest.approx([0.07, 0.07, 0.01, 0.07])


def test_ranks_that_see_other_steps_are_not_compared() -> None:
    """In a loop without an optimizer, rank 2 sees a step in what are two to the others."""
    windows = [on_device(rank, (7, NCCL, 0.02)) for rank in range(4)]
    assert columns_of(*windows)[0] == pytest.approx([STEP] * 4)
    windows[2].step_seconds.mean = windows[2].step_seconds.p50 = 2 * STEP
    assert np.isnan(columns_of(*windows)).all()
    for window in windows:
        window.figures["checkpoint_seconds"] = 0.0  # the probe marks these
    assert not np.isnan(columns_of(*windows)).any()
