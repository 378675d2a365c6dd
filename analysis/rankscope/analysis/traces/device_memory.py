"""Device memory from allocator events in a trace: peak, fragmentation, and which operations held the memory at the
peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.intervals import Spans, merge, nest
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import BACKWARD, OPTIMIZER_STEP
from rankscope.analysis.traces.summary_records import MemorySummary
from rankscope.analysis.traces.trace import ABSENT, Category, MemoryColumns, Trace, take_or_absent

# These operators allocate for their caller, which counts as the holder.
_FACTORY = re.compile(r"aten::(new_)?(empty|zeros|ones|full)(_like|_strided|_permuted)?$|aten::(resize_|to|_to_copy)$")
# A machine has few devices. Further ones in a forged trace are left out.
_MAX_DEVICES = 64
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
    return tuple(_measure(trace, rows, most_holders) for rows in allocator_rows(trace))


def allocator_rows(trace: Trace) -> list[Ints]:
    """The events of each device."""
    memory = trace.memory
    known = (memory.allocated_bytes >= 0) & (memory.change_bytes != 0)
    places, count = number_groups(memory.on_device.astype(np.int64), memory.device)
    found = [rows[known[rows]] for rows in rows_of_groups(places, count)]
    return [rows for rows in found[:_MAX_DEVICES] if len(rows)]


def _measure(trace: Trace, rows: Ints, most_holders: int) -> MeasuredMemory:
    memory = trace.memory
    allocated, reserved = memory.allocated_bytes[rows], memory.reserved_bytes[rows]
    peak = int(np.argmax(allocated))
    live = rows[live_at(memory, rows, peak)]
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
        holders=_holders(trace, live, most_holders),
    )


def _fragmentation(allocated: Ints, reserved: Ints) -> float:
    fullest = reserved == reserved.max()
    return float(1 - allocated[fullest].max() / reserved.max())


def live_at(memory: MemoryColumns, rows: Ints, event: int) -> Bools:
    """Which of the events allocated a block that lives after the event at this position."""
    position = np.arange(len(rows))
    allocates = memory.change_bytes[rows] > 0
    return np.asarray(allocates & (position <= event) & (freed_by(memory, rows) > event))


def freed_by(memory: MemoryColumns, rows: Ints) -> Ints:
    """Per event of one device, the position of the event that frees the block; their number if none does. Without
    addresses a freed block is assumed to be the latest of its size: a backward pass frees what the forward pass
    allocated."""
    change, address = memory.change_bytes[rows], memory.address[rows]
    if (address > 0).all():
        block, _ = number_groups(address)
    else:
        size, _ = number_groups(np.abs(change))
        block, _ = number_groups(size, _nesting(size, np.sign(change)))
    order = np.argsort(block, kind="stable")
    following = np.full(len(rows), len(rows))
    same = block[order][1:] == block[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following


def _nesting(group: Ints, sign: Ints) -> Ints:
    """Per event, how many blocks of its group live while its own does. The same number comes next when it is freed."""
    order = np.argsort(group, kind="stable")
    depth = np.cumsum(sign[order])
    first = np.searchsorted(group[order], group[order])
    before = depth[first] - sign[order][first]
    level = np.empty(len(group), dtype=np.int64)
    level[order] = depth - before + (sign[order] < 0)
    return level


def _within(trace: Trace, category: Category, pattern: re.Pattern[str], moments: Ints) -> Bools:
    spans = trace.of(category) & names_like(trace, pattern)[trace.name]
    start, end = merge(trace.start_ns[spans], trace.end_ns[spans])
    if len(start) == 0:
        return np.zeros(len(moments), dtype=bool)
    place = np.searchsorted(start, moments, side="right") - 1
    return np.asarray((place >= 0) & (moments <= end[np.maximum(place, 0)]))


def _holders(trace: Trace, events: Ints, most: int) -> tuple[Holder, ...]:
    sizes = trace.memory.change_bytes[events]
    distinct, place = np.unique(_allocating_names(trace, events), return_inverse=True)
    held = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(held, place.reshape(-1), sizes)
    blocks = np.bincount(place.reshape(-1), minlength=len(distinct))
    order = np.argsort(-held, kind="stable")[:most]
    return tuple(Holder(trace.named(int(distinct[i])), int(held[i]), int(blocks[i])) for i in order)


def _allocating_names(trace: Trace, events: Ints) -> Ints:
    """The name of the innermost operation around each allocator event."""
    spans = nest(trace, np.flatnonzero(trace.of(Category.CPU_OP)))
    around = spans_of_events(trace, spans, events)
    is_factory = names_like(trace, _FACTORY)[trace.name[spans.row]]
    for _ in range(_MAX_CLIMBS):
        climbs = np.flatnonzero(around >= 0)
        climbs = climbs[is_factory[around[climbs]] & (spans.parent[around[climbs]] >= 0)]
        if not len(climbs):
            break
        around[climbs] = spans.parent[around[climbs]]
    return take_or_absent(trace.name[spans.row], around)


def spans_of_events(trace: Trace, spans: Spans, events: Ints) -> Ints:
    """The innermost span around each allocator event on its thread; -1 if there is none."""
    memory = trace.memory
    keys = ((trace.process, memory.process[events]), (trace.thread, memory.thread[events]))
    thread, count = number_groups(*(np.concatenate(pair) for pair in keys))
    row_of_thread = np.full(count, ABSENT)
    row_of_thread[thread[: len(trace)]] = np.arange(len(trace))
    witness = row_of_thread[thread[len(trace) :]]
    found = np.full(len(events), ABSENT)
    known = np.flatnonzero(witness >= 0)
    found[known] = spans.around(witness[known], memory.time_ns[events[known]])
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
