"""Why the device was idle: compares each gap with what the host did until it launched the kernel that ended the gap."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Ints, number_groups
from rankscope.analysis.traces.breakdown import Breakdown, device_rows, occupy_host
from rankscope.analysis.traces.intervals import (
    NOTHING,
    Intervals,
    contains,
    covered_until,
    difference,
    gaps,
    intersection,
    merge,
    union,
    unite,
)
from rankscope.analysis.traces.kernels import host_communication, names_like
from rankscope.analysis.traces.steps import launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

INPUT = re.compile(
    r"enumerate\(DataLoader\)|.*Loader\w*\.__next__|.*\bdata_?load(er|ing)?\b|.*/data/dataloader\.py.*__next__",
    re.IGNORECASE,
)
_SYNCHRONISATION = re.compile(
    r"(cuda|hip|cu)(Stream|Device|Event|Ctx|Context)Synchronize|(cuda|hip)Memcpy$|aten::(item|_local_scalar_dense)$"
    r"|synchronize(Stream|Device|Event)?$"  # MTIA
)
# A trace has few launching threads. Gaps of further ones in a corrupt trace are not attributed to a thread.
_MAX_THREADS = 32


@dataclass(frozen=True)
class IdleParts:
    """The sum is exactly the idle time of the breakdown."""

    host_bound_ns: int  # the next kernel was not launched yet, and none of the reasons below applies
    input_ns: int  # the host waited for data
    synchronisation_ns: int  # the host waited for the device
    communication_ns: int  # the host communicated (gloo) or waited for communication
    other_ns: int  # launched but not started, or the launch time is unknown


@dataclass(frozen=True)
class Idleness(IdleParts):
    # Part of host_bound: gaps that began while the host waited for the device, so that it could not launch ahead.
    host_bound_after_synchronisation_ns: int
    longest_gap_ns: int
    steps: tuple[IdleParts, ...]  # as in the breakdown


@dataclass(frozen=True)
class _Reasons:
    host_bound: Intervals
    input: Intervals
    synchronisation: Intervals
    communication: Intervals
    other: Intervals
    drained: Intervals  # part of host_bound


@dataclass(frozen=True)
class _Gaps:
    start_ns: Ints
    end_ns: Ints
    launched_ns: Ints  # when the host had launched the kernel that ended the gap
    thread: Ints  # the thread that launched it; -1 if unknown


@dataclass(frozen=True)
class _Host:
    """Rows of host events by what they mean for an idle device."""

    trace: Trace
    thread: Ints
    input: Ints
    synchronisation: Ints
    communication: Ints
    operators: Ints

    def times(self, rows: Ints, thread: int | None = None) -> Intervals:
        rows = rows if thread is None else rows[self.thread[rows] == thread]
        return union(self.trace.start_ns[rows], self.trace.end_ns[rows])


def split_idle(trace: Trace, breakdown: Breakdown) -> Idleness:
    host = _host_rows(trace)
    windows = [(breakdown.start_ns, breakdown.end_ns), *((step.start_ns, step.end_ns) for step in breakdown.steps)]
    bounds = np.array(windows, dtype=np.int64)
    if breakdown.on_host:
        # The host's steps begin before its first operator and end after its last.
        window = (bounds.min(keepdims=True)[0], bounds.max(keepdims=True)[0])
        start, end = difference(window, occupy_host(trace).anything)
        found = _Gaps(start, end, end, np.full(len(start), ABSENT))
        reasons = _all_host_bound(_explain(host, found))
    else:
        found = _device_gaps(trace, host)
        reasons = _explain(host, found)
    parts, *steps = _parts_within(reasons, bounds)
    lengths = (found.end_ns - found.start_ns)[
        (found.start_ns >= breakdown.start_ns) & (found.end_ns <= breakdown.end_ns)
    ]
    return Idleness(
        **vars(parts),
        host_bound_after_synchronisation_ns=int((reasons.drained[1] - reasons.drained[0]).sum()),
        longest_gap_ns=int(lengths.max(initial=0)),
        steps=tuple(steps),
    )


def _host_rows(trace: Trace) -> _Host:
    thread, _ = number_groups(trace.process, trace.thread)
    marks = trace.of(Category.USER_ANNOTATION, Category.PYTHON, Category.CPU_OP)
    calls = trace.of(Category.RUNTIME, Category.DRIVER, Category.CPU_OP)
    return _Host(
        trace=trace,
        thread=thread,
        input=np.flatnonzero(marks & names_like(trace, INPUT)[trace.name]),
        synchronisation=np.flatnonzero(calls & names_like(trace, _SYNCHRONISATION)[trace.name]),
        communication=np.flatnonzero(host_communication(trace)),
        operators=np.flatnonzero(trace.of(Category.CPU_OP)),
    )


def _device_gaps(trace: Trace, host: _Host) -> _Gaps:
    rows = device_rows(trace)
    start, end = gaps(merge(trace.start_ns[rows], trace.end_ns[rows]))
    next_row = rows[np.searchsorted(trace.start_ns[rows], end)]
    launches = launch_rows(trace)
    launch = launches[next_row]
    known = launch != ABSENT
    return _Gaps(
        start,
        end,
        np.where(known, trace.end_ns[launch], np.iinfo(np.int64).min),
        np.where(known, host.thread[launch], ABSENT),
    )


def _explain(host: _Host, gaps: _Gaps) -> _Reasons:
    threads, counts = np.unique(gaps.thread[gaps.thread != ABSENT], return_counts=True)
    watched = threads[np.argsort(-counts, kind="stable")[:_MAX_THREADS]]
    found = [_explain_thread(host, gaps, gaps.thread == thread, int(thread), watched) for thread in watched]
    found.append(_explain_thread(host, gaps, ~np.isin(gaps.thread, watched), None, watched))
    joined = {name: unite(*(getattr(reasons, name) for reasons in found)) for name in _Reasons.__dataclass_fields__}
    return _Reasons(**joined)


def _explain_thread(host: _Host, gaps: _Gaps, which: np.ndarray, thread: int | None, watched: Ints) -> _Reasons:
    """The launching thread has priority. While it runs no operator, it may wait for another thread, and then that
    thread's activity is the reason."""
    start, end, launched = gaps.start_ns[which], gaps.end_ns[which], gaps.launched_ns[which]
    unlaunched_end = np.clip(launched, start, end) if thread is not None else end
    rest = union(start, unlaunched_end)
    other = union(unlaunched_end, end)
    busy = host.times(host.operators, thread) if thread is not None else NOTHING
    launching = host.synchronisation[np.isin(host.thread[host.synchronisation], watched)]
    explained = []
    for rows, anywhere in (
        (host.input, host.input),
        (host.communication, host.communication),
        (host.synchronisation, launching),
    ):
        times = difference(host.times(anywhere), busy)
        if thread is not None:
            times = unite(times, host.times(rows, thread))
        explained.append(intersection(rest, times))
        rest = difference(rest, times)
    drained = NOTHING
    if thread is not None:
        empty = contains(host.times(host.synchronisation, thread), start)
        drained = intersection(rest, union(start[empty], end[empty]))
    else:
        # The launch time is unknown, so whether the host was late is unknown too.
        other, rest = unite(other, rest), NOTHING
    return _Reasons(rest, explained[0], explained[2], explained[1], other, drained)


def _all_host_bound(reasons: _Reasons) -> _Reasons:
    """Between two operators the host runs Python; there is nothing else to wait for."""
    return _Reasons(
        reasons.other, reasons.input, reasons.synchronisation, reasons.communication, NOTHING, reasons.drained
    )


def _parts_within(reasons: _Reasons, bounds: Ints) -> list[IdleParts]:
    columns = [
        covered_until(spans, bounds[:, 1]) - covered_until(spans, bounds[:, 0])
        for spans in (
            reasons.host_bound,
            reasons.input,
            reasons.synchronisation,
            reasons.communication,
            reasons.other,
        )
    ]
    return [IdleParts(*row) for row in np.column_stack(columns).tolist()]
