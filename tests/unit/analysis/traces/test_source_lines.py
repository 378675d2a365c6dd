"""Device time and memory by line and module: a made step, its memory, and hostile traces."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces.kernel_stacks import kernel_profile
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.source_lines import MAX_ROWS, summarize_lines
from rankscope.analysis.traces.summary_records import LinesSummary, LineSummary
from tests.shared_data import shared
from tests.unit.analysis.traces.test_kernel_stacks import AUTOGRAD, ENGINE, FORWARD, Event, flow, kernel, launch, span


def memory(start: float, change: int, total: int, address: int, thread: int = FORWARD) -> Event:
    noted = {"Device Type": 1, "Device Id": 0, "Bytes": change, "Total Allocated": total, "Addr": address}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 9, "tid": thread, "ts": start, "args": noted}


def step(number: int) -> list[Event]:
    """A Net with a Linear; its backward, the accumulation of a gradient, and the optimizer. 1000 µs each."""
    at, tie = 1000 * number, 10 * number

    def python(name: str, start: float, long: float) -> Event:
        return span(name, "python_function", at + start, long)

    def work(name: str, start: float, thread: int, correlation: int, long: float) -> list[Event]:
        made = [span(name, "cpu_op", at + start, 10, thread), launch(at + start + 1, tie + correlation, thread)]
        return [*made, kernel(name, at + start + 5, long, tie + correlation)]

    return [
        span(f"ProfilerStep#{number}", "user_annotation", at, 999),
        python("train.py(10): step", 1, 900),
        python("nn.Module: Net_0", 2, 250),
        python("model.py(5): forward", 3, 240),
        python("nn.Module: Linear_0", 10, 80),
        python("torch/nn/modules/linear.py(130): forward", 11, 70),
        python("typing.py(2154): cast", 12, 60),
        *work("aten::addmm", 20, FORWARD, 1, 30),
        *work("aten::relu", 110, FORWARD, 2, 4),
        span(ENGINE, "cpu_op", at + 400, 30, AUTOGRAD),
        *work("AddmmBackward0", 405, AUTOGRAD, 3, 50),
        *flow(number, at + 20, at + 405),
        span("autograd::engine::evaluate_function: AccumulateGrad", "cpu_op", at + 440, 20, AUTOGRAD),
        *work("aten::add_", 445, AUTOGRAD, 4, 6),
        span("Optimizer.step#AdamW.step", "user_annotation", at + 600, 200),
        python("torch/optim/adamw.py(200): step", 601, 190),
        *work("aten::_foreach_add_", 610, FORWARD, 5, 10),
        # The output of addmm lives until the backward pass, a temporary does not; a gradient is made there.
        memory(at + 21, 1000, 11_000, 64),
        memory(at + 111, 500, 11_500, 128),
        memory(at + 120, -500, 11_000, 128),
        memory(at + 406, 1200, 12_200, 128, AUTOGRAD),
        memory(at + 420, -1000, 11_200, 64, AUTOGRAD),
        memory(at + 500, -1200, 10_000, 128),
    ]


def lines_of(events: list[Event]) -> LinesSummary:
    found = summarize_lines(read_trace(json.dumps({"traceEvents": events}).encode()))
    assert found is not None
    return found


def row(found: LinesSummary, file: str, module: str) -> LineSummary:
    (one,) = [line for line in found.lines if (line.file, line.module) == (file, module)]
    return one


STEPS = [*step(0), *step(1)]


def test_work_belongs_to_the_innermost_line_of_the_program() -> None:
    found = lines_of(STEPS)
    linear = row(found, "model.py", "Linear")
    assert (linear.line, linear.function) == (5, "forward")
    assert (found.steps, found.total_us) == (2, pytest.approx(100))
    assert (linear.forward_us, linear.backward_us, linear.share_ratio) == (30, 50, pytest.approx(0.8))
    assert row(found, "model.py", "Net").forward_us == 4
    assert {line.file for line in found.lines} == {"train.py", "model.py"}


def test_backward_work_without_forward_is_of_the_running_line() -> None:
    calling = row(lines_of(STEPS), "train.py", "")
    assert (calling.forward_us, calling.backward_us, calling.optimizer_us) == (0, 6, 10)


def test_the_running_line_is_found_beside_many_backward_operators() -> None:
    """They belong to lines too, but the thread that runs them runs none."""
    many = [span(f"aten::view{number}", "cpu_op", 406 + number / 10, 0.05, AUTOGRAD) for number in range(80)]
    assert row(lines_of([*STEPS, *many]), "train.py", "").backward_us == 6


def test_kept_memory_lives_when_the_backward_pass_begins() -> None:
    found = lines_of(STEPS)
    assert row(found, "model.py", "Linear").kept_bytes == 1000
    assert row(found, "model.py", "Net").kept_bytes == 0


def test_memory_at_the_peak_is_of_its_lines() -> None:
    """The output of addmm, and the gradient that its backward has just made."""
    found = lines_of(STEPS)
    assert row(found, "model.py", "Linear").peak_bytes == 2200
    assert sum(line.peak_bytes or 0 for line in found.lines) == 2200


def test_a_module_has_what_is_inside_of_it() -> None:
    modules = {one.module: one for one in lines_of(STEPS).modules}
    assert (modules["Net_0"].forward_us, modules["Net_0"].backward_us, modules["Net_0"].kept_bytes) == (34, 50, 1000)
    assert (modules["Linear_0"].forward_us, modules["Linear_0"].share_ratio) == (30, pytest.approx(0.8))


def test_of_several_passes_in_a_step_the_largest_is_kept() -> None:
    """Gradient accumulation: the activations of two passes do not live at once."""
    second = [one | {"ts": one["ts"] + 500} for one in step(0) if one["ts"] < 500 and "Step" not in one["name"]]
    for one in second:
        if one["name"] == "[memory]":
            one["args"] = one["args"] | {"Bytes": 3 * one["args"]["Bytes"]}
    longer = [one for one in step(0) if "ProfilerStep" not in one["name"] and one["ts"] < 550]
    events = [span("ProfilerStep#0", "user_annotation", 0, 1200), *longer, *second]
    assert sum(line.kept_bytes or 0 for line in lines_of(events).lines) == 3000


def test_without_allocator_events_memory_is_not_known() -> None:
    found = lines_of([one for one in STEPS if one["name"] != "[memory]"])
    assert {(line.kept_bytes, line.peak_bytes) for line in found.lines} == {(None, None)}


def test_without_a_backward_pass_nothing_is_kept_for_it() -> None:
    found = lines_of([one for one in STEPS if not str(one["name"]).startswith("autograd")])
    linear = row(found, "model.py", "Linear")
    assert linear.kept_bytes is None and linear.peak_bytes == 2200


def test_a_cut_step_is_left_out() -> None:
    cut = [one for one in step(2) if one.get("cat") != "kernel"]
    assert lines_of([*STEPS, *cut]).total_us == pytest.approx(100)
    assert lines_of([*STEPS, *cut]).steps == 2


def test_without_steps_the_whole_trace_counts() -> None:
    found = lines_of([one for one in STEPS if "tep#" not in one["name"]])
    assert (found.steps, found.total_us) == (None, pytest.approx(200))


@pytest.mark.parametrize("category", ["python_function", "kernel"])
def test_without_stacks_or_device_there_are_no_lines(category: str) -> None:
    text = json.dumps({"traceEvents": [one for one in STEPS if one.get("cat") != category]})
    assert summarize_lines(read_trace(text.encode())) is None


@pytest.mark.parametrize("script", ["train.py", "test.py", "profile.py", "./train.py", "/home/me/train.py", "my/os.py"])
def test_scripts_are_lines_whatever_their_name(script: str) -> None:
    events = [one | {"name": one["name"].replace("train.py", script)} for one in STEPS]
    assert row(lines_of(events), script, "").optimizer_us == 10


@pytest.mark.parametrize(
    "library",
    ["torch/a.py", "typing.py", "logging/__init__.py", "<frozen os>", "/x/lib/python3.12/site-packages/torch/a.py"],
)
def test_libraries_are_no_lines(library: str) -> None:
    events = [one | {"name": one["name"].replace("model.py", library)} for one in STEPS]
    assert {line.file for line in lines_of(events).lines} == {"train.py"}


@pytest.mark.parametrize(
    "name", ["h100_Falconsai_nsfw_image_detection__1016002", "mi300_gaunernst_bert-small-uncased__1016001"]
)
def test_real_lines_share_all_device_time(name: str) -> None:
    trace = read_trace(shared(f"tracelens/{name}.json.gz").read_bytes())
    found = summarize_lines(trace)
    assert found is not None
    assert found.total_us * (found.steps or 1) == pytest.approx(kernel_profile(trace).nanos_total / 1000)
    assert sum(line.share_ratio for line in found.lines) == pytest.approx(1)
    assert all(line.file.startswith("transformers/") and line.module for line in found.lines)


# Hostile traces.

NAMES = st.sampled_from([ENGINE, "nn.Module: A_0", "nn.Module: B_1", "train.py(1): f", "Optimizer.step#x", "k", "]("])
CATEGORIES = st.sampled_from(["cpu_op", "python_function", "user_annotation", "cuda_runtime", "kernel", "memory"])
TIMES = st.integers(0, 12)


@given(st.lists(st.tuples(CATEGORIES, NAMES, TIMES, TIMES, st.integers(1, 3)), max_size=40), st.booleans())
def test_whatever_is_nested_the_shares_add_up(rows: list[tuple[Any, ...]], has_addresses: bool) -> None:
    events: list[Event] = [span("train.py(9): main", "python_function", 0, 50), kernel("k", 1, 1, 0)]
    for category, name, start, long, thread in rows:
        if category == "memory":
            size = 100 * (long - 5)
            events.append(memory(start, size, 1000 + size, thread if has_addresses else -1, thread))
        else:
            events.append(span(name, category, start, long, thread, correlation=long))
    found = lines_of(events)
    assert sum(line.share_ratio for line in found.lines) == pytest.approx(1)
    assert all(one.share_ratio >= 0 and math.isfinite(one.forward_us) for one in (*found.lines, *found.modules))
    assert all((line.kept_bytes or 0) >= 0 and (line.peak_bytes or 0) >= 0 for line in found.lines)


def test_many_lines_long_names_and_deep_modules_are_limited() -> None:
    events: list[Event] = []
    for number in range(2 * MAX_ROWS):
        at = 10 * number
        events += [span(f"f.py({number}): {'x' * 900}", "python_function", at, 9), launch(at + 1, number)]
        events.append(kernel("k", at, 1 + number, number))
    depth = 2000
    for level in range(depth):
        events.append(span(f"nn.Module: M_{level}", "python_function", 10**6 + level, 3 * depth - 2 * level))
    events += [launch(10**6 + depth, 10**6), kernel("k", 9, 5, 10**6)]
    found = lines_of(events)
    assert len(found.lines) == MAX_ROWS and len(found.modules) <= MAX_ROWS
    assert max(len(line.function) for line in found.lines) <= 200
