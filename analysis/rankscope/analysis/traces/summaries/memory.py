"""Device memory as one rank's trace tells it."""

from __future__ import annotations

import re

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.summaries.records import MemorySummary

# What the caching allocator does when its cache does not serve; pinned host memory is another matter.
_ALLOCATOR = re.compile(r"(cuda|hip)(Malloc|Free)(Async|Managed)?$|cuMem(Alloc|Free|Create|Release|Map|Unmap)\b")


def summarize_memory(trace: Trace) -> MemorySummary:
    calls = trace.of(Category.RUNTIME, Category.DRIVER) & names_like(trace, _ALLOCATOR)[trace.name]
    memory = trace.memory
    on_device = np.flatnonzero(memory.on_device)
    allocated, reserved = memory.allocated_bytes[on_device], memory.reserved_bytes[on_device]
    fragmentation = None
    if len(reserved) and reserved.max() > 0 and allocated.max() >= 0:
        fullest = reserved == reserved.max()
        fragmentation = float(1 - allocated[fullest].max() / reserved.max())
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
