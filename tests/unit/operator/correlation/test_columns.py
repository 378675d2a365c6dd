from __future__ import annotations

import numpy as np
import pytest

from rankscope.operator.correlation.columns import evidence_of, stall_of
from rankscope.probe import ring_layout
from rankscope.v1 import identity_pb2, window_pb2
from rankscope.v1.window_pb2 import StepStatistics
from tests.daemon_messages import job_window

SECOND = 1_000_000_000


def a_window(rank: int = 0, node: str = "a", **fields: object) -> window_pb2.RankWindow:
    return window_pb2.RankWindow(
        identity=identity_pb2.RankIdentity(job="j", rank=rank, world_size=2, node=node),
        start_unix_nanos=98 * SECOND,
        end_unix_nanos=100 * SECOND,
        **fields,  # type: ignore[arg-type]
    )


def test_step_means_arrive_unchanged_and_absent_ones_are_nan() -> None:
    window = a_window(
        steps=20,
        step_seconds=StepStatistics(mean=0.1),
        self_seconds=StepStatistics(mean=0.06, p10=0.05, p90=0.075),
        wait_seconds=StepStatistics(mean=0.04, p10=0.01),
        figures={"forward_seconds": 0.02},
        process=window_pb2.ProcessUsage(starved_seconds=0.5),
    )
    columns = job_window([window], 2).columns
    assert (columns.self_seconds[0], columns.wait_seconds[0], columns.transfer_seconds[0]) == (0.06, 0.04, 0.01)
    assert (columns.forward_seconds[0], columns.self_spread_ratio[0]) == (0.02, pytest.approx(1.5))
    assert columns.starved_seconds[0] == pytest.approx(0.025)  # of the window, by its steps
    assert np.isnan(columns.input_seconds[0]) and np.isnan(columns.mfu_ratio[0])


def test_where_waiting_is_sampled_the_number_of_samples_arrives() -> None:
    window = a_window(
        steps=20,
        step_seconds=StepStatistics(mean=0.1),
        figures={"host_seconds": 0.1},
        groups=[window_pb2.GroupSpan(number=7, size=2, kind=4, samples=3, seconds=0.01, step_seconds=0.1)],
    )
    assert job_window([window], 2).columns.self_steps.tolist() == [3.0]
    by_the_hosts_clock = a_window(steps=20, step_seconds=StepStatistics(mean=0.1))
    assert np.isnan(job_window([by_the_hosts_clock], 2).columns.self_steps[0])


def test_a_measured_zero_is_not_an_absent_value() -> None:
    window = a_window(steps=20, step_seconds=StepStatistics(mean=0.1), figures={"input_seconds": 0.0})
    assert job_window([window], 2).columns.input_seconds[0] == 0.0


def test_a_rank_without_step_records_has_unknown_steps_not_zero() -> None:
    columns = job_window([a_window(rank=0), a_window(rank=1, steps=0)], 2).columns
    assert np.isnan(columns.steps[0])
    assert columns.steps[1] == 0.0


def test_rows_are_in_rank_order_and_nodes_are_named() -> None:
    window = job_window([a_window(rank=1, node="b"), a_window(rank=0, node="a")], 2)
    assert window.columns.rank.tolist() == [0, 1]
    assert [window.place_names[place] for place in window.columns.place.tolist()] == ["a", "b"]


def test_a_stall_without_counters_says_that_they_are_unknown() -> None:
    window = a_window(stall=window_pb2.Stall(seconds_since_step=8.0, phase="forward", stack=["f (m.py:3)"]))
    stall = stall_of(window)
    assert stall is not None
    assert (stall.phase, stall.collectives_enqueued) == ("forward", None)


def test_clocks_of_two_nodes_are_compared_by_shared_steps() -> None:
    def on(node: str, rank: int, total: int, end: float) -> window_pb2.RankWindow:
        return a_window(
            rank=rank,
            node=node,
            steps=20,
            steps_total=total,
            last_step_unix_nanos=int(end * SECOND),
            step_seconds=StepStatistics(mean=0.1),
        )

    agree = job_window([on("a", 0, 500, 100.0), on("b", 1, 499, 99.9)], 2)
    apart = job_window([on("a", 0, 500, 100.0), on("b", 1, 500, 97.0)], 2)
    assert agree.clock_skew_seconds == pytest.approx(0.0, abs=0.01)
    assert apart.clock_skew_seconds == pytest.approx(3.0, abs=0.01)


def test_a_ranks_gpu_is_evidence_where_it_has_exactly_one() -> None:
    usage = window_pb2.GpuUsage(gpus=1, sm_clock_hertz=1.2e9, sm_clock_ratio=0.6, throttled_seconds={"hw_thermal": 0.5})
    gpu = evidence_of(a_window(gpu=usage)).gpu
    assert gpu is not None and gpu.sm_clock_max_hertz == pytest.approx(2e9)
    assert gpu.throttled_shares == {"hw_thermal": 0.25} and gpu.utilization_ratio is None
    assert (gpu.ecc_errors, gpu.xids, gpu.row_remap_pending) == (None, None, None)
    assert evidence_of(a_window(gpu=window_pb2.GpuUsage(gpus=2))).gpu is None
    assert evidence_of(a_window()).gpu is None


def test_gpu_errors_are_evidence_with_their_time_span() -> None:
    usage = window_pb2.GpuUsage(
        gpus=1, ecc_uncorrected_errors=2, ecc_corrected_errors=10, xids=0, row_remap_pending=True
    )
    gpu = evidence_of(a_window(gpu=usage)).gpu
    assert gpu is not None and (gpu.ecc_errors, gpu.ecc_uncorrected_errors) == (12, 2)
    assert (gpu.xids, gpu.row_remap_pending, gpu.seconds) == (0, True, 2.0)


def test_groups_of_messages_only_are_no_collectives() -> None:
    def exchanging(rank: int, *kinds: int) -> window_pb2.RankWindow:
        groups = [window_pb2.GroupSpan(number=7, size=2, kind=kind, samples=3, step_seconds=0.1) for kind in kinds]
        return a_window(rank=rank, steps=20, step_seconds=StepStatistics(mean=0.1), groups=groups)

    with_ddp = a_window(steps=20, step_seconds=StepStatistics(mean=0.1), figures={"forward_seconds": 0.03})
    assert job_window([with_ddp], 2).has_collectives
    messages = ring_layout.GROUP_POINT_TO_POINT
    assert not job_window([exchanging(0, messages), exchanging(1)], 2).has_collectives
    assert job_window([exchanging(0, messages), exchanging(1, messages, ring_layout.GROUP_EXPOSED)], 2).has_collectives
