"""The FLOPs and bytes of kernels, from the operators that launched them. The innermost operator around a launch owns
the kernel. Its work is given to its longest kernel, and only if the others are small: what a kernel of several does is
not known."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.models.device_peaks import DTYPES
from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.intervals import Spans, nest
from rankscope.analysis.traces.kernels import KernelClasses
from rankscope.analysis.traces.steps import launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, take_or_absent

# Of the time of an operator's kernels, so that the longest does its work.
_DOMINANT_RATIO = 2 / 3
# From a library's wrapper of a dense kernel to the operator that has the shapes: cudnn_convolution in convolution.
_MAX_CLIMBS = 4
_OF_ELEMENTS = {
    "double": "fp64",
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "signed char": "int8",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}
# In names of kernels on tensor cores whose operator is not known; the first that is found.
_IN_NAME = (
    (re.compile(r"e2m1|nvfp4|mxf4", re.IGNORECASE), "fp4"),
    (re.compile(r"e4m3|e5m2|fp8|float8", re.IGNORECASE), "fp8"),
    (re.compile(r"tf32|tensorop_s1688gemm(?!_\w*f16)", re.IGNORECASE), "tf32"),
    (re.compile(r"bf16|bfloat16", re.IGNORECASE), "bf16"),
    (re.compile(r"f16|fp16|half|h884|h1688|h16816", re.IGNORECASE), "fp16"),
    (re.compile(r"imma|i8816|i16832|int8", re.IGNORECASE), "int8"),
    (re.compile(r"f64|dgemm|double", re.IGNORECASE), "fp64"),
    (re.compile(r"f32|float", re.IGNORECASE), "tf32"),
)
_USUAL = "bf16"


@dataclass(frozen=True)
class KernelWork:
    """One entry per kernel that was asked for; -1 where it is not known."""

    flops: Ints
    size_bytes: Ints
    number_format: Ints  # that it computes in; index into DTYPES
    operator: Ints  # entry of Trace.operators


def kernel_work(trace: Trace, rows: Ints, classes: KernelClasses) -> KernelWork:
    """Of device work. Only dense kernels have FLOPs."""
    dense = classes.dense
    operator = _operators(trace, rows, dense)
    work = trace.operators
    is_longest = _is_longest(operator, trace.duration_ns[rows])
    does = np.where(is_longest, operator, ABSENT)
    return KernelWork(
        flops=np.where(dense, take_or_absent(work.flops, does), ABSENT),
        size_bytes=take_or_absent(work.size_bytes, does),
        number_format=_number_formats(trace, rows, classes, take_or_absent(work.element_type, operator)),
        operator=operator,
    )


def in_formats(trace: Trace, rows: Ints, classes: KernelClasses, *formats: str) -> Bools:
    """Which are dense kernels on tensor cores that compute in one of the formats."""
    wanted = [DTYPES.index(one) for one in formats]
    is_wanted: Bools = np.isin(kernel_work(trace, rows, classes).number_format, wanted)
    return is_wanted & classes.dense & classes.on_tensor_cores


def _number_formats(trace: Trace, rows: Ints, classes: KernelClasses, element_type: Ints) -> Ints:
    """Each distinct kernel is looked at once."""
    group, count = number_groups(trace.name[rows], element_type)
    first = np.zeros(count, dtype=np.int64)
    first[group] = np.arange(len(rows))
    found = [
        _number_format(
            trace.names[int(trace.name[rows[one]])],
            trace.named(int(element_type[one])),
            on_tensor_cores=bool(classes.on_tensor_cores[one]),
        )
        for one in first.tolist()
    ]
    return np.array([DTYPES.index(one) for one in found], dtype=np.int64)[group]


def _number_format(kernel: str, element_type: str, *, on_tensor_cores: bool) -> str:
    known = _OF_ELEMENTS.get(element_type)
    if not on_tensor_cores:
        # Without the operator, a kernel that is not on tensor cores computes in the usual precision of plain units.
        return known or "fp32"
    if known is None:
        return next((said for pattern, said in _IN_NAME if pattern.search(kernel)), _USUAL)
    return "tf32" if known == "fp32" else known


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
