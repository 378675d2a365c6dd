"""The graph of a rank that computes on the CPU: its host, and the transfers that threads of gloo or MPI make for it.

Calls are the operators that start a collective, the waits for it, and the borders of steps. Everything else that the
host does is time between them. Work is the transfers; the threads that make them are the streams. A wait has no event
of its own: the host does nothing while a transfer that it started runs, and goes on when that has ended. Only what the
process computes on all of its threads is looked at, so a thread that computes hides the wait of another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import annotated_backend, kind_of_host_operator
from rankscope.analysis.replay.graph import (
    MAX_SPAN_NS,
    MAX_STREAMS,
    NOTHING,
    Graph,
    Latencies,
    ReplayError,
    overlap_ns,
    spans_of,
    whole_trace,
)
from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.breakdown import occupy_host
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.idle_time import INPUT
from rankscope.analysis.traces.intervals import Intervals, Spans, contains, difference, gaps, nest, union, unite
from rankscope.analysis.traces.kernels import Kind, names_like
from rankscope.analysis.traces.steps import BACKWARD, Steps, find_steps, first_whole
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

_HOST_BACKENDS = frozenset({"", "gloo", "mpi", "ucc"})
# Python between two operators takes as long.
_SHORT_NS = 100_000
# A thread waits less than this for a core.
_UNSCHEDULED_NS = 10_000_000
# The event of a transfer ends late if its thread waits for a core after it has woken the host: by less than this share
# of the host's pause.
_LATE_RATIO = 0.25
# Calls at the same moment are in this order.
_STEP_END, _STEP_START, _LAUNCH, _WAIT = range(4)


@dataclass(frozen=True)
class _Transfers:
    """In the order in which the host started them."""

    row: Ints
    called_ns: Ints
    returned_ns: Ints
    next_event_ns: Ints  # what the host's thread does next after the call is not before this
    lane: Ints
    start_ns: Ints
    end_ns: Ints

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class _Waits:
    """One entry a transfer that the host waits for, in the order of time."""

    work: Ints
    start_ns: Ints
    end_ns: Ints


def build_host_graph(trace: Trace) -> Graph:
    """Of a trace without work on a device. Raises ReplayError."""
    collectives = find_collectives(trace)
    _check(trace, collectives)
    steps = find_steps(trace)
    if not len(steps):
        steps = whole_trace(trace)
    if len(steps) <= first_whole(steps):
        raise ReplayError("no step was recorded as a whole")
    inputs = spans_of(trace, _on_host(trace) & names_like(trace, INPUT)[trace.name])
    transfers = _find_transfers(trace, collectives)
    pauses = _find_pauses(trace, transfers, inputs)
    work_end, waits = _find_waits(trace, transfers, pauses)
    is_long = pauses[1] - pauses[0] > _UNSCHEDULED_NS
    return _assemble(steps, transfers, work_end, waits, inputs, (pauses[0][is_long], pauses[1][is_long]))


def _on_host(trace: Trace) -> Bools:
    on_host: Bools = trace.of(Category.USER_ANNOTATION, Category.PYTHON, Category.CPU_OP) & (trace.stream == ABSENT)
    return on_host


def _check(trace: Trace, collectives: Collectives) -> None:
    called = np.unique(trace.name[collectives.call_row[collectives.call_row != ABSENT]]).tolist()
    # NCCL and others transfer on a device.
    backends = {annotated_backend(trace.names[name]) for name in called}
    if trace.of(Category.RUNTIME, Category.DRIVER).any() or backends - _HOST_BACKENDS:
        raise ReplayError("nothing ran on a device: record the device too (ProfilerActivity.CUDA)")
    if not _on_host(trace).any():
        raise ReplayError("it has no operators")
    if int(trace.end_ns.max()) - int(trace.start_ns.min()) > MAX_SPAN_NS:
        raise ReplayError("it spans more than a day")


def _find_transfers(trace: Trace, collectives: Collectives) -> _Transfers:
    row = np.sort(collectives.call_row[collectives.measured])
    start, end = trace.start_ns[row], trace.end_ns[row]
    lane, lanes = number_groups(trace.process[row], trace.thread[row])
    if lanes > MAX_STREAMS:
        raise ReplayError(f"{lanes:,} threads transfer, of which at most {MAX_STREAMS} can be replayed")
    starts_one = np.array([kind_of_host_operator(name) is not None for name in trace.names], dtype=bool)
    spans = nest(trace, np.flatnonzero(_on_host(trace) & ~trace.of(Category.PYTHON)))
    operators = np.flatnonzero(trace.of(Category.CPU_OP)[spans.row] & starts_one[trace.name[spans.row]])
    # An operator within another is the one that starts it.
    operators = operators[~np.isin(operators, spans.parent[operators])]
    operators = operators[np.argsort(spans.start_ns[operators], kind="stable")]
    caller = _callers(spans.start_ns[operators], start)
    known = caller != NOTHING
    position = operators[caller[known]]
    called, returned, next_event = start.copy(), start.copy(), start.copy()
    called[known], returned[known] = spans.start_ns[position], spans.end_ns[position]
    next_event[known] = np.maximum(_next_events(trace, spans, position), returned[known])
    # An operator that ends after its transfer may wait within.
    inline = known & (end <= returned)
    next_event[inline] = returned[inline]
    returned[inline] = np.maximum(called, start)[inline]
    start = _taken_up(lane, called, start, end)
    order = np.lexsort((start, called))
    return _Transfers(
        row[order], called[order], returned[order], next_event[order], lane[order], start[order], end[order]
    )


def _next_events(trace: Trace, spans: Spans, position: Ints) -> Ints:
    """What the thread of each span does after it: the next event, or the end of the operator around. The span's own
    end if there is nothing."""
    row, end = spans.row[position], spans.end_ns[position]
    following = np.searchsorted(spans.key, spans.key_at(row, end - 1), "right")
    inside = np.minimum(following, len(spans.row) - 1)
    is_last = (following > inside) | (spans.thread_of_row[spans.row[inside]] != spans.thread_of_row[row])
    around = spans.parent[position]
    is_within = (around >= 0) & trace.of(Category.CPU_OP)[spans.row[around]]
    after = np.where(is_last, np.where(is_within, spans.end_ns[around], end), spans.start_ns[inside])
    events: Ints = np.where(is_within, np.minimum(after, spans.end_ns[around]), after)
    return events


def _taken_up(lane: Ints, called: Ints, start: Ints, end: Ints) -> Ints:
    """A thread takes up a transfer when it is called, or when the one before has ended. That it begins later, because
    the thread is not scheduled, is a part of the transfer."""
    order = np.lexsort((start, lane))
    before = np.where(np.diff(lane[order], prepend=NOTHING) == 0, np.roll(end[order], 1), called[order])
    taken_up: Ints = start.copy()
    taken_up[order] = np.minimum(np.maximum(before, called[order]), start[order])
    return taken_up


def _callers(called_ns: Ints, start_ns: Ints) -> Ints:
    """By transfer, the number of the call that started it. They start in the order of the calls; each belongs to the
    last call before it that no later transfer belongs to. Both are sorted."""
    turn = np.arange(len(start_ns))
    latest = np.searchsorted(called_ns, start_ns, "right") - 1
    number = turn + np.minimum.accumulate((latest - turn)[::-1])[::-1] if len(turn) else turn
    return np.where(number >= 0, number, NOTHING)


def _find_waits(trace: Trace, transfers: _Transfers, pauses: Intervals) -> tuple[Ints, _Waits]:
    """The ends of transfers as the host saw them, and the waits for them."""
    called, end = transfers.called_ns, transfers.end_ns
    pause, resumed = pauses
    backward = spans_of(trace, trace.of(Category.CPU_OP) & names_like(trace, BACKWARD)[trace.name])
    is_after_backward = contains(backward, pause - 1) & ~contains(backward, resumed)
    # The pause in which a transfer ends.
    at = np.minimum(np.searchsorted(resumed, end, "left"), len(pause) - 1)
    waited = np.where(called <= pause[at], end - pause[at], 0)
    # DDP waits for its buckets right after the backward pass, whatever the host does then.
    is_bucket = is_after_backward[at] & contains(backward, called)
    chosen = np.where((waited > 0) & (is_bucket | (resumed[at] - end <= np.maximum(waited, _SHORT_NS))), at, NOTHING)
    late = _recorded_late(pause, resumed, called, end)
    chosen = np.where((late != NOTHING) & (waited <= _SHORT_NS), late, chosen)
    end = np.where(chosen != NOTHING, np.minimum(end, resumed[chosen]), end)
    waiting = np.unique(chosen[chosen != NOTHING])
    until = np.zeros(len(pause), np.int64)
    np.maximum.at(until, chosen[chosen != NOTHING], end[chosen != NOTHING])
    # What had ended before was waited for too.
    place = np.searchsorted(until[waiting], end, "left")
    later = np.append(waiting, NOTHING)[np.minimum(place, len(waiting))]
    later = np.where(called <= pause[later], later, NOTHING)
    chosen = np.where(chosen == NOTHING, later, chosen)
    work = np.flatnonzero(chosen != NOTHING)
    work = work[np.lexsort((end[work], chosen[work]))]
    begun = pause[chosen[work]]
    ended = np.maximum(end[work], begun)
    is_next = np.diff(chosen[work], prepend=NOTHING) == 0
    start = np.where(is_next, np.concatenate((begun[:1], ended[:-1])), begun)
    return np.maximum(end, transfers.start_ns), _Waits(work, start, ended)


def _recorded_late(pause: Ints, resumed: Ints, called: Ints, end: Ints) -> Ints:
    """By transfer, the pause after which its event went on for a little; else NOTHING."""
    length = resumed - pause
    lateness = np.minimum(_LATE_RATIO * length, _UNSCHEDULED_NS).astype(np.int64)
    reach = np.where(length > _SHORT_NS, resumed + lateness, resumed)
    is_furthest = reach >= np.maximum.accumulate(reach)
    furthest = np.maximum.accumulate(np.where(is_furthest, np.arange(len(reach)), 0))
    before = np.searchsorted(resumed, end, "left") - 1
    found = furthest[np.maximum(before, 0)]
    is_late = (before >= 0) & (called <= pause[found]) & (end < reach[found])
    return np.where(is_late, found, NOTHING)


def _find_pauses(trace: Trace, transfers: _Transfers, inputs: Intervals) -> Intervals:
    """When the host computes nothing, and does not wait for a batch. At least one: the end of the trace."""
    starting = union(transfers.called_ns, transfers.returned_ns)
    after = union(transfers.returned_ns, transfers.next_event_ns)
    busy = difference(unite(occupy_host(trace).compute, inputs, starting), after)
    begun, ended = gaps(busy)
    finish = int(trace.end_ns.max())
    last = int(busy[1][-1]) if len(busy[1]) else int(trace.start_ns.min())
    return np.append(begun, last), np.append(ended, max(finish, last))


def _assemble(
    steps: Steps, transfers: _Transfers, work_end: Ints, waits: _Waits, inputs: Intervals, apart: Intervals
) -> Graph:
    """Calls of four sorts, in the order of time."""
    numbers, works = np.arange(len(steps)), len(transfers)
    none = np.full(max(len(steps), works), NOTHING)
    border = (numbers, none[: len(steps)], none[: len(steps)])
    called, returned = transfers.called_ns, transfers.returned_ns
    parts = (
        (_STEP_END, steps.end_ns, steps.end_ns, *border),
        (_STEP_START, steps.start_ns, steps.start_ns, *border),
        (_LAUNCH, called, returned, steps.at(called), none[:works], transfers.row),
        (_WAIT, waits.start_ns, waits.end_ns, steps.at(waits.start_ns), waits.work, transfers.row[waits.work]),
    )
    sort = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
    start, end, step, waits_for, row = (np.concatenate([part[column] for part in parts]) for column in range(1, 6))
    order = np.lexsort((sort, start))
    sort, start, end, step, waits_for, row = (one[order] for one in (sort, start, end, step, waits_for, row))
    before = np.concatenate((start[:1], end[:-1]))
    launch = np.flatnonzero(sort == _LAUNCH)
    nothing, no_time = np.zeros(0, np.int64), np.zeros(len(start), np.int64)
    return Graph(
        call_row=row,
        call_start_ns=start,
        gap_ns=start - before,
        call_end_ns=end,
        own_ns=np.where(sort == _WAIT, 0, end - start),
        input_ns=overlap_ns(inputs, before, start),
        optimizer_ns=no_time,
        apart_ns=overlap_ns(apart, before, start),
        in_backward=no_time.astype(bool),
        in_optimizer=no_time.astype(bool),
        call_step=step,
        waits_for=waits_for,
        waits_for_all=no_time.astype(bool),
        work_row=transfers.row,
        stream=transfers.lane,
        launch=launch,
        start_ns=transfers.start_ns,
        duration_ns=work_end - transfers.start_ns,
        kind=np.full(works, int(Kind.COMMUNICATION)),
        work_step=step[launch],
        collective=np.full(works, NOTHING),
        transfer_ns=np.zeros(works, np.int64),
        later=nothing,
        earlier=nothing,
        steps=steps,
        step_range=(first_whole(steps), len(steps) - 1),
        # A host that has waited takes its time to go on, which is in the gap after the wait.
        latencies=Latencies(0, 0, 0),
        on_host=True,
    )
