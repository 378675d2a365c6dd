"""What launching costs, on kernels laid out by hand; and which kernels the time went into."""

from __future__ import annotations

from rankscope.analysis.traces.breakdown import measure_launches
from rankscope.analysis.traces.kernels import summarize_compute, top_kernels
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import Event, make_trace

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
    assert (found.count, found.call_total_us, found.queue_median) == (10, 40.0, 5)
    assert found.unqueued_ratio == 0.0
    assert found.short_kernel_count == 0


def test_waiting_for_launches_shows_an_empty_queue_and_short_kernels() -> None:
    events = [event for number in range(10) for event in launched(number, 50 * number, 50 * number + 6, 3)]
    found = measure_launches(make_trace(events))
    assert found is not None
    assert (found.delay_median_us, found.queue_median, found.unqueued_ratio) == (6.0, 1, 1.0)
    assert found.short_kernel_count == 10


def test_launches_and_kernels_without_their_counterpart_do_not_count() -> None:
    events = launched(1, 0, 10, 5)
    events += [("gemm", KERNEL, 2, 3, {"correlation": 0}), ("cudaLaunchKernel", CALL, 8, 1, {"correlation": 2})]
    found = measure_launches(make_trace(events))
    assert found is not None
    assert (found.count, found.kernel_count) == (1, 1)
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
    assert (first.name, first.kind, first.share_ratio) == ("ncclDevKernel_AllReduce", "communication", 0.8)
    assert (second.name, second.tensor_core, second.total_us) == ("nvjet_sm90_a", True, 6.0)
    assert (third.count, third.mean_us, third.longest_us) == (2, 1.0, 1.0)
    mix = summarize_compute(trace)
    assert mix is not None and mix.tensor_core_ratio == 0.75
    assert len(top_kernels(trace, limit=1)) == 1


def test_an_operators_host_time_excludes_what_it_calls() -> None:
    trace = make_trace(
        [
            ("aten::linear", Category.CPU_OP, 0, 10),
            ("aten::addmm", Category.CPU_OP, 1, 7),
            ("aten::copy_", Category.CPU_OP, 2, 2),
            ("aten::linear", Category.CPU_OP, 0, 100, {"thread": 2}),
        ]
    )
    assert {use.name: use.total_us for use in top_kernels(trace)} == {
        "aten::linear": 103.0,
        "aten::addmm": 5.0,
        "aten::copy_": 2.0,
    }
    assert summarize_compute(trace) is None
