"""Time by the program's annotations."""

from __future__ import annotations

import json

import pytest

from rankscope.analysis.traces.ranges import MAX_NAME_CHARACTERS, MAX_RANGES, summarize_ranges
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary_records import RangeSummary
from tests.shared_data import shared
from tests.unit.analysis.traces.test_kernel_stacks import AUTOGRAD, ENGINE, FORWARD, Event, flow, kernel, launch, span


def ranges_of(events: list[Event]) -> dict[str, RangeSummary]:
    found = summarize_ranges(read_trace(json.dumps({"traceEvents": events}).encode()))
    assert list(found) == sorted(found, key=lambda one: -one.share_ratio)
    return {one.name: one for one in found}


def step(number: int) -> list[Event]:
    """A model of two layers; the second is annotated inside the model. 1000 µs."""
    at, tie = 1000 * number, 10 * number

    def work(name: str, start: float, thread: int, correlation: int, long: float) -> list[Event]:
        made = [span(name, "cpu_op", at + start, 10, thread), launch(at + start + 1, tie + correlation, thread)]
        return [*made, kernel(name, at + start + 5, long, tie + correlation)]

    return [
        span(f"ProfilerStep#{number}", "user_annotation", at, 999),
        span("model", "user_annotation", at + 10, 200),
        *work("aten::addmm", 20, FORWARD, 1, 30),
        span("layer 2", "user_annotation", at + 100, 50),
        *work("aten::relu", 110, FORWARD, 2, 4),
        span(ENGINE, "cpu_op", at + 400, 30, AUTOGRAD),
        *work("AddmmBackward0", 405, AUTOGRAD, 3, 50),
        *flow(number, at + 20, at + 405),
        span("Optimizer.step#AdamW.step", "user_annotation", at + 600, 200),
        *work("aten::_foreach_add_", 610, FORWARD, 5, 16),
    ]


def test_a_range_has_its_backward_and_not_the_ranges_inside() -> None:
    found = ranges_of([event for number in (1, 2, 3) for event in step(number)])
    assert set(found) == {"model", "layer 2"}, "those of torch are left out"
    model, layer = found["model"], found["layer 2"]
    assert (model.count, model.host_us, model.device_us) == pytest.approx((1, 150, 80))
    assert (layer.count, layer.host_us, layer.device_us) == pytest.approx((1, 50, 4))
    assert model.share_ratio == pytest.approx(80 / 100) and layer.share_ratio == pytest.approx(4 / 100)


def test_without_a_device_shares_are_of_the_host() -> None:
    events = [
        span("outer", "user_annotation", 0, 100),
        span("inner", "user_annotation", 10, 30),
        span("inner", "user_annotation", 50, 30),
        span("aten::mm", "cpu_op", 15, 10),
    ]
    found = ranges_of(events)
    assert (found["outer"].host_us, found["inner"].host_us) == (40, 60)
    assert (found["inner"].count, found["inner"].share_ratio, found["inner"].device_us) == (2, 0.6, 0)


def test_the_number_and_names_of_ranges_are_bounded() -> None:
    events = [span(f"{number:05} " + "x" * 1000, "user_annotation", 10 * number, 5) for number in range(3 * MAX_RANGES)]
    found = ranges_of([*events, span("aten::mm", "cpu_op", 0, 1)])
    assert len(found) == MAX_RANGES
    assert max(map(len, found)) == MAX_NAME_CHARACTERS


def test_a_program_without_annotations_has_no_ranges() -> None:
    events = [event for event in step(1) if event["name"] not in ("model", "layer 2")]
    assert ranges_of(events) == {}


def test_a_real_trace_has_its_programs_phases() -> None:
    trace = read_trace(shared("hta_pair/rank-0.json.gz").read_bytes())
    found = {one.name: one for one in summarize_ranges(trace)}
    assert {"## forward ##", "## optimizer ##"} <= set(found)
    assert 0 < sum(one.share_ratio for one in found.values()) <= 1
