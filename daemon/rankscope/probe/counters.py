"""Device memory, and what torch's flight recorder knows: its counters, read about once a second and while a rank is
stalled, and the durations of collectives where the user has switched them on."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any, Dict, List, Tuple

from . import ring_layout
from .collective_spans import Groups

UNKNOWN_MEMORY = (-1, -1, -1, -1)
UNKNOWN_COLLECTIVES = (-1, -1)


def read_memory(torch: Any) -> Tuple[int, int, int, int]:
    """Allocated, reserved, peak and total bytes; never initialises CUDA."""
    if not torch.cuda.is_initialized():
        return UNKNOWN_MEMORY
    device = torch.cuda.current_device()
    return (
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.get_device_properties(device).total_memory,
    )


def read_collectives(torch: Any) -> Tuple[int, int]:
    """Collectives enqueued and completed, summed over process groups: a rank that is behind its peers never entered.
    NCCL's groups have a recorder of their own. Not every torch has them, and they are private: any failure is "not
    measured"."""
    bindings = getattr(torch._C, "_distributed_c10d", None)
    if bindings is None or not torch.distributed.is_initialized():
        return UNKNOWN_COLLECTIVES
    enqueued = completed = -1
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        try:
            groups = pickle.loads(getattr(bindings, name)(includeCollectives=False))["pg_status"].values()
            for group in groups:
                enqueued = max(0, enqueued) + max(0, group["last_enqueued_collective"])
                completed = max(0, completed) + max(0, group["last_completed_collective"])
        except (AttributeError, TypeError, KeyError, RuntimeError, pickle.UnpicklingError):
            continue
    return enqueued, completed


def dump_recorder(torch: Any) -> bytes:
    """The records of NCCL's groups, or of the other backends' if there are none, as torch pickles them. Without stacks:
    to resolve them, torch imports its compiler, which takes seconds. Holds the GIL for 35 ms with 2,000 records."""
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None and pickle.loads(dump(includeCollectives=False)).get("pg_status"):
            content: bytes = dump(includeStackTraces=False)
            if len(content) > ring_layout.MAX_RECORDER_BYTES:
                raise ValueError("its records take {} bytes; set TORCH_FR_BUFFER_SIZE=2000".format(len(content)))
            return content
    raise ValueError("it holds no collectives; set TORCH_FR_BUFFER_SIZE=2000 in the job")


class RecordedDurations:
    """Durations of collectives that no wrapper sees: those of compiled code and of CUDA graphs. NCCL measures them only
    with TORCH_NCCL_ENABLE_TIMING=1, which slows every collective down, so that the probe never sets it."""

    COST_BUDGET_RATIO = 0.003  # reading two thousand entries takes 50 ms

    def __init__(self) -> None:
        self.is_on = os.environ.get("TORCH_NCCL_ENABLE_TIMING", "").lower() in ("1", "true", "on", "yes", "y", "t")
        self._next_ns = 0
        self._seen_ns = 0  # when the newest collective that was read was issued

    def read(self, torch: Any, groups: Groups, step_seconds: float) -> None:
        start_ns = time.monotonic_ns()
        if start_ns < self._next_ns or step_seconds <= 0:
            return
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        try:
            entries = [] if dump is None else pickle.loads(dump(includeStackTraces=False)).get("entries", [])
            self._add(torch, groups, entries, step_seconds)
        except (AttributeError, TypeError, KeyError, RuntimeError, pickle.UnpicklingError):
            self.is_on = False  # another layout than those that are known
        now_ns = time.monotonic_ns()
        self._next_ns = now_ns + int((now_ns - start_ns) / self.COST_BUDGET_RATIO)

    def _add(self, torch: Any, groups: Groups, entries: List[Dict[str, Any]], step_seconds: float) -> None:
        timed = [
            entry
            for entry in entries
            if entry.get("duration_ms") is not None and entry["time_created_ns"] > self._seen_ns
        ]
        if len(timed) < 2:
            return
        issued = [entry["time_created_ns"] for entry in timed]
        self._seen_ns, covered = max(issued), (max(issued) - min(issued)) * 1e-9
        steps = round(covered / step_seconds)
        if steps < 1:
            return
        names = {name: group for group, name in torch.distributed.distributed_c10d._world.pg_names.items()}
        touched = {}
        for entry in timed:
            group = names.get(entry["process_group"][0])
            kind = ring_layout.GROUP_POINT_TO_POINT if entry.get("is_p2p") else ring_layout.GROUP_RECORDER
            slot = None if group is None else groups.slot(group, kind)
            if slot is not None:
                slot.seconds += entry["duration_ms"] * 1e-3
                touched[id(slot)] = slot
        for slot in touched.values():
            slot.samples += steps
            slot.step_seconds += steps * step_seconds
