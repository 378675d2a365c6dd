from __future__ import annotations

import pytest

from rankscope.analysis.step_graph.window_parts import one_forward_one_backward_ratio
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.communication.parallelism_costs import measure_bubble
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
    assert (bubble.stages, bubble.microbatches, bubble.chunks) == (4, 8, 1)
    assert bubble.theoretical_ratio == pytest.approx(3 / 11)


def test_the_ends_of_an_interleaved_pipeline_show_its_chunks() -> None:
    """The last of four stages sends every gradient of two chunks back, and the first chunk's activations to stage 0."""
    events: list[Event] = []
    for step in range(2):
        begun = 1000.0 * step
        for place in range(16):
            note = {"group": "5", "group_description": "pp", "group_size": 4, "stream": 20}
            at = begun + 60 * place
            to_previous = {**note, "collective": "send", "peer": 2}
            events.append(("ncclDevKernel_SendRecv(args)", Category.KERNEL, at, 10, to_previous))
            if place % 2:
                to_first = {**note, "collective": "send", "peer": 0}
                events.append(("ncclDevKernel_SendRecv(args)", Category.KERNEL, at + 20, 10, to_first))
        events.append((f"ProfilerStep#{step}", Category.USER_ANNOTATION, begun, 1000))
    trace = make_trace(events, rank=3)
    bubble = measure_bubble(trace, find_collectives(trace))
    assert bubble is not None and (bubble.microbatches, bubble.chunks) == (8, 2)
    assert bubble.theoretical_ratio == pytest.approx(3 / 19)


def test_an_exchange_of_tokens_is_no_bubble() -> None:
    note = {"group": "5", "group_description": "mesh_ep", "group_size": 4, "stream": 20}
    kernels: list[Event] = [
        ("ncclDevKernel_SendRecv(args)", Category.KERNEL, 10.0 * place, 5, note) for place in range(8)
    ]
    trace = make_trace([("ProfilerStep#0", Category.USER_ANNOTATION, 0, 100), *kernels])
    assert measure_bubble(trace, find_collectives(trace)) is None


def test_batched_messages_belong_to_the_group_of_their_calls() -> None:
    """torch names the group in the calls of a batch, and launches their kernel from a call without one."""
    pipeline = {"group": "5", "group_description": "PIPELINE_MODEL_PARALLEL_GROUP", "group_size": 2, "peer": 1}
    events: list[Event] = [("ProfilerStep#0", Category.USER_ANNOTATION, 0, 1000)]
    for number in range(2):
        at = 100.0 * number
        events += [
            ("record_param_comms", Category.CPU_OP, at + 1, 2, {**pipeline, "collective": "send"}),
            ("record_param_comms", Category.CPU_OP, at + 4, 2, {**pipeline, "collective": "recv"}),
            ("nccl:coalesced", Category.USER_ANNOTATION, at + 10, 20),
            ("cudaLaunchKernelExC", Category.RUNTIME, at + 15, 4, {"correlation": number}),
            ("ncclDevKernel_SendRecv(args)", Category.KERNEL, at + 30, 40, {"stream": 32, "correlation": number}),
        ]
    trace = make_trace(events)
    collectives = find_collectives(trace)
    (group,) = {int(group) for group in collectives.group[collectives.measured]}
    assert collectives.groups[group].name == "5"
    assert collectives.between_stages.all() and collectives.measured.sum() == 2
    assert set(collectives.peer.tolist()) == {1}
    bubble = measure_bubble(trace, collectives)
    assert bubble is not None and (bubble.stages, bubble.microbatches) == (2, 2)


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
