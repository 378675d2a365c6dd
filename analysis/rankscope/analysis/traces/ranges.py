"""Time by the program's own annotations: `record_function`, and NVTX ranges that the probe made such annotations of.

A kernel belongs to the innermost annotation around its launch; work of the backward pass to that of its forward
operator."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from rankscope.analysis.quantities import shorten
from rankscope.analysis.stats.robust import number_groups
from rankscope.analysis.traces.breakdown import device_rows, whole_steps
from rankscope.analysis.traces.kernel_stacks import host_calls, nearest
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import find_steps, launch_rows, step_of_rows
from rankscope.analysis.traces.summary_records import RangeSummary
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, take_or_absent

MAX_RANGES: Final = 100
MAX_NAME_CHARACTERS: Final = 200
# What torch, its compiler, its frameworks and Rankscope annotate by themselves.
_NOT_OF_PROGRAM: Final = re.compile(
    r"ProfilerStep|Optimizer\.(step|zero_grad)#|[a-z]*ccl:|gloo:|mpi:|c10d::|enumerate\(DataLoader\)|"
    r"DistributedDataParallel\.|DDP|torch\.distributed|FullyShardedDataParallel\.|FSDP::|DeepSpeed|"
    r"PyTorch Profiler|Iteration Start: PyTorch|Torch-Compiled Region|TorchDynamo|## Call|CompiledFunction|"
    r"Inductor|Pregraph|AOTDispatcher|rankscope: "
)


def summarize_ranges(trace: Trace) -> tuple[RangeSummary, ...]:
    """Most time first; empty if the program annotates nothing."""
    is_range_name = ~names_like(trace, _NOT_OF_PROGRAM)
    annotations = trace.of(Category.USER_ANNOTATION)
    if not (annotations & is_range_name[trace.name]).any():
        return ()
    calls = host_calls(trace)
    spans = calls.spans
    is_range = annotations[spans.row] & is_range_name[trace.name[spans.row]]
    found = np.flatnonzero(is_range)
    names, count = number_groups(trace.name[spans.row[found]])
    group = np.full(len(spans.row), ABSENT)
    group[found] = names
    launches = launch_rows(trace)
    steps = find_steps(trace)
    whole = whole_steps(trace, steps, launches)
    position = step_of_rows(trace, steps, launches)
    is_counted = np.isin(position, whole) if len(whole) else np.ones(len(trace), dtype=bool)
    per_step = 1 / max(len(whole), 1)

    duration = trace.duration_ns[spans.row[found]] / 1000
    outer = take_or_absent(nearest(spans.parent, is_range), spans.parent[found])
    own = np.zeros(len(spans.row))
    own[found] = duration
    is_inner = outer >= 0
    np.subtract.at(own, outer[is_inner], duration[is_inner])
    counted = is_counted[spans.row[found]]
    host_us = np.bincount(names[counted], np.maximum(own[found][counted], 0.0), count) * per_step
    times = np.bincount(names[counted], minlength=count) * per_step

    rows = device_rows(trace)
    rows = rows[is_counted[rows]]
    around = take_or_absent(nearest(calls.parent, is_range), take_or_absent(calls.place, launches[rows]))
    place = take_or_absent(group, around)
    work_us = trace.duration_ns[rows] / 1000
    device_us = np.bincount(place[place >= 0], work_us[place >= 0], count) * per_step
    total_us = float(work_us.sum()) * per_step

    amounts, total = (device_us, total_us) if total_us > 0 else (host_us, float(host_us.sum()))
    first = np.zeros(count, dtype=np.int64)
    first[names[::-1]] = trace.name[spans.row[found]][::-1]
    order = np.lexsort((first, -host_us, -amounts))
    return tuple(
        RangeSummary(
            name=shorten(trace.named(first[at]), MAX_NAME_CHARACTERS),
            count=float(times[at]),
            host_us=float(host_us[at]),
            device_us=float(device_us[at]),
            share_ratio=float(amounts[at]) / total if total > 0 else 0.0,
        )
        for at in order[:MAX_RANGES].tolist()
        if times[at] > 0 or device_us[at] > 0
    )
