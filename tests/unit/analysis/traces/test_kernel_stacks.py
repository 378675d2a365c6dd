from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles.frames import KERNEL, NATIVE, PYTHON, Frame
from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.traces import kernel_stacks
from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.kernel_stacks import MAX_DEPTH, NAME_CHARACTERS, kernel_profile
from rankscope.analysis.traces.kernels import top_kernels
from rankscope.analysis.traces.reader.trace_file import read_trace
from tests.shared_data import H200, shared

FORWARD, AUTOGRAD = 1, 2
ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"
REAL = (
    "h200/nccl_world1_3steps",
    "h200/gloo_2ranks_rank0",
    "h200/gloo_2ranks_rank1",
    "hta_pair/rank-0",
    "hta_pair/rank-1",
    "tracelens/h100_Falconsai_nsfw_image_detection__1016002",
    "tracelens/mi300_gaunernst_bert-small-uncased__1016001",
    "tracelens/mi210_gpu_only_trace_gpu_only_trace",
)
Event: TypeAlias = dict[str, Any]
Tree: TypeAlias = tuple[str, list[Any]]  # a span with spans in it; a leaf has the durations of its kernels


def span(name: str, category: str, start: float, duration: float, thread: int = FORWARD, **arguments: Any) -> Event:
    place = {"ph": "X", "name": name, "cat": category, "pid": 9, "tid": thread, "ts": start, "dur": duration}
    return place | {"args": arguments}


def kernel(name: str, start: float, duration: float, correlation: int, category: str = "kernel") -> Event:
    return span(name, category, start, duration, 7, device=0, stream=7, correlation=correlation)


def launch(start: float, correlation: int, thread: int = FORWARD, name: str = "cudaLaunchKernel") -> Event:
    return span(name, "cuda_runtime", start, 1, thread, correlation=correlation)


def flow(number: int, forward: float, backward: float) -> list[Event]:
    common = {"cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 9}
    return [
        common | {"ph": "s", "tid": FORWARD, "ts": forward},
        common | {"ph": "f", "tid": AUTOGRAD, "ts": backward, "bp": "e"},
    ]


def profile_of(events: list[Event], rank: int = 0) -> Profile:
    text = json.dumps({"distributedInfo": {"rank": rank}, "traceEvents": events})
    return kernel_profile(read_trace(text.encode()))


def stacks(profile: Profile) -> dict[str, tuple[int, int]]:
    """Samples and nanoseconds by stack, outermost frame first."""
    return {" > ".join(map(str, one.stack[::-1])): (one.samples, one.nanos) for one in profile}


# A step of a model with one layer: its kernel, and one of its backward on autograd's thread.
STEP = [
    span("ProfilerStep#1", "user_annotation", 0, 100),
    span("train.py(12): step", "python_function", 1, 40),
    span("nn.Module: Linear_0", "python_function", 2, 30),
    span("<built-in function linear>", "python_function", 3, 20),
    span("aten::linear", "cpu_op", 4, 15),
    span("aten::addmm", "cpu_op", 5, 10),
    launch(6, 1),
    kernel("gemm", 50, 20, 1),
    span(ENGINE, "cpu_op", 60, 30, AUTOGRAD),
    span("AddmmBackward0", "cpu_op", 61, 20, AUTOGRAD),
    span("aten::mm", "cpu_op", 62, 10, AUTOGRAD),
    launch(63, 2, AUTOGRAD),
    kernel("gemm_backward", 80, 40.5, 2),
]
LINE = "step (train.py:12) > nn.Module: Linear_0 > <built-in function linear> > aten::linear > aten::addmm"


def test_a_kernel_is_under_its_launch_operators_and_python_frames() -> None:
    profile = profile_of(STEP, rank=3)
    assert stacks(profile) == {
        f"{LINE} > cudaLaunchKernel > gemm": (1, 20_000),
        f"{ENGINE} > AddmmBackward0 > aten::mm > cudaLaunchKernel > gemm_backward": (1, 40_500),
    }
    first = next(one for one in profile if str(one.stack[0]) == "gemm")
    assert [frame.kind for frame in first.stack] == [KERNEL, *[NATIVE] * 3, *[PYTHON] * 3]
    assert first.rank == 3 and first.stack[-1] == Frame("step", "train.py", 12)


def test_a_backward_kernel_is_under_its_flows_forward_line() -> None:
    found = stacks(profile_of([*STEP, *flow(5, 5, 61)]))
    assert f"{LINE} > {ENGINE} > AddmmBackward0 > aten::mm > cudaLaunchKernel > gemm_backward" in found


@pytest.mark.parametrize(
    "flows",
    [
        flow(5, 5, 61)[:1],
        flow(5, 5.5, 61),
        flow(5, 5, 61.5),
        [{**one, "id": number} for number, one in enumerate(flow(5, 5, 61))],
        [{**one, "id": "x", "ts": None} for one in flow(5, 5, 61)],
    ],
)
def test_half_a_flow_and_one_to_nowhere_are_ignored(flows: list[Event]) -> None:
    assert stacks(profile_of([*STEP, *flows])) == stacks(profile_of(STEP))


def test_a_flow_between_steps_of_the_profiler_is_ignored() -> None:
    steps = [span("ProfilerStep #1", "cpu_op", 0, 9), span("ProfilerStep #2", "cpu_op", 9, 9, AUTOGRAD)]
    assert stacks(profile_of([*steps, *flow(1, 0, 9), kernel("k", 5, 1, 1)])) == {"k": (1, 1_000)}


def test_the_communication_call_is_a_frame() -> None:
    events = [
        span("c10d::allreduce_", "cpu_op", 0, 30),
        span("record_param_comms", "cpu_op", 1, 25),
        span("nccl:all_reduce", "user_annotation", 2, 20),
        launch(3, 1, name="cudaLaunchKernelExC"),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 50, 1),
    ]
    (stack,) = stacks(profile_of(events))
    assert stack.split(" > ")[1:4] == ["record_param_comms", "nccl:all_reduce", "cudaLaunchKernelExC"]


