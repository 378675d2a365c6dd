"""The work of one rank's trace and what each part waits for: calls of the host that launch work or wait for it, and the
work itself on its streams.

Calls are in one order, whatever thread makes them: the backward pass runs on a thread of its own while the main one
waits. Host time between two calls is the later one's `gap_ns`. Work starts when its launch has arrived, the work before
it on its stream has ended, and what its stream was told to wait for has ended. A trace does not say what an event is
about: a call that lets a stream wait belongs to the next work that is launched, and that work waits for the last work
of each other stream that was launched before the call and had ended when it began."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.breakdown import device_rows, traced_launch_ratios
from rankscope.analysis.traces.idle_time import INPUT
from rankscope.analysis.traces.intervals import Intervals, contains, covered_until, intersection, union, unite
from rankscope.analysis.traces.kernels import classify, names_like
from rankscope.analysis.traces.steps import (
    BACKWARD,
    NO_STEP,
    OPTIMIZER_STEP,
    Steps,
    find_steps,
    first_whole,
    launch_rows,
)
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

NOTHING = -1
# So many launches fit into the queue of a stream; the next one blocks the host. Measured on an H200.
MAX_QUEUE = 1021
# A step of which less was recorded is not replayed.
WHOLE_STEP_RATIO = 0.98
# More steps add little.
MAX_STEPS = 10
# Of a corrupt trace.
MAX_STREAMS, MAX_SPAN_NS = 512, 24 * 3600 * 10**9
# A stream that is idle for longer waits for something, and a call that takes longer has waited.
_WAITED_NS = 20_000
# Longer than launches, kernels and calls that wake up take by themselves.
_LONG_NS = 100_000
_LONG_AGO, _FOREVER = np.iinfo(np.int64).min // 2, np.iinfo(np.int64).max // 2
# Python between two operators takes less.
_APART_NS = 1_000_000
_SYNCHRONISE_DEVICE = re.compile(r"(cuda|hip|cu)(Device|Ctx|Context)Synchronize")
_SYNCHRONISE = re.compile(r"(cuda|hip|cu)(Stream|Event)Synchronize|(cuda|hip)Memcpy$")
WITHIN_DEVICE = re.compile(r"Memcpy (DtoD|PtoP)|CopyDeviceToDevice")
_WAIT_EVENT = re.compile(r"(cuda|hip|cu)StreamWaitEvent")

# Work, and the work of another stream that it waits for.
Waits: TypeAlias = tuple[Ints, Ints]


@dataclass(frozen=True)
class Latencies:
    """What the device and the host take in between, typical of the trace."""

    launch_ns: int  # from the start of a call to that of its work, on an idle stream
    work_ns: int  # from the end of work to the start of the next on a busy stream
    wake_ns: int  # from the end of work to the end of the call that waits for it


_DEFAULTS = Latencies(launch_ns=6_000, work_ns=1_500, wake_ns=10_000)  # where the trace has no example


@dataclass(frozen=True)
class Graph:
    """Calls in the order of their start; work in the order of its launch. Numbers of calls and work are positions."""

    # One entry a call.
    call_row: Ints  # of the trace
    call_start_ns: Ints
    gap_ns: Ints  # host time since the call before; below 0 where two threads overlap
    call_end_ns: Ints
    own_ns: Ints  # of the call, without waiting
    input_ns: Ints  # part of the gap: waiting for the next batch
    optimizer_ns: Ints  # part of the gap: in operators of the optimizer
    apart_ns: Ints  # part of the gap: long stretches outside of operators, which launch nothing
    in_backward: Bools
    in_optimizer: Bools
    call_step: Ints
    waits_for: Ints  # work whose end the call waits for; NOTHING if it does not wait
    waits_for_all: Bools  # for all work that was launched before it

    # One entry a piece of work.
    work_row: Ints
    stream: Ints  # from 0
    launch: Ints  # call; NOTHING if it was launched before the trace
    start_ns: Ints
    duration_ns: Ints
    kind: Ints  # a kernels.Kind
    work_step: Ints
    collective: Ints  # number that the ranks of one collective share; NOTHING for other work
    transfer_ns: Ints  # of a collective: from the moment the last rank enters

    # Work that waits for work of other streams.
    later: Ints
    earlier: Ints

    steps: Steps
    step_range: tuple[int, int]  # positions of the first and last step that are replayed
    latencies: Latencies
    on_host: bool = False  # the rank has no device: work is the transfers of its host

    @property
    def streams(self) -> int:
        return int(self.stream.max(initial=-1)) + 1


CALL_COLUMNS = (
    *("call_row", "call_start_ns", "gap_ns", "call_end_ns", "own_ns", "input_ns", "optimizer_ns", "apart_ns"),
    *("in_backward", "in_optimizer", "call_step", "waits_for", "waits_for_all"),
)
WORK_COLUMNS = (
    *("work_row", "stream", "launch", "start_ns", "duration_ns", "kind", "work_step"),
    *("collective", "transfer_ns"),
)


class ReplayError(ValueError):
    """The traces cannot be replayed; the text says why."""


@dataclass(frozen=True)
class _Recorded:
    """Calls and work as they were recorded, in the order of `Graph`."""

    call_row: Ints
    call_name: Ints
    call_start: Ints
    call_end: Ints
    work_row: Ints
    launch: Ints
    stream: Ints
    start: Ints
    end: Ints

    @property
    def on_streams(self) -> list[Ints]:
        """The work of each stream."""
        return rows_of_groups(self.stream, int(self.stream.max()) + 1)

    @property
    def launched_ns(self) -> Ints:
        """When the work was launched; long ago if that was before the trace."""
        return np.where(self.launch != NOTHING, self.call_start[self.launch], _LONG_AGO)


def build_graph(trace: Trace) -> Graph:
    """Raises ReplayError."""
    launches = launch_rows(trace)
    recorded = _read(trace, launches)
    steps = find_steps(trace)
    if not len(steps):
        steps = whole_trace(trace)
    waits = _unexplained_waits(recorded, _stream_waits(trace, recorded))
    waits_for = _host_waits(trace, recorded)
    waits_for_all = names_like(trace, _SYNCHRONISE_DEVICE)[recorded.call_name]
    latencies = _latencies(recorded, waits, waits_for)
    call_start, call_end = recorded.call_start, recorded.call_end
    before = np.concatenate((call_start[:1], call_end[:-1]))
    marks = trace.of(Category.USER_ANNOTATION, Category.PYTHON, Category.CPU_OP) & (trace.stream == ABSENT)
    inputs = spans_of(trace, marks & names_like(trace, INPUT)[trace.name])
    optimizer = spans_of(trace, marks & names_like(trace, OPTIMIZER_STEP)[trace.name])
    is_operator = trace.of(Category.CPU_OP) & (trace.stream == ABSENT)
    operators = spans_of(trace, is_operator)
    backward = spans_of(trace, is_operator & names_like(trace, BACKWARD)[trace.name])
    gap = call_start - before
    apart = gap - overlap_ns(unite(operators, optimizer, inputs), before, call_start)
    call_step = steps.at(call_start)
    step_range = _whole_steps(trace, steps, launches)
    if not np.isin(step_range, call_step).all():
        raise ReplayError("no step was recorded as a whole")
    works = len(recorded.work_row)
    made = Graph(
        call_row=recorded.call_row,
        call_start_ns=call_start,
        call_end_ns=call_end,
        gap_ns=gap,
        own_ns=_own_ns(recorded, (waits_for != NOTHING) | waits_for_all, latencies),
        input_ns=overlap_ns(inputs, before, call_start),
        optimizer_ns=overlap_ns(intersection(optimizer, operators), before, call_start),
        apart_ns=np.where(apart > _APART_NS, apart, 0),
        in_backward=contains(backward, call_start),
        in_optimizer=contains(optimizer, call_start),
        call_step=call_step,
        waits_for=waits_for,
        waits_for_all=waits_for_all,
        work_row=recorded.work_row,
        stream=recorded.stream,
        launch=recorded.launch,
        start_ns=recorded.start,
        duration_ns=recorded.end - recorded.start,
        kind=classify(trace)[recorded.work_row].astype(np.int64),
        work_step=np.where(recorded.launch != NOTHING, call_step[recorded.launch], NO_STEP),
        collective=np.full(works, NOTHING),
        transfer_ns=np.zeros(works, np.int64),
        later=waits[0],
        earlier=waits[1],
        steps=steps,
        step_range=step_range,
        latencies=latencies,
    )
    first, last = made.step_range
    return _until(made, first + MAX_STEPS - 1) if last >= first + MAX_STEPS else made


def _until(graph: Graph, last_step: int) -> Graph:
    """Without what follows the last call of a step. Nothing waits for work that is launched later."""
    calls = int(np.flatnonzero((graph.call_step >= 0) & (graph.call_step <= last_step)).max(initial=-1)) + 1
    works = int(np.searchsorted(graph.launch, calls))
    waits = graph.later < works
    return replace(
        graph,
        **{name: getattr(graph, name)[:calls] for name in CALL_COLUMNS},
        **{name: getattr(graph, name)[:works] for name in WORK_COLUMNS},
        later=graph.later[waits],
        earlier=graph.earlier[waits],
        step_range=(graph.step_range[0], last_step),
    )


def _read(trace: Trace, launches: Ints) -> _Recorded:
    work_row = device_rows(trace)
    if not len(work_row):
        raise ReplayError("nothing ran on a device")
    if int(trace.end_ns.max()) - int(trace.start_ns.min()) > MAX_SPAN_NS:
        raise ReplayError("it spans more than a day")
    call_row = _calls(trace, launches, work_row)
    if not len(call_row):
        raise ReplayError("it has no calls that launch work: record the host too (ProfilerActivity.CPU)")
    launch = _positions(call_row, launches[work_row])
    order = np.lexsort((trace.start_ns[work_row], launch))  # what was launched before the trace comes first
    work_row = work_row[order]
    stream, streams = number_groups(trace.device[work_row], trace.stream[work_row])
    if streams > MAX_STREAMS:
        raise ReplayError(f"it has {streams:,} streams, of which at most {MAX_STREAMS} can be replayed")
    return _Recorded(
        call_row=call_row,
        call_name=trace.name[call_row],
        call_start=trace.start_ns[call_row],
        call_end=trace.end_ns[call_row],
        work_row=work_row,
        launch=launch[order],
        stream=stream,
        start=trace.start_ns[work_row],
        end=trace.end_ns[work_row],
    )


def whole_trace(trace: Trace) -> Steps:
    begin, finish = int(trace.start_ns.min()), int(trace.end_ns.max()) + 1
    return Steps(np.zeros(1, np.int64), np.array([begin]), np.array([finish]), "", True)


def _whole_steps(trace: Trace, steps: Steps, launches: Ints) -> tuple[int, int]:
    ratios = traced_launch_ratios(trace, steps, launches)
    known = [ratio for ratio in ratios if ratio is not None]
    enough = WHOLE_STEP_RATIO * max(known, default=0.0)
    first = first_whole(steps)
    last = first - 1
    while last + 1 < len(steps) and (ratio := ratios[last + 1]) is not None and ratio >= enough:
        last += 1
    if last < first:
        raise ReplayError("no step was recorded as a whole")
    return first, last


def _calls(trace: Trace, launches: Ints, work_row: Ints) -> Ints:
    """Rows of calls that launch work, wait for it, or let a stream wait; of threads that launch or wait. Others, such
    as NCCL's watchdog, only look."""
    is_call = trace.of(Category.RUNTIME, Category.DRIVER)
    is_launch = np.zeros(len(trace), dtype=bool)
    launched = launches[work_row]
    is_launch[launched[launched != ABSENT]] = True
    is_wait = is_call & names_like(trace, _SYNCHRONISE)[trace.name]
    is_wait |= is_call & names_like(trace, _SYNCHRONISE_DEVICE)[trace.name]
    is_event = is_call & names_like(trace, _WAIT_EVENT)[trace.name]
    thread, count = number_groups(trace.process, trace.thread)
    busy = np.zeros(count, dtype=bool)
    busy[thread[is_launch]] = True
    return np.flatnonzero((is_launch | is_wait | is_event) & busy[thread])


