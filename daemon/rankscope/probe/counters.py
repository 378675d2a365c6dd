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
