from __future__ import annotations

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.communication.parallelism_costs import Gathers, find_gathers
from rankscope.analysis.traces.trace import Category
from tests.unit.analysis.traces.trace_builder import Event, make_trace

KERNEL = Category.KERNEL
NOTED = {"group": "0", "group_size": 4, "element_type": "float", "stream": 20}
GATHER = {**NOTED, "collective": "_allgather_base", "in_elements": 100, "out_elements": 400}
SCATTER = {**NOTED, "collective": "_reduce_scatter_base", "in_elements": 400, "out_elements": 100}


def gathers_of(events: list[Event]) -> Gathers | None:
    trace = make_trace(events)
    return find_gathers(trace, find_collectives(trace))


def test_counts_gathers_per_step_with_bytes_exposure_and_prefetches() -> None:
    found = gathers_of(
        [
            ("ProfilerStep#7", Category.USER_ANNOTATION, 0, 1000),
            ("FSDP::all_gather", Category.CPU_OP, 0, 5),
            ("ncclDevKernel_AllGather_RING_LL(args)", KERNEL, 10, 100, GATHER),
            ("gemm", KERNEL, 110, 200),
            ("ncclDevKernel_AllGather_RING_LL(args)", KERNEL, 200, 150, GATHER),
            ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(args)", KERNEL, 400, 50, SCATTER),
        ]
    )
    assert found is not None and found.framework == "fsdp"
    gather, scatter = found.steps
    assert (gather.step, gather.kind, gather.count, gather.bytes) == (7, CollectiveKind.ALL_GATHER, 2, 3200)
    assert (gather.duration_ns, gather.exposed_ns) == (250_000, 140_000)
    assert 2 * gather.prefetched == gather.count
    assert (scatter.kind, scatter.bytes) == (CollectiveKind.REDUCE_SCATTER, 1600)
    assert scatter.exposed_ns == scatter.duration_ns


def test_gives_no_size_or_framework_that_the_trace_lacks() -> None:
    unsized = {**GATHER, "in_elements": -1, "out_elements": -1}
    found = gathers_of(
        [
            ("ncclDevKernel_AllGather_RING_LL(args)", KERNEL, 10, 100, GATHER),
            ("ncclDevKernel_AllGather_RING_LL(args)", KERNEL, 200, 150, unsized),
        ]
    )
    assert found is not None and found.framework == ""
    assert found.steps[0].step is None and found.steps[0].bytes is None


def test_finds_none_where_only_gradients_are_reduced() -> None:
    note = {**NOTED, "collective": "allreduce"}
    assert gathers_of([("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", KERNEL, 10, 100, note)]) is None
