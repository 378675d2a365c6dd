"""Device memory and the flight recorder's counters: read about once a second, and while a rank is stalled."""

from __future__ import annotations

import pickle
from typing import Any, Tuple

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
    Not every torch has the recorder, and it is private: any failure is "not measured"."""
    bindings = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(bindings, "_dump_fr_trace", None) or getattr(bindings, "_dump_nccl_trace", None)
    if dump is None or not torch.distributed.is_initialized():
        return UNKNOWN_COLLECTIVES
    try:
        groups = list(pickle.loads(dump(includeCollectives=False))["pg_status"].values())
        enqueued = sum(max(0, group["last_enqueued_collective"]) for group in groups)
        completed = sum(max(0, group["last_completed_collective"]) for group in groups)
    except (TypeError, KeyError, RuntimeError, pickle.UnpicklingError):
        return UNKNOWN_COLLECTIVES
    return (enqueued, completed) if groups else UNKNOWN_COLLECTIVES