def _positions(call_row: Ints, launch: Ints) -> Ints:
    place = np.searchsorted(call_row, launch)
    inside = np.minimum(place, max(len(call_row) - 1, 0))
    found: Ints = np.where((launch != ABSENT) & (call_row[inside] == launch), place, NOTHING)
    return found


def spans_of(trace: Trace, rows: Bools) -> Intervals:
    return union(trace.start_ns[rows], trace.end_ns[rows])


def overlap_ns(spans: Intervals, start: Ints, end: Ints) -> Ints:
    length: Ints = np.maximum(covered_until(spans, end) - covered_until(spans, start), 0)
    return length


def _own_ns(recorded: _Recorded, is_waiting: Bools, latencies: Latencies) -> Ints:
    """Without waiting for the device, and for room in the queue."""
    own = recorded.call_end - recorded.call_start
    own = np.where(is_waiting, np.minimum(own, latencies.wake_ns), own)
    is_launch = np.isin(np.arange(len(own)), recorded.launch)
    launched = np.searchsorted(recorded.launch, np.arange(len(own)), "left")
    started = np.searchsorted(np.sort(recorded.start), recorded.call_start, "right")
    is_blocked = is_launch & (launched - started >= MAX_QUEUE - 1)
    # How full the queue is shows once the device has reached what was launched in the trace. A cut trace has nothing
    # that was launched before.
    reached = int(recorded.start[recorded.launch != NOTHING].min(initial=_FOREVER))
    is_blocked |= is_launch & (recorded.call_start < reached) & (own > _LONG_NS)
    usual = own[is_launch & ~is_blocked]
    own[is_blocked] = np.minimum(own[is_blocked], int(np.median(usual)) if len(usual) else 0)
    return own


