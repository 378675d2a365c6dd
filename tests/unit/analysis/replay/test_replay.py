"""Is a replay as long as what was recorded, and does it follow what waits for what?"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.replay.graph import MAX_QUEUE, MAX_STEPS, Graph, ReplayError, build_graph
from rankscope.analysis.replay.job import build_graphs, recorded_step_ns, replayed_step_ns
from rankscope.analysis.replay.replay import replay
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Category, Trace
from tests.shared_data import H200, shared
from tests.unit.analysis.replay.made_steps import BETWEEN_US, LATENCY_US, Machine, device_bound, launch_bound, launching
from tests.unit.analysis.traces.trace_builder import make_trace

STRAGGLER = [f"ddp_straggler_rank{rank}.json.gz" for rank in range(4)]


def graphs_of(*paths: Path) -> dict[int, Graph]:
    return build_graphs({number: read_trace(path.read_bytes()) for number, path in enumerate(paths)})


def error_of(graphs: dict[int, Graph]) -> float:
    return replayed_step_ns(graphs) / recorded_step_ns(graphs) - 1


def with_kernels(graph: Graph, factor: float) -> Graph:
    return replace(graph, duration_ns=(factor * graph.duration_ns).astype(np.int64))


@pytest.mark.parametrize("name", ["launch_bound.json.gz", "gloo_2ranks_rank0.json.gz", *STRAGGLER])
def test_steps_recorded_on_a_gpu_are_replayed(name: str) -> None:
    assert abs(error_of(graphs_of(H200 / name))) < 0.01


@pytest.mark.parametrize(
    "name",
    [
        "hta_pair/rank-0.json.gz",
        "tracelens/h100_Falconsai_nsfw_image_detection__1016002.json.gz",
        "tracelens/mi210_gpu_only_trace_gpu_only_trace.json.gz",
        "tracelens/mi300_gaunernst_bert-small-uncased__1016001.json.gz",
    ],
)
def test_traces_of_other_tools_are_replayed(name: str) -> None:
    assert abs(error_of(graphs_of(shared(name)))) < 0.01


def test_ranks_meet_in_their_collectives() -> None:
    graphs = graphs_of(*(H200 / name for name in STRAGGLER))
    assert {int((graph.collective >= 0).sum()) for graph in graphs.values()} == {10}
    assert abs(error_of(graphs)) < 0.01
    # What rank 2 no longer does, all ranks gain.
    quick = {**graphs, 2: graphs[1]}
    assert replayed_step_ns(quick) < 0.8 * replayed_step_ns(graphs)


def test_a_host_that_launches_too_late_sets_the_pace() -> None:
    graph = build_graph(launch_bound())
    assert replayed_step_ns({0: graph}) == pytest.approx(2.5e6, rel=0.001)
    assert replayed_step_ns({0: with_kernels(graph, 2.0)}) == pytest.approx(2.5e6, rel=0.001)
    quick = replace(graph, gap_ns=graph.gap_ns // 2)
    assert replayed_step_ns({0: quick}) == pytest.approx(50 * 27e3, rel=0.01)


def test_a_busy_device_sets_the_pace() -> None:
    graph = build_graph(device_bound())
    assert replayed_step_ns({0: graph}) == pytest.approx(5e6, rel=0.001)
    assert replayed_step_ns({0: with_kernels(graph, 2.0)}) == pytest.approx(50 * 198.5e3, rel=0.001)
    assert replayed_step_ns({0: replace(graph, gap_ns=graph.gap_ns * 2)}) == pytest.approx(5e6, rel=0.001)


def test_a_full_queue_blocks_the_host_in_both() -> None:
    trace = device_bound(steps=60, queue_limit=MAX_QUEUE)
    graph = build_graph(trace)
    times = replay({0: graph})[0]
    assert (graph.own_ns < 10_000).all()  # blocking is not the host's own time
    assert times.call_end_ns[-1] == pytest.approx(graph.call_end_ns[-1], rel=0.001)
    assert error_of({0: graph}) == pytest.approx(0.0, abs=0.001)


def test_a_host_that_synchronises_waits_for_the_device() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.work(20.0)
        machine.launch("gemm", 1000.0)
        machine.synchronize()
        machine.work(500.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    graph = build_graph(machine.trace())
    assert error_of({0: graph}) == pytest.approx(0.0, abs=0.001)
    longer = replayed_step_ns({0: with_kernels(graph, 2.0)}) - replayed_step_ns({0: graph})
    assert longer == pytest.approx(1e6, rel=0.001)


def overlapping_streams(event_calls: bool) -> Machine:
    """Communication of 400 µs beside 300 µs of computation, after which the optimizer waits for it."""
    machine = Machine()
    for step in range(4):
        began = machine.now
        backward = machine.launch("gemm", 100.0)
        machine.let_stream_wait() if event_calls else machine.work(1.0)
        reduced = machine.launch("ncclDevKernel_AllReduce_Sum_f32", 400.0, stream=16, after=backward)
        machine.launch("gemm", 300.0)
        machine.let_stream_wait() if event_calls else machine.work(1.0)
        machine.launch("adam", 50.0, after=reduced)
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine


@pytest.mark.parametrize("event_calls", [True, False], ids=["with event calls", "without event calls"])
def test_streams_wait_for_each_other(event_calls: bool) -> None:
    graph = build_graph(overlapping_streams(event_calls).trace())
    assert error_of({0: graph}) == pytest.approx(0.0, abs=0.002)
    communication = graph.stream == graph.stream[1]
    half = replace(graph, duration_ns=np.where(communication, graph.duration_ns // 2, graph.duration_ns))
    # 300 µs of computation now hide the 200 µs of communication.
    assert replayed_step_ns({0: half}) == pytest.approx((100 + 300 + 50 + 3 * 1.5) * 1e3, rel=0.01)


def test_ranks_in_different_orders_are_refused() -> None:
    graphs = {rank: build_graph(overlapping_streams(True).trace()) for rank in (0, 1)}
    for rank, numbers in ((0, [0, 1, 2, 3]), (1, [1, 0, 2, 3])):
        collective = np.full(len(graphs[rank].launch), -1)
        collective[graphs[rank].stream == graphs[rank].stream[1]] = numbers
        graphs[rank] = replace(graphs[rank], collective=collective)
    with pytest.raises(ReplayError, match="different orders"):
        replay(graphs)


def test_calls_at_the_same_time_launch_their_own_work() -> None:
    """Two threads: the later row launches the kernel that starts first."""
    events = [
        ("ProfilerStep#0", Category.USER_ANNOTATION, 0.0, 100.0),
        ("cudaLaunchKernel", Category.RUNTIME, 10.0, 5.0, {"correlation": 1}),
        ("cudaLaunchKernel", Category.RUNTIME, 10.0, 4.0, {"correlation": 2, "thread": 2}),
        ("first", Category.KERNEL, 16.0, 20.0, {"correlation": 2, "stream": 8}),
        ("second", Category.KERNEL, 17.0, 20.0, {"correlation": 1}),
    ]
    graph = build_graph(make_trace(events))
    assert graph.launch.tolist() == [0, 1]
    assert (replay({0: graph})[0].work_end_ns > 0).all()


def reducing(rank: int, own_us: float, ends: list[float]) -> tuple[Trace, list[float]]:
    """Four steps with one collective each, of 100 µs, or until its peer's ends; and when they end."""
    machine, reached = Machine(rank=rank), []
    for step in range(4):
        began = machine.now
        machine.work(own_us)
        pair = {"group": f"tp{rank // 2}", "group_size": 2, "collective": "allreduce", "sequence": step}
        enters = max(machine.now + LATENCY_US, machine.stream_end.get(16, 0.0) + BETWEEN_US)
        lasts = ends[step] - enters if ends else 100.0
        machine.launch("ncclDevKernel_AllReduce_Sum_f32", lasts, stream=16, **pair)
        machine.annotate(f"ProfilerStep#{step}", began)
        reached.append(machine.stream_end[16])
    return machine.trace(), reached


