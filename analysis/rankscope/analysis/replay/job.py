"""The graphs of all ranks of a job, and the collectives in which they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.replay.graph import NOTHING, Graph, build_graph
from rankscope.analysis.replay.host_graph import build_host_graph
from rankscope.analysis.replay.replay import Times, replay, step_ns
from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.step_graph.clock_alignment import align
from rankscope.analysis.traces.breakdown import device_rows
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.joins.channels import Channel, gather_calls
from rankscope.analysis.traces.joins.collective_matching import Matched, match_calls
from rankscope.analysis.traces.joins.self_time import Arrivals, find_arrivals
from rankscope.analysis.traces.trace import Trace


def build_graphs(traces: Mapping[int, Trace]) -> dict[int, Graph]:
    """By rank, like the traces. Raises ReplayError."""
    graphs = {
        rank: build_graph(trace) if len(device_rows(trace)) else build_host_graph(trace)
        for rank, trace in traces.items()
    }
    if len(traces) < 2:
        return graphs
    collectives = {rank: find_collectives(trace) for rank, trace in traces.items()}
    matched = match_calls(gather_calls(traces, collectives))
    clocks = align(matched.ends, sorted(traces))
    joined = _joined(graphs, collectives, matched, find_arrivals(matched, clocks))
    origin = min(trace.base_ns for trace in traces.values())
    return {
        rank: _later(graph, traces[rank].base_ns - origin + clocks.shifts[rank].offset_ns)
        for rank, graph in joined.items()
    }


def _later(graph: Graph, shift_ns: int) -> Graph:
    """On the clock that the ranks share."""
    columns = ("call_start_ns", "call_end_ns", "start_ns")
    return replace(graph, **{name: getattr(graph, name) + shift_ns for name in columns})


def _joined(
    graphs: Mapping[int, Graph], collectives: Mapping[int, Collectives], matched: Matched, arrivals: Arrivals
) -> dict[int, Graph]:
    """With the collectives that were recorded, with their launches, on all of these ranks that are in the group."""
    calls, collective = matched.calls, matched.collective
    start, duration = arrivals.start_ns.copy(), calls.stop_ns - calls.start_ns
    position = np.full(len(calls), NOTHING)
    for rank, graph in graphs.items():
        mine = np.flatnonzero(calls.rank == rank)
        found = _positions(graph, collectives[rank], calls.row[mine])
        position[mine] = found
        if graph.on_host:
            # From the call until the host goes on, which is not what its event shows.
            known = found != NOTHING
            start[mine[known]] += graph.start_ns[found[known]] - collectives[rank].start_ns[calls.row[mine[known]]]
            duration[mine[known]] = graph.duration_ns[found[known]]
    latest = np.full(matched.count, np.iinfo(np.int64).min)
    np.maximum.at(latest, collective, start)
    transfer = np.maximum(start + duration - latest[collective], 0)
    members = np.array([_members(channel, graphs) for channel in matched.channels], dtype=np.int64)
    shared = np.bincount(collective, minlength=matched.count) == members[matched.channel]
    shared &= matched.together & arrivals.possible
    shared[collective[position == NOTHING]] = False
    made = {}
    for rank, graph in graphs.items():
        mine = np.flatnonzero((calls.rank == rank) & shared[collective])
        number, transfer_ns = graph.collective.copy(), graph.transfer_ns.copy()
        number[position[mine]], transfer_ns[position[mine]] = collective[mine], transfer[mine]
        made[rank] = replace(graph, collective=number, transfer_ns=transfer_ns)
    return made


def _members(channel: Channel, graphs: Mapping[int, Graph]) -> int:
    if channel.ranks:
        return len(set(channel.ranks) & set(graphs))
    return min(channel.size, len(graphs)) if channel.size > 0 else len(graphs)


def replayed_step_ns(graphs: Mapping[int, Graph], times: Mapping[int, Times] | None = None) -> float:
    """The median of the ranks, which step together. `times` are those of the replay, if it was made before."""
    times = replay(graphs) if times is None else times
    steps = [step_ns(graph, times[rank].call_end_ns, times[rank].work_end_ns) for rank, graph in graphs.items()]
    return float(np.median(steps))


def recorded_step_ns(graphs: Mapping[int, Graph]) -> float:
    ends = [(graph, graph.call_end_ns, graph.start_ns + graph.duration_ns) for graph in graphs.values()]
    return float(np.median([step_ns(*one) for one in ends]))


def _positions(graph: Graph, collectives: Collectives, rows: Ints) -> Ints:
    """The work of these collectives that was launched in the trace."""
    wanted = collectives.kernel_row[rows]
    if graph.on_host:
        wanted = np.where(collectives.measured[rows], collectives.call_row[rows], NOTHING)
    if not len(graph.work_row):
        return np.full(len(rows), NOTHING)
    order = np.argsort(graph.work_row, kind="stable")
    place = np.minimum(np.searchsorted(graph.work_row, wanted, sorter=order), len(order) - 1)
    found = order[place]
    is_known = (wanted >= 0) & (graph.work_row[found] == wanted) & (graph.launch[found] != NOTHING)
    return np.where(is_known, found, NOTHING)
