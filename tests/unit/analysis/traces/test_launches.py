"""What launching costs, on kernels laid out by hand; and which kernels the time went into."""

from __future__ import annotations

from rankscope.analysis.traces.breakdown import measure_launches
from rankscope.analysis.traces.kernels import Kind, tensor_core_ratio, top_kernels
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.building import Event, make_trace

CALL, KERNEL = Category.RUNTIME, Category.KERNEL


def launched(number: int, call_us: float, start_us: float, duration_us: float) -> list[Event]:
    return [
        ("cudaLaunchKernel", CALL, call_us, 4, {"correlation": number}),
        ("gemm", KERNEL, start_us, duration_us, {"correlation": number}),
    ]


def test_a_host_that_runs_ahead_fills_the_queue() -> None:
    events = [event for number in range(10) for event in launched(number, 5 * number, 100 + 50 * number, 50)]
    found = measure_launches(make_trace(events))
    assert found is not None
    assert (found.count, found.call_total_ns, found.queue_longest) == (10, 40_000, 10)
    assert found.unqueued_ratio == 0.0
    assert found.short_kernel_count == 0


def test_a_device_that_waits_for_each_launch_has_an_empty_queue_and_kernels_shorter_than_their_launch() -> None:
    events = [event for number in range(10) for event in launched(number, 50 * number, 50 * number + 6, 3)]
    found = measure_launches(make_trace(events))
    assert found is not None
    assert (found.delay_median_ns, found.queue_longest, found.unqueued_ratio) == (6000, 1, 1.0)
    assert (found.short_kernel_count, found.short_kernel_ns) == (10, 30_000)


def test_where_a_trace_was_cut_launches_and_kernels_miss_each_other() -> None:
    events = launched(1, 0, 10, 5)
    events += [("gemm", KERNEL, 2, 3, {"correlation": 0}), ("cudaLaunchKernel", CALL, 8, 1, {"correlation": 2})]
    found = measure_launches(make_trace(events))
    assert found is not None
    assert (found.unlaunched_count, found.untraced_launch_count) == (1, 1)
    assert measure_launches(make_trace([("gemm", KERNEL, 0, 1)])) is None


def test_top_kernels_are_those_with_the_largest_total() -> None:
    trace = make_trace(
        [
            ("nvjet_sm90_a", KERNEL, 0, 6),
            ("elementwise", KERNEL, 6, 1),
            ("elementwise", KERNEL, 7, 1),
            ("ncclDevKernel_AllReduce", KERNEL, 0, 32),
        ]
    )
    first, second, third = top_kernels(trace)
    assert (first.name, first.kind, first.share_ratio) == ("ncclDevKernel_AllReduce", Kind.COMMUNICATION, 0.8)
    assert (second.name, second.tensor_core, second.total_ns) == ("nvjet_sm90_a", True, 6000)
    assert (third.count, third.mean_ns, third.longest_ns) == (2, 1000.0, 1000)
    assert tensor_core_ratio(trace) == 0.75
    assert len(top_kernels(trace, limit=1)) == 1


def test_on_the_host_an_operator_s_time_is_without_what_it_calls() -> None:
    trace = make_trace(
        [
            ("aten::linear", Category.CPU_OP, 0, 10),
            ("aten::addmm", Category.CPU_OP, 1, 7),
            ("aten::copy_", Category.CPU_OP, 2, 2),
            ("aten::linear", Category.CPU_OP, 0, 100, {"thread": 2}),
        ]
    )
    assert {use.name: use.total_ns for use in top_kernels(trace)} == {
        "aten::linear": 103_000,
        "aten::addmm": 5_000,
        "aten::copy_": 2_000,
    }
    assert tensor_core_ratio(trace) is None
