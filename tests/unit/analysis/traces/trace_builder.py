"""Little traces by hand: a line per event, times in µs, what is not said is absent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.traces.trace import (
    ABSENT,
    Category,
    CollectiveColumns,
    Device,
    FlowColumns,
    MemoryColumns,
    ProcessGroup,
    Trace,
)

# name, category, start in µs, duration in µs, and any of the options below.
Event: TypeAlias = tuple[str, Category, float, float] | tuple[str, Category, float, float, dict[str, Any]]

ON_DEVICE = (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.GPU_ANNOTATION)
_PLACES = ("process", "thread", "device", "stream", "correlation", "external_id", "size_bytes")
_TEXTS = ("collective", "group", "group_description", "element_type")
_COUNTS = ("group_size", "sequence", "in_elements", "out_elements", "peer")


def make_trace(
    events: Sequence[Event],
    *,
    rank: int | None = 0,
    world_size: int | None = None,
    backend: str = "nccl",
    base_ns: int = 0,
    groups: tuple[ProcessGroup, ...] = (),
    devices: tuple[Device, ...] = (),
    memory: MemoryColumns | None = None,
) -> Trace:
    """Options of an event: process, thread, device, stream, correlation, external_id, size_bytes; and of a collective:
    collective, group, group_description, group_size, sequence, element_type, in_elements, out_elements, peer.
    A host event is on process 1, thread 1; a device event on device 0, stream 7."""
    lines = [(*event[:4], dict(event[4]) if len(event) > 4 else {}) for event in events]
    unknown = {key for *_, options in lines for key in options} - {*_PLACES, *_TEXTS, *_COUNTS}
    if unknown:
        raise ValueError(f"no such option of an event: {', '.join(sorted(unknown))}")
    lines.sort(key=lambda line: (line[2], -line[3]))
    for _, category, _, _, options in lines:
        if category in ON_DEVICE:
            options.setdefault("device", 0)
            options.setdefault("stream", 7)
            options.setdefault("process", options["device"])
            options.setdefault("thread", options["stream"])
        else:
            options.setdefault("process", 1)
            options.setdefault("thread", 1)

    names: dict[str, int] = {}

    def intern(text: str) -> int:
        return names.setdefault(text, len(names))

    def column(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    name = column([intern(line[0]) for line in lines])
    places = {key: column([line[4].get(key, ABSENT) for line in lines]) for key in _PLACES}
    noted = [row for row, line in enumerate(lines) if line[4].keys() & {*_TEXTS, *_COUNTS}]
    texts = {
        key: column([intern(str(lines[row][4][key])) if key in lines[row][4] else ABSENT for row in noted])
        for key in _TEXTS
    }
    counts = {key: column([int(lines[row][4].get(key, ABSENT)) for row in noted]) for key in _COUNTS}
    nothing = column([])
    return Trace(
        start_ns=column([round(line[2] * 1000) for line in lines]),
        duration_ns=column([round(line[3] * 1000) for line in lines]),
        category=np.array([line[1] for line in lines], dtype=np.int8),
        name=name,
        **places,
        names=tuple(names),
        base_ns=base_ns,
        rank=rank,
        world_size=world_size,
        backend=backend,
        devices=devices,
        groups=groups,
        collectives=CollectiveColumns(row=column(noted), **texts, **counts),
        memory=memory or MemoryColumns(*[nothing] * 4, np.array([], dtype=bool), *[nothing] * 4),
        flows=FlowColumns(nothing, nothing, nothing, nothing, np.array([], dtype=bool)),
        repairs=(),
    )