def test_equal_stacks_of_steps_and_objects_are_merged() -> None:
    events: list[Event] = []
    for step in range(3):
        at = 100 * step
        events += [
            span(f"ProfilerStep#{step}", "user_annotation", at, 90),
            span(f"<built-in method conv2d of type object at 0x7f{step}>", "python_function", at + 1, 50),
            launch(at + 2, step, name="hipLaunchKernel"),
            kernel("conv", at + 5, 10, step),
        ]
    assert stacks(profile_of(events)) == {
        "<built-in method conv2d of type object> > hipLaunchKernel > conv": (3, 30_000)
    }


def test_copies_count_and_kernels_without_launch_have_no_callers() -> None:
    events = [
        launch(0, 1, name="cudaMemcpyAsync"),
        kernel("Memcpy HtoD", 5, 10, 1, "gpu_memcpy"),
        kernel("Memset", 20, 1, 77, "gpu_memset"),
        span("gloo:all_reduce", "user_annotation", 0, 90, 4),
    ]
    assert stacks(profile_of(events)) == {"cudaMemcpyAsync > Memcpy HtoD": (1, 10_000), "Memset": (1, 1_000)}


def test_a_trace_without_a_device_has_no_kernels() -> None:
    assert profile_of([span("aten::add", "cpu_op", 0, 1)]).samples_total == 0


def real(name: str) -> Path:
    folder, _, file = f"{name}.json.gz".partition("/")
    return H200 / file if folder == "h200" else shared(f"{folder}/{file}")


@pytest.mark.parametrize("name", REAL)
def test_a_real_traces_total_is_exactly_its_kernels_time(name: str) -> None:
    trace = read_trace(real(name).read_bytes())
    profile, listed, parts = kernel_profile(trace), top_kernels(trace, 1 << 20), break_down(trace)
    assert parts is not None
    assert profile.samples_total == sum(one.count for one in listed)
    assert profile.nanos_total == sum(round(1000 * one.total_us) for one in listed)
    # Time in which several kernels run counts once there, and once for each here.
    assert profile.nanos_total >= parts.span_ns - parts.idle_ns
    by_name = Counter[str]()
    for one in profile:
        assert one.stack[0].kind == KERNEL and one.stack[1].function.startswith(("cuda", "cu", "hip"))
        by_name[one.stack[0].function] += one.nanos
    assert sorted(by_name.values()) == sorted(round(1000 * one.total_us) for one in listed)


def test_real_backward_kernels_are_under_their_forward_operators() -> None:
    found = stacks(kernel_profile(read_trace((H200 / "nccl_world1_3steps.json.gz").read_bytes())))
    backward = {stack: value for stack, value in found.items() if "evaluate_function" in stack}
    linked = {stack for stack in backward if not stack.startswith("autograd::")}
    assert any("aten::linear > aten::addmm > autograd::engine::evaluate_function: AddmmB" in stack for stack in linked)
    assert all("AccumulateGrad" in stack for stack in backward.keys() - linked)


@pytest.mark.parametrize("name", [name for name in REAL if "100" in name or "mi300" in name])
def test_with_recorded_stacks_every_operator_is_under_a_python_line(name: str) -> None:
    profile = kernel_profile(read_trace(real(name).read_bytes()))
    for one in profile:
        kinds = [frame.kind for frame in one.stack]
        assert kinds == sorted(kinds, key=[KERNEL, NATIVE, PYTHON].index) and PYTHON in kinds
    assert any(frame.file.startswith("transformers/") and frame.line for frame in profile.frames)


