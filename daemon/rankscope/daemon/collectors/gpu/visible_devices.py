"""Which GPU a process' environment says it will use. A claim to hold against what the driver sees, no more: a script
may choose another device, and an index means little unless the order of devices is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rankscope.daemon.collectors.gpu.readings import GpuReading

ENTRIES_READ: Final = 256
_EVERYTHING: Final = frozenset({"all"})
_NOTHING: Final = frozenset({"void", "none", "no-dev-files"})


def visible_gpus(environment: Mapping[str, str], gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """The GPUs in the order in which CUDA numbers them for the process; None where that cannot be told."""
    mounted = _mounted(environment.get("NVIDIA_VISIBLE_DEVICES"), gpus)
    if mounted is None:
        return None
    text = environment.get("CUDA_VISIBLE_DEVICES")
    whole = _in_cuda_order(environment, mounted)
    if text is None:
        return whole
    chosen: list[GpuReading] = []
    for entry in text.split(",")[:ENTRIES_READ]:
        entry = entry.strip()
        found = _by_index(entry, whole) if _is_number(entry) else _by_uuid(entry, gpus)
        # CUDA stops at the first entry that names no device: what follows is not visible ("0,-1,1" is GPU 0 alone).
        if found is _UNKNOWN:
            return None
        if found is None:
            break
        if found in chosen:
            return ()  # CUDA refuses a device that is named twice
        chosen.append(found)
    return tuple(chosen)


def claimed_gpu(environment: Mapping[str, str], local_rank: int, gpus: Sequence[GpuReading]) -> GpuReading | None:
    """The GPU the rank would use by convention: the only visible one, else the one its local rank numbers."""
    visible = visible_gpus(environment, gpus)
    if visible is None or not visible:
        return None
    if len(visible) == 1:
        return visible[0]
    return visible[local_rank] if local_rank < len(visible) else None


_UNKNOWN: Final = GpuReading(uuid="", index=-1, name="")  # an entry that may name a device, but which is not clear


def _mounted(text: str | None, gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """What the container runtime let into the container, in the driver's order."""
    whole = tuple(sorted((gpu for gpu in gpus if gpu.parent_uuid is None), key=lambda gpu: gpu.index))
    if text is None or not text.strip() or text.strip() in _EVERYTHING:
        return whole
    if text.strip() in _NOTHING:
        # Kubernetes' device plugin may hand devices over in another way and leave "void" here.
        return None
    mounted: set[str] = set()
    for entry in text.split(",")[:ENTRIES_READ]:
        entry = entry.strip()
        found = _by_index(entry, whole) if _is_number(entry) else _by_uuid(entry, gpus)
        if found is None or found is _UNKNOWN:
            return None
        mounted.add(found.uuid)
    return tuple(sorted((gpu for gpu in gpus if gpu.uuid in mounted), key=lambda gpu: (gpu.index, gpu.uuid)))


def _in_cuda_order(environment: Mapping[str, str], gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """The driver numbers by PCI address. CUDA puts the fastest first unless told; equal GPUs stay in that order."""
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        return None
    return tuple(gpus)


def _is_number(entry: str) -> bool:
    digits = entry.removeprefix("-")
    return digits.isascii() and digits.isdigit()


def _by_index(entry: str, gpus: Sequence[GpuReading] | None) -> GpuReading | None:
    if entry.startswith("-") or len(entry) > 4:
        return None
    if gpus is None:
        return _UNKNOWN
    index = int(entry)
    return gpus[index] if index < len(gpus) else None


def _by_uuid(entry: str, gpus: Sequence[GpuReading]) -> GpuReading | None:
    """Whole, or any beginning that only one has. MIG-GPU-<uuid>/<gi>/<ci> is how older drivers named a slice: there is
    nothing in a reading to hold its numbers against."""
    if entry.startswith("MIG-GPU-"):
        return _UNKNOWN
    if not entry.startswith(("GPU-", "MIG-")) or len(entry) <= len("GPU-"):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    if not matches and entry.startswith("MIG-"):
        return _UNKNOWN  # a slice that is not among the readings
    return matches[0] if len(matches) == 1 else None
