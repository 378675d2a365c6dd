"""Steps from what the profiler or the optimizer marks, and whose work a kernel is."""

from __future__ import annotations

from rankscope.analysis.traces.steps import NO_STEP, find_steps, step_of_rows
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import Event, make_trace

MARK, OPERATOR, CALL, KERNEL = Category.USER_ANNOTATION, Category.CPU_OP, Category.RUNTIME, Category.KERNEL
BACKWARD = "autograd::engine::evaluate_function: MulBackward0"


def windows(events: list[Event]) -> list[tuple[int, float, float]]:
    steps = find_steps(make_trace(events))
    return list(zip(steps.number.tolist(), steps.start_ns / 1000, steps.end_ns / 1000, strict=True))


def test_the_profiler_s_own_steps_keep_their_numbers() -> None:
    events: list[Event] = [("ProfilerStep#7", MARK, 10, 90), ("ProfilerStep#6", MARK, 0, 9)]
    # The same step as the device saw it is no other step; an optimizer does not add any.
    events += [("ProfilerStep#7", Category.GPU_ANNOTATION, 40, 90), ("Optimizer.step#SGD.step", MARK, 20, 1)]
    assert windows(events) == [(6, 0.0, 9.0), (7, 10.0, 100.0)]


def test_the_end_of_an_optimizer_separates_two_steps() -> None:
    events: list[Event] = [("aten::mul", OPERATOR, 2, 3)]
    for number in range(3):
        events += [(BACKWARD, OPERATOR, 10 + 20 * number, 2), ("Optimizer.step#SGD.step", MARK, 14 + 20 * number, 4)]
    assert windows(events) == [(0, 2.0, 18.0), (1, 18.0, 38.0), (2, 38.0, 58.0)]


def test_optimizers_without_a_backward_pass_between_them_end_one_step() -> None:
    events: list[Event] = []
    for number in range(2):
        begin = 100 * number
        events += [(BACKWARD, OPERATOR, begin, 5), ("Optimizer.step#AdamW.step", MARK, begin + 6, 5)]
        events += [
            ("Optimizer.step#AdamW.step", MARK, begin + 16, 5),
            ("Optimizer.step#AdamW.step", MARK, begin + 15, 10),
        ]
    assert windows(events) == [(0, 0.0, 25.0), (1, 25.0, 125.0)]


def test_alternating_optimizers_after_separate_backward_passes_end_one_step() -> None:
    events: list[Event] = []
    for number in range(3):
        begin = 100 * number
        events += [(BACKWARD, OPERATOR, begin, 5), ("Optimizer.step#Critic.step", MARK, begin + 10, 5)]
        events += [(BACKWARD, OPERATOR, begin + 20, 5), ("Optimizer.step#Generator.step", MARK, begin + 30, 5)]
    assert windows(events) == [(0, 0.0, 35.0), (1, 35.0, 135.0), (2, 135.0, 235.0)]


def test_a_trace_that_marks_no_steps_has_none() -> None:
    assert windows([("aten::mul", OPERATOR, 0, 1)]) == []


def test_a_late_kernel_belongs_to_the_step_that_launched_it() -> None:
    trace = make_trace(
        [
            ("ProfilerStep#0", MARK, 0, 10),
            ("ProfilerStep#1", MARK, 10, 10),
            ("cudaLaunchKernel", CALL, 8, 1, {"correlation": 5}),
            ("late", KERNEL, 15, 2, {"correlation": 5}),
            ("from before the trace", KERNEL, 16, 2, {"correlation": 4}),
        ]
    )
    kernels = {
        trace.named(name): step for name, step in zip(trace.name, step_of_rows(trace, find_steps(trace)), strict=True)
    }
    assert kernels["late"] == 0
    assert kernels["from before the trace"] == NO_STEP


def test_without_launches_a_kernel_belongs_where_it_runs() -> None:
    trace = make_trace([("ProfilerStep#0", MARK, 0, 10), ("ProfilerStep#1", MARK, 10, 10), ("gemm", KERNEL, 15, 2)])
    assert step_of_rows(trace, find_steps(trace)).tolist() == [0, 1, 1]
