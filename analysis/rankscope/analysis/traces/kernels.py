"""What kind of work an event on the device is, told by its name: each distinct name is looked at once."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rankscope.analysis.robust import Bools
from rankscope.analysis.traces.columns import ABSENT, Category, Trace


class Kind(IntEnum):
    NONE = 0  # neither work of a device nor communication on the host
    COMPUTE = 1
    COMMUNICATION = 2
    MEMORY = 3


Kinds = npt.NDArray[np.int8]

# NCCL, and RCCL which kept its names (ncclKernel_…, ncclDevKernel_…); what writes into its peers' memory by itself.
_NCCL = re.compile(r"nccl.*Kernel")
_COMMUNICATION = re.compile(
    r"nccl.*Kernel|.*\b(rccl|mscclpp?|nvshmem|rocshmem|deep_ep|c10d::|symm_mem)"
    r"|.*\b(one|two)_shot_(all_reduce|allreduce)|.*multimem_(one_shot_)?all_(reduce|gather)|.*\bcross_device_reduce",
    re.DOTALL,
)
# Host-side work of backends that do the transfer themselves; with NCCL the host only enqueues.
_HOST_COMMUNICATION = re.compile(r"(gloo|mpi|ucc):")
_HTA_MEMORY = re.compile(r"Memcpy|Memset|dma")
_HTA_NOT_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|.*Sync")
_TENSOR_CORE = re.compile(
    r"hmma|(?<![a-z])imma|wgmma|utcmma|tcgen05|mfma|wmma|s16816|s1688|s884|h884|h1688|h16816|i16832|i8816|xmma_gemm|xmma_fprop"
    r"|xmma_dgrad|xmma_wgrad|nvjet|tensorop|gmma|sm(90|100|103|120)_xmma|flash_?(fwd|bwd|attn|attention)"
    r"|fmha|attn_fwd|attn_bwd|_attn_fwd|Cijk_\w*(MI|MFMA)|cudnn_generated_fort_native_sdpa|deep_gemm|fp8_gemm|marlin",
    re.IGNORECASE,
)


def classify(trace: Trace) -> Kinds:
    """Kind of each row. Annotations on the device and synchronisation are NONE, as is everything on the host but the
    communication of gloo and its like."""
    kinds = np.full(len(trace), Kind.NONE, dtype=np.int8)
    kinds[trace.of(Category.MEMCPY, Category.MEMSET)] = Kind.MEMORY
    kernels = trace.of(Category.KERNEL)
    communication = names_like(trace, _COMMUNICATION)[trace.name]
    kinds[kernels] = np.where(communication[kernels], Kind.COMMUNICATION, Kind.COMPUTE)
    kinds[host_communication(trace)] = Kind.COMMUNICATION
    return kinds


def host_communication(trace: Trace) -> Bools:
    """Transfers that the host does itself: `gloo:…` and the like."""
    return trace.of(Category.USER_ANNOTATION) & names_like(trace, _HOST_COMMUNICATION)[trace.name]


def tensor_core(trace: Trace) -> Bools:
    """Kernels that by their name run on tensor or matrix cores."""
    return trace.of(Category.KERNEL) & names_like(trace, _TENSOR_CORE, anywhere=True)[trace.name]


def names_like(trace: Trace, pattern: re.Pattern[str], *, anywhere: bool = False) -> Bools:
    """Of each name of the trace, whether it begins with the pattern (or holds it)."""
    return _names_like(trace.names, pattern, anywhere)


@lru_cache(maxsize=32)  # several modules ask the same of one trace, and matching is most of what they cost
def _names_like(names: tuple[str, ...], pattern: re.Pattern[str], anywhere: bool) -> Bools:
    matches = pattern.search if anywhere else pattern.match
    found = np.fromiter((matches(name) is not None for name in names), dtype=bool, count=len(names))
    found.flags.writeable = False
    return found


def hta_kinds(trace: Trace) -> Kinds:
    """Kinds as Holistic Trace Analysis tells them, for the numbers that follow it: everything with a stream is work,
    whatever its category, and what is not NCCL, a copy or a `…Sync` is computation (a `Stream Wait Event` too)."""
    communication = names_like(trace, _NCCL)
    memory = names_like(trace, _HTA_MEMORY)
    compute = ~names_like(trace, _HTA_NOT_COMPUTE)
    by_name = np.select(
        (communication, memory, compute), (Kind.COMMUNICATION, Kind.MEMORY, Kind.COMPUTE), default=Kind.NONE
    ).astype(np.int8)
    return np.where(trace.stream != ABSENT, by_name[trace.name], np.int8(Kind.NONE))
