"""When a rank was busy with what, as sets of time: on its device, or on the host where there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.breakdowns.selecting import DeviceWork
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.intervals import NOTHING, Intervals, clip, contains, merge, union
from rankscope.analysis.traces.kernels import Kind, classify, host_communication, names_like

# Operators that enqueue or describe communication; what they stand for is counted as such.
_COMMUNICATION_OPERATORS = re.compile(r"c10d::|_c10d_functional::|record_param_comms|gloo:|mpi:|ucc:")


@dataclass(frozen=True)
class Occupation:
    """Sorted; disjoint but for what rounding left empty or negative (intervals.merge)."""

    anything: Intervals
    compute: Intervals
    covering: Intervals  # what communication may hide under: `compute` but for communication that HTA takes for it
    communication: Intervals
    memory: Intervals


def occupy_device(trace: Trace, work: DeviceWork) -> Occupation:
    """`gloo:…` on the host is communication only where the device has no communication kernels: beside NCCL it carries
    barriers and small objects, and is an explanation for idle time at most."""
    is_compute = work.kind == Kind.COMPUTE
    is_communication = (classify(trace)[work.row] == Kind.COMMUNICATION) | (work.kind == Kind.COMMUNICATION)
    anything = _merged(work, np.ones(len(work.row), dtype=bool))
    communication = _merged(work, is_communication)
    if not is_communication.any():
        rows = np.flatnonzero(host_communication(trace))
        on_host = union(trace.start_ns[rows], trace.end_ns[rows])
        communication = clip(on_host, int(anything[0][0]), int(anything[1].max())) if len(anything[0]) else NOTHING
    return Occupation(
        anything=anything,
        compute=_merged(work, is_compute),
        covering=_merged(work, is_compute & ~is_communication),
        communication=communication,
        memory=_merged(work, work.kind == Kind.MEMORY),
    )


def occupy_host(trace: Trace) -> Occupation:
    """Operators are the computation, but for those that communicate or serve a transfer on its thread."""
    transfers = np.flatnonzero(host_communication(trace))
    communication = union(trace.start_ns[transfers], trace.end_ns[transfers])
    operators = trace.of(Category.CPU_OP) & ~names_like(trace, _COMMUNICATION_OPERATORS)[trace.name]
    rows = np.flatnonzero(operators & ~_within_transfers(trace, transfers))
    compute = union(trace.start_ns[rows], trace.end_ns[rows])
    anything = union(np.concatenate((compute[0], communication[0])), np.concatenate((compute[1], communication[1])))
    return Occupation(anything, compute, compute, communication, NOTHING)


def _merged(work: DeviceWork, which: Bools) -> Intervals:
    return merge(work.start_ns[which], work.end_ns[which])


def _within_transfers(trace: Trace, transfers: Ints) -> Bools:
    within = np.zeros(len(trace), dtype=bool)
    for thread in np.unique(trace.thread[transfers]):
        own = transfers[trace.thread[transfers] == thread]
        rows = np.flatnonzero(trace.thread == thread)
        within[rows] = contains(union(trace.start_ns[own], trace.end_ns[own]), trace.start_ns[rows])
    return within
