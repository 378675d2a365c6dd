"""Parts of a rank's time: what must add up always, and what little traces with known answers give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces.breakdown import Breakdown, break_down
from rankscope.analysis.traces.idle_time import split_idle
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import CUT_AT_A_STEP
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import Event, make_trace

MARK, OPERATOR, CALL, KERNEL = Category.USER_ANNOTATION, Category.CPU_OP, Category.RUNTIME, Category.KERNEL
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def broken_down(events: list[Event]) -> Breakdown:
    found = break_down(make_trace(events))
    assert found is not None
    return found


def launched(name: str, launch_us: float, start_us: float, duration_us: float, stream: int = 7) -> list[Event]:
    correlation = round(1000 * launch_us)
    return [
        ("cudaLaunchKernel", CALL, launch_us, 1, {"correlation": correlation}),
        (name, KERNEL, start_us, duration_us, {"correlation": correlation, "stream": stream}),
    ]


NAMES = ("gemm", NCCL, "Memcpy DtoH", "deep_ep::dispatch", "Stream Wait Event", "cudaLaunchKernel", "gloo:all_reduce")
CATEGORIES = (KERNEL, KERNEL, Category.MEMCPY, KERNEL, Category.SYNC, CALL, MARK)
SOME_EVENTS = st.lists(
    st.builds(
        lambda pick, start, duration, correlation, stream: (
            NAMES[pick],
            CATEGORIES[pick],
            start / 10,
            duration / 10,
            {"correlation": correlation} | ({"stream": stream} if pick < 5 else {}),
        ),
        st.integers(0, len(NAMES) - 1),
        st.integers(0, 600),
        st.integers(0, 90),
        st.integers(0, 9),
        st.sampled_from((7, 13)),
    ),
    max_size=25,
)


@given(SOME_EVENTS, st.integers(0, 3))
def test_parts_add_up_to_the_span_whatever_the_trace(some_events: list[Event], step_count: int) -> None:
    events = some_events + [(f"ProfilerStep#{number}", MARK, 20 * number, 20) for number in range(step_count)]
    trace = make_trace(events)
    found = break_down(trace)
    if found is None:
        assert not any(category in (KERNEL, Category.MEMCPY) for _, category, *_ in some_events)
        return
    idle = split_idle(trace, found)
    for parts, reasons in ((found, idle), *zip(found.steps, idle.steps, strict=True)):
        assert parts.compute_ns + parts.non_compute_ns + parts.idle_ns == parts.span_ns
        assert parts.exposed_communication_ns + parts.overlapped_communication_ns == parts.communication_ns
        assert min(parts.span_ns, parts.non_compute_ns, parts.idle_ns, parts.overlapped_communication_ns) >= 0
        named = ("host_bound", "input", "synchronisation", "communication", "other")
        lengths = [getattr(reasons, f"{name}_ns") for name in named]
        assert sum(lengths) == parts.idle_ns
        assert min(lengths) >= 0
    assert len(found.steps) == step_count
    assert sum(step.span_ns for step in found.steps) == (
        found.steps[-1].end_ns - found.steps[0].start_ns if step_count else 0
    )


def test_computation_hides_communication_where_both_run() -> None:
    found = broken_down(
        [
            ("gemm", KERNEL, 0, 10),
            ("gemm", KERNEL, 5, 10, {"stream": 9}),
            (NCCL, KERNEL, 12, 8, {"stream": 20}),
            ("Memcpy HtoD", Category.MEMCPY, 30, 4),
        ]
    )
    assert (found.span_ns, found.compute_ns, found.non_compute_ns, found.idle_ns) == (34_000, 15_000, 9_000, 10_000)
    assert (found.communication_ns, found.exposed_communication_ns, found.memory_ns) == (8_000, 5_000, 4_000)
    assert found.overlap_ratio == 3 / 8


def test_without_communication_there_is_no_overlap_to_speak_of() -> None:
    assert broken_down([("gemm", KERNEL, 0, 10)]).overlap_ratio is None


def test_kernels_shorter_than_a_microsecond_count_with_what_they_lasted() -> None:
    found = broken_down([("gemm", KERNEL, 0.2, 2.7), ("gemm", KERNEL, 10.4, 0.5), ("gemm", KERNEL, 20, 1.501)])
    assert (found.span_ns, found.compute_ns, found.idle_ns) == (21_301, 4_701, 16_600)


def test_waiting_for_another_stream_is_no_work() -> None:
    found = broken_down([("Stream Wait Event", Category.SYNC, 0, 50), ("gemm", KERNEL, 60, 10)])
    assert (found.span_ns, found.compute_ns, found.idle_ns) == (10_000, 10_000, 0)


def test_a_set_is_computation_as_a_kernel_that_fills_is() -> None:
    found = broken_down([("Memset (Device)", Category.MEMSET, 0, 5), ("Memcpy DtoH", Category.MEMCPY, 5, 3)])
    assert (found.compute_ns, found.memory_ns, found.exposed_memory_ns) == (5_000, 3_000, 3_000)


def test_an_exposed_copy_has_neither_computation_nor_communication_beside_it() -> None:
    found = broken_down(
        [
            ("Memcpy DtoH", Category.MEMCPY, 0, 30, {"stream": 9}),
            ("gemm", KERNEL, 0, 10),
            (NCCL, KERNEL, 5, 15, {"stream": 20}),
        ]
    )
    assert (found.memory_ns, found.exposed_memory_ns, found.exposed_communication_ns) == (30_000, 10_000, 10_000)
    assert found.compute_ns + found.exposed_communication_ns + found.exposed_memory_ns + found.idle_ns == found.span_ns


def test_the_totals_hold_every_step_the_last_one_too() -> None:
    steps: list[Event] = [(f"ProfilerStep#{number}", MARK, 100 * number, 100) for number in (3, 4, 5)]
    work = [event for number in (3, 4, 5) for event in launched("gemm", 100 * number + 10, 100 * number + 20, 30)]
    found = broken_down(steps + work)
    assert (found.compute_ns, found.span_ns) == (90_000, 230_000)
    assert [(step.number, step.compute_ns) for step in found.steps] == [(3, 30_000), (4, 30_000), (5, 30_000)]
    assert [step.whole for step in found.steps] == [True, True, True]
    assert found.outside_steps_ns == 0


def test_a_step_counts_its_launched_work_and_preceding_idle_time() -> None:
    events: list[Event] = [("ProfilerStep#0", MARK, 0, 100), ("ProfilerStep#1", MARK, 100, 100)]
    events += launched("gemm", 10, 20, 30) + launched("gemm", 90, 120, 40)  # the second runs when the host is in step 1
    events += launched("gemm", 110, 180, 10)
    # A gather of step 0 that reaches far into step 1 does not take step 1's time with it.
    events += launched(NCCL, 95, 100, 200, stream=20)
    first, second = broken_down(events).steps
    assert (first.start_ns, first.end_ns, first.compute_ns) == (20_000, 160_000, 70_000)
    assert (second.start_ns, second.compute_ns) == (160_000, 10_000)
    assert first.idle_ns == 50_000  # 50–100


def test_a_step_whose_kernels_were_not_traced_says_so() -> None:
    events: list[Event] = [("ProfilerStep#0", MARK, 0, 100), ("ProfilerStep#1", MARK, 100, 100)]
    events += launched("gemm", 10, 20, 30)
    events += [("cudaLaunchKernel", CALL, 150 + number, 1, {"correlation": number}) for number in range(3)]
    events += launched("gemm", 140, 145, 30)
    first, second = broken_down(events).steps
    assert (first.traced_launch_ratio, second.traced_launch_ratio) == (1.0, 0.25)
    assert (first.whole, second.whole) == (True, False)


def test_unmarked_first_steps_are_whole_only_at_a_cut() -> None:
    optimizers: list[Event] = [("Optimizer.step#SGD.step", MARK, 100 * number + 80, 10) for number in range(3)]
    work = [event for number in range(4) for event in launched("gemm", 100 * number + 10, 100 * number + 20, 30)]
    found = broken_down(optimizers + work)
    assert [step.whole for step in found.steps] == [False, True, True]
    # What was launched after the last optimizer is work of a step that the trace does not hold.
    assert (found.compute_ns, found.outside_steps_ns) == (120_000, 100_000)
    cut = broken_down([*optimizers, *work, (CUT_AT_A_STEP, MARK, 0, 0)])
    assert [step.whole for step in cut.steps] == [True, True, True]


def test_gloo_counts_as_device_communication_only_without_communication_kernels() -> None:
    gloo: Event = ("gloo:all_reduce", MARK, 5, 20, {"thread": 9})
    kernels: list[Event] = [("gemm", KERNEL, 0, 10), ("gemm", KERNEL, 22, 8)]
    found = broken_down([*kernels, gloo])
    assert (found.communication_ns, found.exposed_communication_ns) == (20_000, 12_000)
    assert (found.compute_ns, found.non_compute_ns, found.idle_ns) == (18_000, 0, 12_000)
    with_nccl = broken_down([*kernels, gloo, (NCCL, KERNEL, 10, 5, {"stream": 20})])
    assert (with_nccl.communication_ns, with_nccl.exposed_communication_ns) == (5_000, 5_000)


def test_communication_other_than_nccl_is_not_computation() -> None:
    found = broken_down([("deep_ep::dispatch", KERNEL, 0, 10), ("gemm", KERNEL, 10, 10)])
    assert (found.compute_ns, found.communication_ns, found.exposed_communication_ns) == (10_000, 10_000, 10_000)


def test_without_a_device_operators_compute_and_gloo_communicates() -> None:
    found = broken_down(
        [
            ("aten::linear", OPERATOR, 0, 10),
            ("aten::addmm", OPERATOR, 1, 8),
            (NCCL.replace("nccl", "aten::"), OPERATOR, 5, 10, {"thread": 2}),
            ("gloo:all_reduce", MARK, 12, 20, {"thread": 3}),
            ("aten::add_", OPERATOR, 20, 2, {"thread": 3}),  # gloo's own, on its thread
            ("c10d::allreduce_", OPERATOR, 40, 5),
        ]
    )
    assert found.on_host
    assert (found.span_ns, found.compute_ns, found.non_compute_ns) == (32_000, 15_000, 17_000)
    assert (found.communication_ns, found.overlapped_communication_ns, found.idle_ns) == (20_000, 3_000, 0)


def test_a_trace_without_any_work_has_no_breakdown() -> None:
    assert break_down(make_trace([])) is None
    assert break_down(make_trace([("ProfilerStep#0", MARK, 0, 10)])) is None


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for batch in data:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    path: Path = tmp_path_factory.mktemp("trace") / "cpu.json"
    profiler.export_chrome_trace(str(path))
    return path


def test_a_real_cpu_trace_gives_steps_computation_and_input_wait(cpu_trace: Path) -> None:
    trace = read_trace(cpu_trace.read_bytes())
    found = break_down(trace)
    assert found is not None and found.on_host
    assert len(found.steps) == 4
    assert 0 < found.compute_ns < found.span_ns
    assert (found.non_compute_ns, found.communication_ns, found.overlap_ratio) == (0, 0, None)
    idle = split_idle(trace, found)
    assert idle.input_ns > 0 and idle.host_bound_ns > 0 and idle.other_ns == 0
    # Everything in it is an operator of the trace: no more time than from first to last.
    spans = [event for event in json.loads(cpu_trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    assert found.span_ns / 1000 == pytest.approx(
        max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans), abs=0.01
    )