# Hostile and random traces.

NAMES = st.sampled_from("abc")
LEAVES = st.lists(st.integers(1, 9), min_size=1, max_size=2)
TREES = st.recursive(
    st.tuples(NAMES, LEAVES), lambda inner: st.tuples(NAMES, st.lists(inner, min_size=1, max_size=3)), max_leaves=12
)


@given(st.lists(st.tuples(st.integers(1, 2), TREES), max_size=4))
def test_nested_spans_give_the_stacks_that_they_were_made_of(threads: list[tuple[int, Tree]]) -> None:
    events: list[Event] = []
    expected = Counter[tuple[str, ...]]()

    def grow(tree: Tree, thread: int, at: int, outer: tuple[str, ...]) -> int:
        name, inner = tree
        begin, at, path = at, at + 1, (*outer, name)
        for each in inner:
            if isinstance(each, int):
                events.append(launch(at, len(events), thread))
                events.append(kernel("k", 1000 + at, each, len(events) - 1))
                expected[(*path, "cudaLaunchKernel", "k")] += 1000 * each
                at += 2
            else:
                at = grow(each, thread, at, path)
        events.append(span(name, "cpu_op", begin, at - begin, thread))
        return at + 1

    at = 0
    for thread, tree in threads:
        at = grow(tree, thread, at, ())
    profile = profile_of(events)
    assert {tuple(map(str, one.stack[::-1])): one.nanos for one in profile} == dict(expected)


CATEGORIES = st.sampled_from(
    ["cpu_op", "python_function", "user_annotation", "cuda_runtime", "cuda_driver", "kernel", "fwdbwd"]
)
TIMES = st.integers(0, 12)


@given(st.lists(st.tuples(CATEGORIES, TIMES, TIMES, st.integers(0, 4), st.integers(1, 2)), max_size=40))
def test_spans_that_cross_and_numbers_that_repeat_lose_no_time(rows: list[tuple[str, int, int, int, int]]) -> None:
    events: list[Event] = []
    for category, start, duration, number, thread in rows:
        if category == "fwdbwd":
            ends = flow(number, start, duration)
            events += [one | {"tid": thread} for one in ends[: 1 + duration % 2]]
        else:
            name = ENGINE if number == 4 and category == "cpu_op" else f"{category} {number}"
            events.append(span(name, category, start, duration, thread, correlation=number))
    kernels = [row for row in rows if row[0] == "kernel"]
    profile = profile_of(events)
    assert profile.nanos_total == 1000 * sum(row[2] for row in kernels)
    assert profile.samples_total == len(kernels)
    assert all(one.stack[0].kind == KERNEL and len(one.stack) <= len(rows) + 1 for one in profile)


def test_a_stack_has_a_limited_depth_and_its_kernel() -> None:
    depth = 3000
    events = [span(f"f{level}", "cpu_op", level, 3 * depth - 2 * level) for level in range(depth)]
    profile = profile_of([*events, launch(depth, 1), kernel("k", 9, 5, 1)])
    (one,) = profile
    assert len(one.stack) == MAX_DEPTH
    assert [str(frame) for frame in one.stack[:2]] == ["k", f"f{MAX_DEPTH - 2}"] and str(one.stack[-1]) == "f0"


def test_beyond_the_frame_limit_the_longest_kernels_keep_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_stacks, "MAX_STACK_FRAMES", 7)
    events: list[Event] = []
    for number in range(6):
        at = 10 * number
        events += [span(f"op{number}", "cpu_op", at, 9), launch(at + 1, number), kernel("k", at, 1 + number, number)]
    assert stacks(profile_of(events)) == {
        "op5 > cudaLaunchKernel > k": (1, 6_000),
        "op4 > cudaLaunchKernel > k": (1, 5_000),
        "k": (4, 10_000),
    }


def test_long_names_are_cut_and_stay_different() -> None:
    long = "x" * (1 << 20)
    python = [f"{long}.py(3): {long}", f"{long}("]
    events = [span(name, "python_function", at, 50 - 2 * at) for at, name in enumerate(python)]
    for number in range(2):
        events += [launch(5 + number, number), kernel(f"{long}{number}{long}", 100, 1, number)]
    profile = profile_of(events)
    assert len(profile.stack_ends) == 2
    assert all(len(text) <= NAME_CHARACTERS for frame in profile.frames for text in (frame.function, frame.file))


def test_forged_durations_do_not_overflow() -> None:
    profile = profile_of([kernel("k", 0, 4e15, 1) for _ in range(5)])
    assert 0 < profile.nanos_total <= 1 << 62
