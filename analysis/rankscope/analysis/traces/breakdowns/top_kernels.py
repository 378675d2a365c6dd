"""Which kernels the time went into."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT, Category, Trace
from rankscope.analysis.traces.kernels import Kind, classify, tensor_core
from rankscope.analysis.traces.nesting import nest

TOP = 20


@dataclass(frozen=True)
class KernelUse:
    """One kernel by name. On a trace without device these are operators, without what they called."""

    name: str
    kind: Kind
    tensor_core: bool
    count: int
    total_ns: int
    share_ratio: float  # of the durations of everything on the device
    mean_ns: float
    longest_ns: int


def top_kernels(trace: Trace, limit: int = TOP) -> tuple[KernelUse, ...]:
    """By total time, longest first. Durations add up whether or not they overlap."""
    kind = classify(trace)
    duration = trace.duration_ns
    rows = np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    if len(rows) == 0:
        rows = np.flatnonzero(trace.of(Category.CPU_OP))
        kind = np.full(len(trace), Kind.COMPUTE, dtype=np.int8)
        duration = _own_durations(trace, rows)
    size = len(trace.names)
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, trace.name[rows], duration[rows])
    counts = np.bincount(trace.name[rows], minlength=size)
    longest = np.zeros(size, dtype=np.int64)
    np.maximum.at(longest, trace.name[rows], duration[rows])
    kind_of_name = np.zeros(size, dtype=np.int8)
    kind_of_name[trace.name[rows]] = kind[rows]
    on_tensor_core = np.zeros(size, dtype=bool)
    on_tensor_core[trace.name[tensor_core(trace)]] = True
    everything = max(int(totals.sum()), 1)
    best = np.argsort(-totals, kind="stable")[:limit]
    return tuple(
        KernelUse(
            name=trace.names[name],
            kind=Kind(int(kind_of_name[name])),
            tensor_core=bool(on_tensor_core[name]),
            count=int(counts[name]),
            total_ns=int(totals[name]),
            share_ratio=float(totals[name] / everything),
            mean_ns=float(totals[name] / counts[name]),
            longest_ns=int(longest[name]),
        )
        for name in best
        if counts[name]
    )


def tensor_core_ratio(trace: Trace) -> float | None:
    """Share of the time in computation kernels that is in those of tensor cores; None without such kernels."""
    compute = classify(trace) == Kind.COMPUTE
    total = int(trace.duration_ns[compute].sum())
    return float(trace.duration_ns[compute & tensor_core(trace)].sum() / total) if total else None


def _own_durations(trace: Trace, rows: Ints) -> Ints:
    """Of each row, its duration without that of the rows it directly encloses on its thread."""
    # Only the order of times matters here, and ranks stay small however far apart the times of a broken trace are.
    _, rank = np.unique(np.concatenate((trace.start_ns, trace.end_ns)), return_inverse=True)
    start, end = np.split(rank, 2)
    spans = nest(replace(trace, start_ns=start, duration_ns=end - start), rows)
    inner = spans.parent != ABSENT
    own: Ints = trace.duration_ns.copy()
    np.subtract.at(own, spans.row[spans.parent[inner]], trace.duration_ns[spans.row[inner]])
    np.maximum(own, 0, out=own)
    return own
