"""What a join needs of a trace, and no more: with a thousand ranks, columns of all events do not fit in memory."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT, Category, CollectiveColumns, MemoryColumns, Trace
from rankscope.analysis.traces.communication.collectives import Collectives, hiding_intervals

_NO_ROWS = np.zeros(0, dtype=np.int64)


def keep_essentials(trace: Trace, collectives: Collectives) -> tuple[Trace, Collectives]:
    """The steps' annotations, the calls and kernels of collectives, and everything that could hide them as one row per
    stretch of time. Joining these gives what joining the whole traces gives."""
    steps = np.fromiter((name.startswith("ProfilerStep") for name in trace.names), dtype=bool, count=len(trace.names))
    marked = np.flatnonzero(steps[trace.name] & trace.of(Category.USER_ANNOTATION, Category.CPU_OP))
    talking = np.concatenate((collectives.call_row, collectives.kernel_row))
    rows = np.unique(np.concatenate((marked, talking[talking >= 0])))
    busy_start, busy_end = hiding_intervals(trace)
    on_device = bool(trace.of(Category.KERNEL).any())
    names, name_of = np.unique(trace.name[rows], return_inverse=True)
    texts = (*(trace.names[index] for index in names.tolist()), "anything that computes")
    count = len(busy_start)
    start = np.concatenate((trace.start_ns[rows], busy_start))
    duration = np.concatenate((trace.duration_ns[rows], busy_end - busy_start))
    order = np.lexsort((-duration, start))

    def column(values: Ints, of_busy: int) -> Ints:
        return np.concatenate((values[rows], np.full(count, of_busy, dtype=np.int64)))[order]

    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    kind = np.int8(Category.KERNEL if on_device else Category.CPU_OP)
    small = Trace(
        start_ns=start[order],
        duration_ns=duration[order],
        category=np.concatenate((trace.category[rows], np.full(count, kind, dtype=np.int8)))[order],
        name=np.concatenate((name_of, np.full(count, len(names))))[order],
        process=column(trace.process, ABSENT),
        thread=column(trace.thread, ABSENT),
        device=column(trace.device, 0 if on_device else ABSENT),
        stream=column(trace.stream, 0 if on_device else ABSENT),
        correlation=column(trace.correlation, ABSENT),
        external_id=column(trace.external_id, ABSENT),
        size_bytes=column(trace.size_bytes, ABSENT),
        names=texts,
        base_ns=trace.base_ns,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        devices=trace.devices,
        groups=trace.groups,
        collectives=CollectiveColumns(*(_NO_ROWS for _ in fields(CollectiveColumns))),
        memory=MemoryColumns(_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS, np.zeros(0, dtype=bool), _NO_ROWS),
        repairs=trace.repairs,
    )

    def moved(old: Ints) -> Ints:
        if not len(rows):
            return old
        return np.where(old >= 0, place[np.minimum(np.searchsorted(rows, old), len(rows) - 1)], ABSENT)

    return small, replace(collectives, call_row=moved(collectives.call_row), kernel_row=moved(collectives.kernel_row))