def test_ranks_meet_in_the_groups_they_share() -> None:
    """Four ranks in two groups of two: the slow one holds up its group only."""
    traces = {rank: reducing(rank, 500.0, [])[0] for rank in (0, 1)}
    traces[3], ends = reducing(3, 2000.0, [])
    traces[2], _ = reducing(2, 500.0, ends)
    graphs = build_graphs(traces)
    assert {int((graph.collective >= 0).sum()) for graph in graphs.values()} == {4}
    end = {rank: int(times.work_end_ns[-1]) for rank, times in replay(graphs).items()}
    assert end[0] == end[1] < 0.5 * end[3]
    assert end[2] == pytest.approx(end[3], rel=0.001)
    quick = {rank: int(times.work_end_ns[-1]) for rank, times in replay({**graphs, 3: graphs[2]}).items()}
    assert quick[2] < 0.5 * end[2]


def test_clocks_of_ranks_are_aligned() -> None:
    """The same job, with one rank on a node whose clock is an hour ahead and whose trace begins another second."""
    traces = {rank: read_trace((H200 / name).read_bytes()) for rank, name in enumerate(STRAGGLER)}
    step = replayed_step_ns(build_graphs(traces))
    ahead, second = 3600 * 10**9, 10**9
    moved = replace(traces[1], base_ns=traces[1].base_ns + ahead - second, start_ns=traces[1].start_ns + second)
    assert replayed_step_ns(build_graphs({**traces, 1: moved})) == pytest.approx(step, rel=0.001)


