"""Longer and slower variants of captures: their steps repeated, and the work of a rank lengthened by a replay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.stats.robust import Ints, join_rows, take_rows
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import Join, join_traces
from rankscope.analysis.traces.joins.operations import operations_in_steps
from rankscope.analysis.traces.joins.self_time import find_common_steps
from rankscope.analysis.traces.steps import NO_STEP, find_steps, step_of_rows
from rankscope.analysis.traces.trace import Trace

Traces = Mapping[int, Trace]
_MARK = re.compile(r"ProfilerStep#(\d+)")


def join_all(traces: Traces) -> Join:
    return join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})


def repeated(traces: Traces, times: int) -> Traces:
    """Return the whole steps so many times, one after the other, on all ranks alike. Marks are numbered on."""
    chosen = {rank: np.flatnonzero(step_of_rows(trace, find_steps(trace)) != NO_STEP) for rank, trace in traces.items()}
    begin = min(int(trace.start_ns[chosen[rank]].min()) + trace.base_ns for rank, trace in traces.items())
    end = max(int(trace.end_ns[chosen[rank]].max()) + trace.base_ns for rank, trace in traces.items())
    return {rank: _repeated(trace, chosen[rank], times, end - begin) for rank, trace in traces.items()}


def _repeated(trace: Trace, rows: Ints, times: int, period_ns: int) -> Trace:
    steps, names, parts = len(find_steps(trace)), list(trace.names), []
    largest = 1 + int(max(trace.correlation.max(), trace.external_id.max()))
    for number in range(times):
        renamed = np.arange(len(trace.names))
        for place, name in enumerate(trace.names):
            if number and (mark := _MARK.fullmatch(name)):
                renamed[place] = len(names)
                names.append(f"ProfilerStep#{int(mark[1]) + number * steps}")
        part = take_rows(trace, rows)
        ids = {
            name: np.where(getattr(part, name) >= 0, getattr(part, name) + number * largest, -1)
            for name in ("correlation", "external_id")
        }
        parts.append(replace(part, start_ns=part.start_ns + number * period_ns, name=renamed[part.name], **ids))
    joined = join_rows(parts)
    order = np.lexsort((-joined.duration_ns, joined.start_ns))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    notes = take_rows(trace.collectives, np.isin(trace.collectives.row, rows))
    places = np.searchsorted(rows, notes.row)
    copies = [replace(notes, row=place[places + number * len(rows)]) for number in range(times)]
    noted = join_rows(copies)
    return replace(
        take_rows(joined, order),
        names=tuple(names),
        collectives=take_rows(noted, np.argsort(noted.row)),
        memory=take_rows(trace.memory, slice(0)),
        flows=take_rows(trace.flows, slice(0)),
        operators=take_rows(trace.operators, slice(0)),
    )


def slowed(traces: Traces, rank: int, factor: float) -> Traces:
    """Return the traces as if the rank's own work before each operation took longer by the factor: what a replay says
    of all ranks, and everything between two operations stretched with them."""
    join = join_all(traces)
    collectives = {number: find_collectives(trace) for number, trace in traces.items()}
    breakdowns = {number: break_down(trace) for number, trace in traces.items()}
    steps = find_common_steps(traces, breakdowns, np.array(sorted(traces)), join.clocks)
    graph = StepGraph.build(operations_in_steps(traces, collectives, join.matched, join.clocks, steps))
    operations = graph.operations
    own = np.where(operations.rank == rank, factor, 1.0) * graph.own_ns
    stops = graph.replay(own.astype(np.int64)[:, None])[:, 0]
    starts = np.where(graph.before >= 0, stops[graph.before] + own.astype(np.int64), operations.start_ns)
    result = {}
    for number, trace in traces.items():
        mine = operations.rank == number
        old = np.concatenate([operations.start_ns[mine], operations.stop_ns[mine]])
        new = np.concatenate([starts[mine], stops[mine]])
        order = np.lexsort((new, old))
        old, new = old[order], np.maximum.accumulate(new[order])
        shift = join.clocks.shifts[number].offset_ns + trace.base_ns
        result[number] = _warped(trace, old - shift, new - shift)
    return result


def _warped(trace: Trace, old: Ints, new: Ints) -> Trace:
    start, end = (_moved(times, old, new) for times in (trace.start_ns, trace.end_ns))
    order = np.lexsort((start - end, start))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    moved = take_rows(replace(trace, start_ns=start, duration_ns=end - start), order)
    noted = replace(trace.collectives, row=place[trace.collectives.row])
    return replace(moved, collectives=take_rows(noted, np.argsort(noted.row)))


def _moved(times: Ints, old: Ints, new: Ints) -> Ints:
    between = np.interp(times.astype(np.float64), old.astype(np.float64), new.astype(np.float64))
    before, after = times < old[0], times > old[-1]
    moved = np.where(before, times + new[0] - old[0], np.where(after, times + new[-1] - old[-1], np.rint(between)))
    return moved.astype(np.int64)
