"""Why a device was idle, one reason at a time."""

from __future__ import annotations

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.idle_time import Idleness, split_idle
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import Event, make_trace

MARK, OPERATOR, CALL, KERNEL = Category.USER_ANNOTATION, Category.CPU_OP, Category.RUNTIME, Category.KERNEL

# The device is idle from 10 to 90; the kernel that ends it is launched from 80 to 85.
FIRST: list[Event] = [
    ("cudaLaunchKernel", CALL, 0, 1, {"correlation": 1}),
    ("gemm", KERNEL, 2, 8, {"correlation": 1}),
]
SECOND: list[Event] = [
    ("cudaLaunchKernel", CALL, 80, 5, {"correlation": 2}),
    ("gemm", KERNEL, 90, 10, {"correlation": 2}),
]


def idle_with(*host: Event) -> Idleness:
    trace = make_trace([*FIRST, *SECOND, *host])
    found = break_down(trace)
    assert found is not None and found.idle_ns == 80_000
    return split_idle(trace, found)


def test_idle_time_before_a_launch_is_host_bound() -> None:
    idle = idle_with()
    assert (idle.host_bound_ns, idle.other_ns) == (75_000, 5_000)
    assert idle.longest_gap_ns == 80_000


def test_waiting_for_data_is_input_even_where_operators_make_it() -> None:
    idle = idle_with(
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", MARK, 5, 45), ("aten::stack", OPERATOR, 20, 10)
    )
    assert (idle.input_ns, idle.host_bound_ns) == (40_000, 35_000)


def test_synchronisation_and_the_host_bound_time_after_it_are_counted() -> None:
    idle = idle_with(("aten::item", OPERATOR, 1, 20), ("cudaStreamSynchronize", CALL, 3, 17))
    assert (idle.synchronisation_ns, idle.host_bound_ns) == (11_000, 64_000)
    assert idle.host_bound_after_synchronisation_ns == 64_000


def test_gloo_is_the_reason_only_while_the_launching_thread_waits() -> None:
    idle = idle_with(("gloo:all_reduce", MARK, 10, 50, {"thread": 9}), ("aten::slow", OPERATOR, 30, 20))
    assert (idle.communication_ns, idle.host_bound_ns) == (30_000, 45_000)


def test_synchronisation_of_a_thread_that_launches_nothing_is_ignored() -> None:
    watchdog: Event = ("cudaEventSynchronize", CALL, 10, 40, {"thread": 77})
    assert idle_with(watchdog).synchronisation_ns == 0


def test_a_kernel_without_a_traced_launch_leaves_the_reason_open() -> None:
    trace = make_trace([*FIRST, ("gemm", KERNEL, 90, 10, {"correlation": 3})])
    found = break_down(trace)
    assert found is not None
    idle = split_idle(trace, found)
    assert (idle.other_ns, idle.host_bound_ns) == (80_000, 0)


def test_kernels_that_touch_at_fractional_microseconds_leave_no_idle_time() -> None:
    events: list[Event] = [("gemm", KERNEL, 10.5 * number + 0.25, 10.5) for number in range(4)]
    trace = make_trace(events)
    found = break_down(trace)
    assert found is not None and found.idle_ns == 0
    assert split_idle(trace, found).longest_gap_ns == 0