def _last_ended(work: Ints, end: Ints, before: Ints, moment: Ints) -> Ints:
    """Of one stream's work, the last that was launched before a position and had ended at a moment; else NOTHING."""
    launched = np.searchsorted(work, before, "left")
    # On a stream work ends in the order of its launch.
    ended = np.searchsorted(end[work], moment, "right")
    last = np.minimum(launched, ended) - 1
    found: Ints = np.where(last >= 0, work[np.maximum(last, 0)], NOTHING)
    return found


def _stream_waits(trace: Trace, recorded: _Recorded) -> Waits:
    """What calls about events show."""
    event_calls = np.flatnonzero(names_like(trace, _WAIT_EVENT)[recorded.call_name])
    next_work = np.searchsorted(recorded.launch, event_calls, "left")
    told = np.unique(next_work[next_work < len(recorded.launch)])
    later, earlier = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for other, theirs in enumerate(recorded.on_streams):
        waiting = told[recorded.stream[told] != other]
        found = _last_ended(theirs, recorded.end, waiting, recorded.start[waiting])
        later.append(waiting[found != NOTHING])
        earlier.append(found[found != NOTHING])
    return np.concatenate(later), np.concatenate(earlier)


def _unexplained_waits(recorded: _Recorded, waits: Waits) -> Waits:
    """Adds what the calls do not show: work that was launched long before and whose stream was idle waits for the work
    of another stream that had just ended. Older traces have no calls about events."""
    start, end = recorded.start, recorded.end
    ready = _ready(recorded, waits)
    late = np.flatnonzero((start - ready > _WAITED_NS) & (start - recorded.launched_ns > _LONG_NS))
    late = late[recorded.launch[late] != NOTHING]
    reason, reached = np.full(len(late), NOTHING), ready[late]
    for other, theirs in enumerate(recorded.on_streams):
        found = _last_ended(theirs, end, late, start[late])
        found = np.where(recorded.stream[late] == other, NOTHING, found)
        ended = np.where(found != NOTHING, end[found], reached)
        reason, reached = np.where(ended > reached, found, reason), np.maximum(ended, reached)
    some = reason != NOTHING
    return np.concatenate((waits[0], late[some])), np.concatenate((waits[1], reason[some]))


