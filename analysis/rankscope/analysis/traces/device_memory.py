"""Device memory from allocator events in a trace: peak, fragmentation, and which operations held the memory at the
peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.intervals import merge, nest
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import BACKWARD, OPTIMIZER_STEP
from rankscope.analysis.traces.summary_records import MemorySummary
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

# These operators allocate for their caller, which counts as the holder.
_FACTORY = re.compile(r"aten::(new_)?(empty|zeros|ones|full)(_like|_strided|_permuted)?$|aten::(resize_|to|_to_copy)$")
# A machine has few devices, and few threads allocate. Further ones in a forged trace are left out.
_MAX_DEVICES, _MAX_THREADS = 64, 32
_MAX_CLIMBS = 32
# Calls of the caching allocator when its cache is insufficient. Pinned host memory is not included.
_ALLOCATOR = re.compile(r"(cuda|hip)(Malloc|Free)(Async|Managed)?$|cuMem(Alloc|Free|Create|Release|Map|Unmap)\b")


@dataclass(frozen=True)
class Holder:
    name: str  # of the operation that allocated; empty if none was running
    size_bytes: int
    blocks: int


@dataclass(frozen=True)
class MeasuredMemory:
    """One device. Memory allocated before the trace began has no holder: mostly weights and optimizer state."""

    device: int
    on_device: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    fragmentation_ratio: float | None  # 1 − allocated ÷ reserved, when most was reserved
    before_trace_bytes: int  # this and the next three add up to the peak
    forward_bytes: int
    backward_bytes: int
    optimizer_bytes: int
    holders: tuple[Holder, ...]  # of memory allocated within the trace and live at the peak, largest first


def measure_memory(trace: Trace, *, most_holders: int = 10) -> tuple[MeasuredMemory, ...]:
    """One per device with allocator events; empty if the profiler ran without profile_memory=True."""
    memory = trace.memory
    known = memory.allocated_bytes >= 0
    places, count = number_groups(memory.on_device.astype(np.int64), memory.device)
    found = [rows[known[rows]] for rows in rows_of_groups(places, count)]
    return tuple(_measure(trace, rows, most_holders) for rows in found[:_MAX_DEVICES] if len(rows))


def _measure(trace: Trace, rows: Ints, most_holders: int) -> MeasuredMemory:
    memory = trace.memory
    allocated, reserved = memory.allocated_bytes[rows], memory.reserved_bytes[rows]
    peak = int(np.argmax(allocated))
    until = rows[: peak + 1]
    live = until[_live(memory.change_bytes[until])]
    sizes, moments = memory.change_bytes[live], memory.time_ns[live]
    optimizer = _within(trace, Category.USER_ANNOTATION, OPTIMIZER_STEP, moments)
    backward = _within(trace, Category.CPU_OP, BACKWARD, moments)
    backward &= ~optimizer
    largest = int(reserved.max())
    return MeasuredMemory(
        device=int(memory.device[rows[0]]),
        on_device=bool(memory.on_device[rows[0]]),
        peak_allocated_bytes=int(allocated[peak]),
        peak_reserved_bytes=largest if largest > 0 else None,
        fragmentation_ratio=_fragmentation(allocated, reserved) if largest > 0 else None,
        before_trace_bytes=int(allocated[peak] - sizes.sum()),
        forward_bytes=int(sizes[~optimizer & ~backward].sum()),
        backward_bytes=int(sizes[backward].sum()),
        optimizer_bytes=int(sizes[optimizer].sum()),
        holders=_holders(trace, sizes, moments, most_holders),
    )


def _fragmentation(allocated: Ints, reserved: Ints) -> float:
    fullest = reserved == reserved.max()
    return float(1 - allocated[fullest].max() / reserved.max())


def _live(change: Ints) -> Bools:
    """Which allocations were not freed by the end. Events have no address, so a freed block is assumed to be the
    latest of its size: a backward pass frees what the forward pass allocated."""
    count = len(change)
    order = np.lexsort((np.arange(count), np.abs(change)))
    sign = np.sign(change[order])
    group, _ = number_groups(np.abs(change[order]))
    depth = np.cumsum(sign)
    # The minimum depth from here to the end of the group. Groups get disjoint ranges of numbers, so that one pass
    # serves all.
    lifted = depth + group * (2 * count + 2)
    least = np.minimum.accumulate(lifted[::-1])[::-1]
    live = np.zeros(count, dtype=bool)
    live[order] = (sign > 0) & (least >= lifted)
    return live


def _within(trace: Trace, category: Category, pattern: re.Pattern[str], moments: Ints) -> Bools:
    spans = trace.of(category) & names_like(trace, pattern)[trace.name]
    start, end = merge(trace.start_ns[spans], trace.end_ns[spans])
    if len(start) == 0:
        return np.zeros(len(moments), dtype=bool)
    place = np.searchsorted(start, moments, side="right") - 1
    return np.asarray((place >= 0) & (moments <= end[np.maximum(place, 0)]))


def _holders(trace: Trace, sizes: Ints, moments: Ints, most: int) -> tuple[Holder, ...]:
    names = _allocating_names(trace, moments)
    distinct, place = np.unique(names, return_inverse=True)
    held = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(held, place.reshape(-1), sizes)
    blocks = np.bincount(place.reshape(-1), minlength=len(distinct))
    order = np.argsort(-held, kind="stable")[:most]
    return tuple(Holder(trace.named(int(distinct[i])), int(held[i]), int(blocks[i])) for i in order)


def _allocating_names(trace: Trace, moments: Ints) -> Ints:
    """The name of the innermost operation at each moment. Allocator events do not name their thread: of several
    threads, the operation that started last is taken, because the others wait."""
    found = np.full(len(moments), ABSENT, dtype=np.int64)
    rows = np.flatnonzero(trace.of(Category.CPU_OP))
    if len(rows) == 0 or len(moments) == 0:
        return found
    spans = nest(trace, rows)
    is_factory = names_like(trace, _FACTORY)[trace.name[spans.row]]
    started = np.full(len(moments), np.iinfo(np.int64).min)
    _, one_of_thread, counts = np.unique(spans.thread_of_row[spans.row], return_index=True, return_counts=True)
    busiest = np.sort(one_of_thread[np.argsort(-counts, kind="stable")[:_MAX_THREADS]])
    for witness in spans.row[busiest]:
        around = spans.around(np.full(len(moments), witness), moments)
        began = np.where(around >= 0, spans.start_ns[around], np.iinfo(np.int64).min)
        for _ in range(_MAX_CLIMBS):
            climbs = (around >= 0) & is_factory[around] & (spans.parent[around] >= 0)
            if not climbs.any():
                break
            around[climbs] = spans.parent[around[climbs]]
        later = began > started
        started[later] = began[later]
        found[later] = trace.name[spans.row[around[later]]]
    return found


def summarize_memory(trace: Trace) -> MemorySummary:
    calls = trace.of(Category.RUNTIME, Category.DRIVER) & names_like(trace, _ALLOCATOR)[trace.name]
    memory = trace.memory
    on_device = np.flatnonzero(memory.on_device)
    allocated, reserved = memory.allocated_bytes[on_device], memory.reserved_bytes[on_device]
    fragmentation = None
    if len(reserved) and reserved.max() > 0 and allocated.max() >= 0:
        fragmentation = _fragmentation(allocated, reserved)
    used = trace.device[trace.of(Category.KERNEL)]
    sizes = {device.index: device.memory_bytes for device in trace.devices}
    return MemorySummary(
        peak_allocated_bytes=_largest(allocated),
        peak_reserved_bytes=_largest(reserved),
        fragmentation_ratio=fragmentation,
        device_bytes=sizes.get(int(used[0])) if len(used) else None,
        allocator_calls=int(calls.sum()),
        allocator_us=float(trace.duration_ns[calls].sum()) / 1000,
    )


def _largest(values: Ints) -> int | None:
    known = values[values >= 0]
    return int(known.max()) if len(known) else None
