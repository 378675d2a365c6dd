"""The FLOPs and bytes of kernels, from the operators that launched them. The innermost operator around a launch owns the
kernel. Its work is given to its longest kernel, and only if the others are small: what a kernel of several does is not
known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.intervals import Spans, nest
from rankscope.analysis.traces.steps import launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, take_or_absent

# Of the time of an operator's kernels, so that the longest does its work.
_DOMINANT_RATIO = 2 / 3
# From a library's wrapper of a dense kernel to the operator that has the shapes: cudnn_convolution in convolution.
_MAX_CLIMBS = 4


@dataclass(frozen=True)
class KernelWork:
    """One entry per kernel that was asked for; -1 where it is not known."""

    flops: Ints
    size_bytes: Ints
    element_type: Ints  # index into Trace.names; that of the operator, whichever of its kernels this is
    operator: Ints  # entry of Trace.operators


def kernel_work(trace: Trace, rows: Ints, dense: Bools) -> KernelWork:
    """`dense` says which of these kernels are matrix products and the like, by their names: only they have FLOPs."""
    operator = _operators(trace, rows, dense)
    work = trace.operators
    is_longest = _is_longest(operator, trace.duration_ns[rows])
    does = np.where(is_longest, operator, ABSENT)
    return KernelWork(
        flops=np.where(dense, take_or_absent(work.flops, does), ABSENT),
        size_bytes=take_or_absent(work.size_bytes, does),
        element_type=take_or_absent(work.element_type, operator),
        operator=operator,
    )


def _operators(trace: Trace, rows: Ints, dense: Bools) -> Ints:
    if not len(trace.operators.row):
        return np.full(len(rows), ABSENT)
    entry = np.full(len(trace), ABSENT)
    entry[trace.operators.row] = np.arange(len(trace.operators.row))
    spans = nest(trace, np.flatnonzero(trace.of(Category.CPU_OP) & (trace.stream == ABSENT)))
    launch = launch_rows(trace)[rows]
    known = np.flatnonzero(launch != ABSENT)
    span = np.full(len(rows), ABSENT)
    span[known] = spans.around(launch[known], trace.start_ns[launch[known]])
    found = take_or_absent(entry, take_or_absent(spans.row, span))
    return np.where(dense, _with_flops(trace, spans, entry, span, found), found)


def _with_flops(trace: Trace, spans: Spans, entry: Ints, span: Ints, found: Ints) -> Ints:
    """The nearest operator around that has FLOPs; the innermost where none has."""
    best, at = found, span
    for _ in range(_MAX_CLIMBS):
        without = take_or_absent(trace.operators.flops, best) < 0
        if not (without & (at >= 0)).any():
            break
        at = np.where(without, take_or_absent(spans.parent, at), at)
        above = take_or_absent(entry, take_or_absent(spans.row, at))
        has = without & (take_or_absent(trace.operators.flops, above) >= 0)
        best = np.where(has, above, best)
    return best


def _is_longest(operator: Ints, duration_ns: Ints) -> Bools:
    """Whether each kernel is the longest of its operator, and takes most of its time."""
    is_longest = np.zeros(len(operator), dtype=bool)
    owned = np.flatnonzero(operator >= 0)
    if not len(owned):
        return is_longest
    group, count = number_groups(operator[owned])
    duration = duration_ns[owned].astype(np.float64)
    total = np.bincount(group, duration, count)
    order = np.lexsort((duration, group))
    last = np.append(group[order][1:] != group[order][:-1], True)
    longest = order[last]
    dominant = duration[longest] >= _DOMINANT_RATIO * total[group[longest]]
    is_longest[owned[longest[dominant]]] = True
    return is_longest