def test_a_trace_that_was_cut_is_refused() -> None:
    with pytest.raises(ReplayError, match="no step was recorded as a whole"):
        graphs_of(H200 / "nccl_world1_3steps.json.gz")


def test_of_many_steps_the_first_are_replayed() -> None:
    long, short = (build_graph(launching(46.0, 10.0, steps=steps)) for steps in (3 * MAX_STEPS, MAX_STEPS))
    assert len(long.launch) == len(short.launch) and len(long.gap_ns) == len(short.gap_ns)
    assert replayed_step_ns({0: long}) == replayed_step_ns({0: short})


def test_a_step_without_calls_is_refused() -> None:
    """The only call that launches recorded work is outside of it."""
    events = [
        ("cudaLaunchKernel", Category.RUNTIME, 6.0, 5.0, {"correlation": 1}),
        ("gemm", Category.KERNEL, 20.0, 10.0, {"correlation": 1}),
        ("ProfilerStep#0", Category.USER_ANNOTATION, 1790.0, 399.0),
        ("cudaLaunchKernel", Category.RUNTIME, 1800.0, 5.0, {"correlation": 2}),
    ]
    with pytest.raises(ReplayError, match="no step was recorded as a whole"):
        build_graph(make_trace(events))


def test_a_full_queue_in_a_cut_trace_is_waiting() -> None:
    """A capture is cut to whole steps: kernels that were launched before are not in it."""
    whole = json.loads(gzip.decompress((H200 / "matrix_bound.json.gz").read_bytes()))
    events = whole["traceEvents"]
    calls = {one["args"]["correlation"] for one in events if one.get("cat") in ("cuda_runtime", "cuda_driver")}
    cut = [
        one
        for one in events
        if one.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or one["args"]["correlation"] in calls
    ]
    assert len(cut) < len(events)
    graphs = [build_graph(read_trace(json.dumps({**whole, "traceEvents": one}).encode())) for one in (events, cut)]
    full, rest = (int((graph.gap_ns + graph.own_ns).sum()) for graph in graphs)
    assert rest == pytest.approx(full, rel=0.1)
