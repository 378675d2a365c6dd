from __future__ import annotations

import pytest

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.communication.parallelism_costs import measure_bubble, one_forward_one_backward_ratio
from rankscope.analysis.traces.trace import Category, Trace
from tests.unit.analysis.traces.trace_builder import Event, make_trace


@pytest.mark.parametrize(("stages", "microbatches", "ratio"), [(1, 8, 0.0), (4, 1, 0.75), (4, 8, 3 / 11)])
def test_knows_what_a_balanced_pipeline_cannot_avoid(stages: int, microbatches: int, ratio: float) -> None:
    assert one_forward_one_backward_ratio(stages, microbatches) == pytest.approx(ratio)


def pipeline_trace(wait_us: float, description: str = "pipeline_parallel", peer: int = 2) -> Trace:
    """A last stage: it waits for each micro-batch, computes, and sends the gradient back."""
    events: list[Event] = []
    group = {"group": "5", "group_description": description, "group_size": 4, "peer": peer, "stream": 20}
    clock = 0.0
    for step in range(2):
        begun = clock
        for _ in range(8):
            recv, send = {**group, "collective": "recv"}, {**group, "collective": "send"}
            events.append(("ncclDevKernel_SendRecv(args)", Category.KERNEL, clock, wait_us, recv))
            events.append(("gemm", Category.KERNEL, clock + wait_us, 90))
            # Hidden behind the next computation's tail: not a bubble.
            events.append(("ncclDevKernel_SendRecv(args)", Category.KERNEL, clock + wait_us + 80, 10, send))
            clock += wait_us + 90
        events.append((f"ProfilerStep#{step}", Category.USER_ANNOTATION, begun, clock - begun))
    return make_trace(events)


def test_measures_waiting_for_neighbours_and_what_the_schedule_costs() -> None:
    trace = pipeline_trace(wait_us=110)
    bubble = measure_bubble(trace, find_collectives(trace))
    assert bubble is not None
    assert bubble.measured_ratio == pytest.approx(0.55)
    assert (bubble.stages, bubble.microbatches) == (4, 8)
    assert bubble.theoretical_ratio == pytest.approx(3 / 11)


def test_a_neighbour_of_any_number_costs_no_memory() -> None:
    trace = pipeline_trace(wait_us=110, peer=1 << 50)
    bubble = measure_bubble(trace, find_collectives(trace))
    assert bubble is not None and (bubble.stages, bubble.microbatches) == (4, 8)


def test_gives_no_theoretical_bubble_for_an_unknown_stage_count() -> None:
    trace = pipeline_trace(wait_us=10, description="mystery")
    bubble = measure_bubble(trace, find_collectives(trace))
    assert bubble is not None and bubble.measured_ratio == pytest.approx(0.1)
    assert bubble.stages is None and bubble.theoretical_ratio is None
    told = measure_bubble(trace, find_collectives(trace), stages=2, microbatches=8)
    assert told is not None and told.theoretical_ratio == pytest.approx(1 / 9)


def test_sees_no_pipeline_where_nothing_is_sent_to_a_neighbour() -> None:
    trace = make_trace([("ProfilerStep#1", Category.USER_ANNOTATION, 0, 50), ("gemm", Category.KERNEL, 0, 5)])
    assert measure_bubble(trace, find_collectives(trace)) is None
