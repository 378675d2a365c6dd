"""When a rank was busy with what, as sets of time: on its device, or on the host where there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.intervals import NOTHING, Intervals, clip, contains, difference, merge, union
from rankscope.analysis.traces.kernels import Kind, classify, host_communication, names_like

# Operators that enqueue or describe communication; what they stand for is counted as such.
_COMMUNICATION_OPERATORS = re.compile(r"c10d::|_c10d_functional::|record_param_comms|gloo:|mpi:|ucc:")


@dataclass(frozen=True)
class Occupation:
    """Sorted and disjoint. `anything` holds events without a length too where they stand alone: a rank's time begins
    with its first event and ends with its last, whatever their length."""

    on_host: bool  # a trace without device: operators are the computation
    anything: Intervals
    compute: Intervals
    communication: Intervals
    memory: Intervals  # copies
    exposed_memory: Intervals  # neither computation nor communication on the device covers it


def occupy(trace: Trace) -> Occupation:
    return _occupy_device(trace) if len(device_rows(trace)) else occupy_host(trace)


def device_rows(trace: Trace) -> Ints:
    """Everything that ran on a device."""
    return np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _occupy_device(trace: Trace) -> Occupation:
    """`gloo:…` on the host is communication only where the device has no communication kernels: beside NCCL it carries
    barriers and small objects, and is an explanation for idle time at most."""
    rows = device_rows(trace)
    start, end, kind = trace.start_ns[rows], trace.end_ns[rows], classify(trace)[rows]

    def times(wanted: Kind) -> Intervals:
        which = kind == wanted
        return union(start[which], end[which])

    anything = merge(start, end)
    compute, on_device, memory = times(Kind.COMPUTE), times(Kind.COMMUNICATION), times(Kind.MEMORY)
    communication = on_device
    if not (kind == Kind.COMMUNICATION).any():
        transfers = np.flatnonzero(host_communication(trace))
        on_host = union(trace.start_ns[transfers], trace.end_ns[transfers])
        communication = clip(on_host, int(anything[0][0]), int(anything[1][-1]))
    exposed = difference(difference(memory, compute), on_device)
    return Occupation(False, anything, compute, communication, memory, exposed)


def occupy_host(trace: Trace) -> Occupation:
    """Operators are the computation, but for those that communicate or serve a transfer on its thread."""
    transfers = np.flatnonzero(host_communication(trace))
    communication = union(trace.start_ns[transfers], trace.end_ns[transfers])
    operators = trace.of(Category.CPU_OP) & ~names_like(trace, _COMMUNICATION_OPERATORS)[trace.name]
    rows = np.flatnonzero(operators & ~_within_transfers(trace, transfers))
    compute = union(trace.start_ns[rows], trace.end_ns[rows])
    anything = union(np.concatenate((compute[0], communication[0])), np.concatenate((compute[1], communication[1])))
    return Occupation(True, anything, compute, communication, NOTHING, NOTHING)


def _within_transfers(trace: Trace, transfers: Ints) -> Bools:
    within = np.zeros(len(trace), dtype=bool)
    for thread in np.unique(trace.thread[transfers]):
        own = transfers[trace.thread[transfers] == thread]
        rows = np.flatnonzero(trace.thread == thread)
        within[rows] = contains(union(trace.start_ns[own], trace.end_ns[own]), trace.start_ns[rows])
    return within
