"""Breakdowns against what cannot share our mistakes: a sweep over moments written here, and figures of another tool."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces.breakdown import Parts, break_down
from rankscope.analysis.traces.idle_time import split_idle
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.cli.main import main
from tests.integration.trace_variants import load
from tests.shared_data import H200, shared

# As written, in µs: from a base as torch does now, and since 1970, where a float is too coarse for nanoseconds.
BEGINNINGS_NS = (0, 3_844_102_483_692_633, 1_790_857_026_123_456_789)


@dataclass(frozen=True)
class Work:
    """Something that a trace holds of a device."""

    category: str
    name: str
    part: str  # of the breakdown; empty where it is no work
    stream: int
    start_ns: int
    duration_ns: int
    launched: bool


KINDS = (
    ("kernel", "gemm", "compute"),
    ("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "memory"),
    ("gpu_memset", "Memset (Device)", "compute"),
    ("cuda_sync", "Stream Wait Event", ""),
    ("gpu_user_annotation", "ProfilerStep#1", ""),
)
# Often equal, touching, nested or empty; sometimes as long as a step.
MOMENTS = st.integers(0, 60) | st.integers(0, 20_000_000)
LENGTHS = st.integers(0, 12) | st.sampled_from((0, 1, 999, 1000, 1001)) | st.integers(0, 5_000_000)
SOME_WORK = st.lists(
    st.builds(
        lambda kind, *rest: Work(*KINDS[kind], *rest),
        st.integers(0, len(KINDS) - 1),
        st.sampled_from((7, 13, 20)),
        MOMENTS,
        LENGTHS,
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def written(work: Sequence[Work], steps: Sequence[int], first_ns: int) -> bytes:
    """A file as torch writes it: decimal µs with three places."""

    def event(category: str, name: str, start_ns: int, duration_ns: int, **more: Any) -> str:
        start = f"{(first_ns + start_ns) // 1000}.{(first_ns + start_ns) % 1000:03d}"
        lasted = f"{duration_ns // 1000}.{duration_ns % 1000:03d}"
        rest = json.dumps({"pid": 1, "tid": 1} | more)[1:]
        return f'{{"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "ts": {start}, "dur": {lasted}, {rest}'

    lines = [
        event("user_annotation", f"ProfilerStep#{number}", start, end - start)
        for number, (start, end) in enumerate(pairwise(steps), 3)
    ]
    for number, one in enumerate(work):
        args = {"stream": one.stream, "device": 0, "correlation": number}
        lines.append(event(one.category, one.name, one.start_ns, one.duration_ns, pid=0, tid=one.stream, args=args))
        if one.launched:
            start = max(0, one.start_ns - 20)
            lines.append(event("cuda_runtime", "cudaLaunchKernel", start, 7, args={"correlation": number}))
    return f'{{"schemaVersion": 1, "traceEvents": [{", ".join(lines)}]}}'.encode()


def swept(work: Sequence[Work], begin_ns: int, finish_ns: int) -> Parts:
    """From moment to moment at which anything begins or ends, what runs in between."""
    spans = [(one.part, one.start_ns, one.start_ns + one.duration_ns) for one in work if one.part]
    moments = {begin_ns, finish_ns} | {moment for _, *ends in spans for moment in ends}
    lasted = dict.fromkeys(("compute", "busy", "communication", "exposed", "memory", "exposed_memory"), 0)
    for begin, end in pairwise(sorted(moment for moment in moments if begin_ns <= moment <= finish_ns)):
        running = {part for part, start, stop in spans if start <= begin and stop >= end}
        for part, runs in (
            ("compute", "compute" in running),
            ("busy", running),
            ("communication", "communication" in running),
            ("exposed", "communication" in running and "compute" not in running),
            ("memory", "memory" in running),
            ("exposed_memory", running == {"memory"}),
        ):
            lasted[part] += (end - begin) if runs else 0
    return Parts(
        span_ns=finish_ns - begin_ns,
        compute_ns=lasted["compute"],
        non_compute_ns=lasted["busy"] - lasted["compute"],
        idle_ns=finish_ns - begin_ns - lasted["busy"],
        communication_ns=lasted["communication"],
        exposed_communication_ns=lasted["exposed"],
        overlapped_communication_ns=lasted["communication"] - lasted["exposed"],
        memory_ns=lasted["memory"],
        exposed_memory_ns=lasted["exposed_memory"],
    )


def of(parts: Parts) -> Parts:
    return Parts(**{field: getattr(parts, field) for field in Parts.__dataclass_fields__})


@given(SOME_WORK, st.lists(st.integers(0, 20_000_000), max_size=4, unique=True), st.sampled_from(BEGINNINGS_NS))
def test_a_breakdown_equals_an_event_sweep_to_the_nanosecond(work: list[Work], steps: list[int], first_ns: int) -> None:
    trace = read_trace(written(work, sorted(steps), first_ns))
    found = break_down(trace)
    real = [one for one in work if one.part]
    if found is None:
        assert not real
        return
    offset = first_ns - trace.base_ns
    begin = min(one.start_ns for one in real)
    finish = max(one.start_ns + one.duration_ns for one in real)
    assert (found.start_ns - offset, found.end_ns - offset) == (begin, finish)
    assert of(found) == swept(work, begin, finish)
    for step in found.steps:
        assert of(step) == swept(work, step.start_ns - offset, step.end_ns - offset)
    assert sum(step.span_ns for step in found.steps) + found.outside_steps_ns == found.span_ns or not found.steps
    idle = split_idle(trace, found)
    for parts, reasons in ((found, idle), *zip(found.steps, idle.steps, strict=True)):
        split = [getattr(reasons, f"{name}_ns") for name in ("host_bound", "input", "synchronisation", "other")]
        assert sum(split) + reasons.communication_ns == parts.idle_ns


@pytest.mark.parametrize("name", ["nccl_world1_3steps", "gloo_2ranks_rank0"])
def test_a_real_traces_breakdown_equals_an_event_sweep(name: str) -> None:
    path = H200 / f"{name}.json.gz"
    parts = {"kernel": "compute", "gpu_memcpy": "memory", "gpu_memset": "compute"}
    work = [
        Work(
            event["cat"],
            event["name"],
            "communication" if "nccl" in event["name"] else parts[event["cat"]],
            7,
            round(event["ts"] * 1000),
            round(event["dur"] * 1000),
            launched=False,
        )
        for event in load(path)["traceEvents"]
        if event.get("cat") in parts
    ]
    begin, finish = min(one.start_ns for one in work), max(one.start_ns + one.duration_ns for one in work)
    expected = swept(work, begin, finish)
    found = break_down(read_trace(path.read_bytes()))
    assert found is not None
    for field in ("span_ns", "compute_ns", "idle_ns", "memory_ns", "exposed_memory_ns", "non_compute_ns"):
        assert getattr(found, field) == getattr(expected, field), field


# How the figures of TraceLens (*.gpu_timeline.csv) are called here. A memory set is computation for both.
REFERENCES: dict[str, Callable[[dict[str, float]], float]] = {
    "computation_time": lambda rank: rank["compute_us"],
    "exposed_comm_time": lambda rank: rank["exposed_communication_us"],
    "exposed_memcpy_time": lambda rank: rank["exposed_memory_copy_us"],
    "busy_time": lambda rank: rank["span_us"] - rank["idle_us"],
    "idle_time": lambda rank: rank["idle_us"],
    "total_time": lambda rank: rank["span_us"],
    "total_comm_time": lambda rank: rank["communication_us"],
    "total_memcpy_time": lambda rank: rank["memory_copy_us"],
}


@pytest.mark.parametrize("device", ["h100", "mi300", "mi210"])
def test_every_figure_agrees_with_an_independent_tool_s(device: str, capfd: pytest.CaptureFixture[str]) -> None:
    (trace,) = shared("tracelens").glob(f"{device}_*.json.gz")
    with trace.with_name(trace.name.replace(".json.gz", ".gpu_timeline.csv")).open(newline="") as file:
        expected_ms = {row["type"]: float(row["time ms"]) for row in csv.DictReader(file)}
    assert main(["analyze", "trace", str(trace), "--json"]) == 0
    (rank,) = json.loads(capfd.readouterr().out)["ranks"]
    assert set(REFERENCES) == set(expected_ms)
    for name, figure in REFERENCES.items():
        # The reference adds floats of µs since the machine's start, which are 0.0005 µs apart.
        assert figure(rank) / 1000 == pytest.approx(expected_ms[name], rel=0.0005, abs=1e-6), name
    assert rank["compute_us"] + rank["exposed_communication_us"] + rank["exposed_memory_copy_us"] + rank[
        "idle_us"
    ] == pytest.approx(rank["span_us"], abs=1e-6)
