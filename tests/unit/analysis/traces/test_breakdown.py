"""Parts of a rank's time: what must add up always, and what little traces with known answers give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.traces.breakdowns.breakdown import Breakdown, break_down
from rankscope.analysis.traces.breakdowns.idleness import split_idle
from rankscope.analysis.traces.columns import Category
from rankscope.analysis.traces.reading.reader import read_trace
from tests.unit.analysis.traces.building import Event, make_trace

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
@settings(max_examples=150, deadline=None)
def test_parts_add_up_to_the_span_whatever_the_trace(some_events: list[Event], step_count: int) -> None:
    events = some_events + [(f"ProfilerStep#{number}", MARK, 20 * number, 20) for number in range(step_count)]
    trace = make_trace(events)
    found = break_down(trace)
    if found is None:
        assert not any(category in (KERNEL, Category.MEMCPY, Category.SYNC) for _, category, *_ in some_events)
        return
    idle = split_idle(trace, found)
    for parts, reasons in ((found, idle), *zip(found.steps, idle.steps, strict=True)):
        assert parts.compute_ns + parts.non_compute_ns + parts.idle_ns == parts.span_ns
        assert parts.exposed_communication_ns + parts.overlapped_communication_ns == parts.communication_ns
        assert min(parts.span_ns, parts.non_compute_ns, parts.idle_ns, parts.overlapped_communication_ns) >= 0
        named = ("host_bound", "input", "synchronisation", "communication", "other", "rounding")
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


def test_kernels_of_a_trace_in_nanoseconds_shrink_to_whole_microseconds_as_in_hta() -> None:
    found = broken_down([("gemm", KERNEL, 0.2, 2.7), ("gemm", KERNEL, 10.4, 0.5), ("gemm", KERNEL, 20, 1.5)])
    # 1–2, 11–10 which counts as minus one, 20–21.
    assert (found.span_ns, found.compute_ns, found.idle_ns) == (20_000, 1_000, 19_000)


def test_where_rounding_would_leave_less_than_nothing_times_are_exact() -> None:
    found = broken_down([("gemm", KERNEL, 5.2, 0.3)])
    assert (found.span_ns, found.compute_ns) == (300, 300)


def test_whole_microseconds_that_floats_add_up_to_stay_whole() -> None:
    start_us = 908_654.213
    found = broken_down([("gemm", KERNEL, start_us, 4.787), ("gemm", KERNEL, start_us + 100, 1.001)])
    assert found.compute_ns == 4_000 + 0


def test_of_several_profiler_steps_the_last_is_not_in_the_totals_but_in_the_steps() -> None:
    steps: list[Event] = [(f"ProfilerStep#{number}", MARK, 100 * number, 100) for number in (3, 4, 5)]
    work = [event for number in (3, 4, 5) for event in launched("gemm", 100 * number + 10, 100 * number + 20, 30)]
    found = broken_down(steps + work)
    assert found.without_last_step
    assert (found.compute_ns, found.span_ns) == (60_000, 130_000)
    assert [(step.number, step.compute_ns) for step in found.steps] == [(3, 30_000), (4, 30_000), (5, 30_000)]
    # HTA has no result where dropping the last step leaves nothing; then everything counts.
    assert broken_down(steps + launched("gemm", 510, 520, 30)).compute_ns == 30_000


def test_a_step_s_work_is_what_it_launched_and_its_idle_time_reaches_back_to_the_step_before() -> None:
    events: list[Event] = [("ProfilerStep#0", MARK, 0, 100), ("ProfilerStep#1", MARK, 100, 100)]
    events += launched("gemm", 10, 20, 30) + launched("gemm", 90, 120, 40)  # the second runs when the host is in step 1
    events += launched("gemm", 110, 180, 10)
    # A gather of step 0 that reaches far into step 1 does not take step 1's time with it.
    events += launched(NCCL, 95, 100, 200, stream=20)
    first, second = broken_down(events).steps
    assert (first.start_ns, first.end_ns, first.compute_ns) == (20_000, 160_000, 70_000)
    assert (second.start_ns, second.compute_ns) == (160_000, 10_000)
    assert first.idle_ns == 50_000  # 50–100
    assert first.idle_in_host_window_ns == 70_000  # 0–20, 50–100


def test_a_step_whose_kernels_were_not_traced_says_so() -> None:
    events: list[Event] = [("ProfilerStep#0", MARK, 0, 100), ("ProfilerStep#1", MARK, 100, 100)]
    events += launched("gemm", 10, 20, 30)
    events += [("cudaLaunchKernel", CALL, 150 + number, 1, {"correlation": number}) for number in range(3)]
    events += launched("gemm", 140, 145, 30)
    first, second = broken_down(events).steps
    assert (first.traced_launch_ratio, second.traced_launch_ratio) == (1.0, 0.25)


def test_gloo_on_the_host_is_a_device_s_communication_only_without_communication_kernels() -> None:
    gloo: Event = ("gloo:all_reduce", MARK, 5, 20, {"thread": 9})
    kernels: list[Event] = [("gemm", KERNEL, 0, 10), ("gemm", KERNEL, 22, 8)]
    found = broken_down([*kernels, gloo])
    assert (found.communication_ns, found.exposed_communication_ns) == (20_000, 12_000)
    assert (found.compute_ns, found.non_compute_ns, found.idle_ns) == (18_000, 0, 12_000)
    with_nccl = broken_down([*kernels, gloo, (NCCL, KERNEL, 10, 5, {"stream": 20})])
    assert (with_nccl.communication_ns, with_nccl.exposed_communication_ns) == (5_000, 5_000)


def test_communication_that_hta_takes_for_computation_counts_as_both() -> None:
    found = broken_down([("deep_ep::dispatch", KERNEL, 0, 10), ("gemm", KERNEL, 10, 10)])
    assert (found.compute_ns, found.communication_ns, found.exposed_communication_ns) == (20_000, 10_000, 10_000)


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


def test_a_real_cpu_trace_gives_its_steps_computation_and_input_wait(cpu_trace: Path) -> None:
    trace = read_trace(cpu_trace.read_bytes())
    found = break_down(trace)
    assert found is not None and found.on_host
    assert len(found.steps) == 4
    assert 0 < found.compute_ns < found.span_ns
    assert (found.non_compute_ns, found.communication_ns, found.overlap_ratio) == (0, 0, None)
    idle = split_idle(trace, found)
    assert idle.input_ns > 0 and idle.host_bound_ns > 0 and idle.other_ns == idle.rounding_ns == 0
    # Everything in it is an operator of the trace: no more time than from first to last.
    spans = [event for event in json.loads(cpu_trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    assert found.span_ns / 1000 == pytest.approx(
        max(event["ts"] + event["dur"] for event in spans) - min(event["ts"] for event in spans), abs=0.01
    )