def _host_waits(trace: Trace, recorded: _Recorded) -> Ints:
    """Per call, the work whose end it waits for."""
    waits_for = np.full(len(recorded.call_row), NOTHING)
    # A copy from or to memory that is not pinned has ended when its call returns.
    is_copy = trace.of(Category.MEMCPY) & ~names_like(trace, WITHIN_DEVICE)[trace.name]
    copies = np.flatnonzero((recorded.launch != NOTHING) & is_copy[recorded.work_row])
    call = recorded.launch[copies]
    returned = recorded.call_end[call]
    is_blocking = (recorded.end[copies] <= returned) & (returned - recorded.call_start[call] > _WAITED_NS)
    waits_for[call[is_blocking]] = copies[is_blocking]
    calls = np.flatnonzero(names_like(trace, _SYNCHRONISE)[recorded.call_name])
    before = np.searchsorted(recorded.launch, calls, "left")
    for work in recorded.on_streams:
        found = _last_ended(work, recorded.end, before, recorded.call_end[calls])
        waits_for[calls] = np.maximum(waits_for[calls], found)
    return waits_for


def _ready(recorded: _Recorded, waits: Waits) -> Ints:
    """When the work before on its stream, and what it waits for, had ended."""
    ready = np.full(len(recorded.start), _LONG_AGO)
    for work in recorded.on_streams:
        ready[work[1:]] = recorded.end[work[:-1]]
    np.maximum.at(ready, waits[0], recorded.end[waits[1]])
    return ready


def _latencies(recorded: _Recorded, waits: Waits, waits_for: Ints) -> Latencies:
    ready, launched = _ready(recorded, waits), recorded.launched_ns
    is_known = recorded.launch != NOTHING
    on_idle = is_known & (ready < launched)
    on_busy = is_known & (launched < ready - _LONG_NS)
    calls = np.flatnonzero(waits_for != NOTHING)
    ended = recorded.end[waits_for[calls]]
    woken = (recorded.call_end[calls] - ended)[ended > recorded.call_start[calls]]
    return Latencies(
        _typical((recorded.start - launched)[on_idle], _DEFAULTS.launch_ns),
        _typical((recorded.start - ready)[on_busy], _DEFAULTS.work_ns),
        _typical(woken, _DEFAULTS.wake_ns),
    )


def _typical(values: Ints, default: int) -> int:
    """What takes longer has another reason."""
    values = values[(values >= 0) & (values < _LONG_NS)]
    return int(np.median(values)) if len(values) else default
