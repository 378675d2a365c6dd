"""What kind of work an event on the device is, told by its name: each distinct name is looked at once."""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rankscope.analysis.robust import Bools
from rankscope.analysis.traces.columns import Category, Trace


class Kind(IntEnum):
    NONE = 0  # neither work of a device nor communication on the host
    COMPUTE = 1  # with memory sets: torch fills a tensor by a kernel or by a set, as it happens
    COMMUNICATION = 2
    MEMORY = 3  # copies


Kinds = npt.NDArray[np.int8]

# NCCL, and RCCL which kept its names (ncclKernel_…, ncclDevKernel_…); what writes into its peers' memory by itself;
# MTIA's collectives.
_COMMUNICATION = re.compile(
    r"nccl.*Kernel|.*\b(nccl\w*Kernel|rccl|mscclpp?|nvshmem|rocshmem|deep_ep|c10d::|symm_mem)"
    r"|.*\b(one|two)_shot_(all_reduce|allreduce)|.*multimem_(one_shot_)?all_(reduce|gather)|.*\bcross_device_reduce"
    r"|hccl|collective_subgraph_execution",
    re.DOTALL,
)
# ROCm before 7.2 shows copies as kernels of its runtime.
_COPY = re.compile(r"__amd_rocclr_copy|MEMORY_COPY_")
# Host-side work of backends that do the transfer themselves; with NCCL the host only enqueues.
_HOST_COMMUNICATION = re.compile(r"(gloo|mpi|ucc):")
_TENSOR_CORE = re.compile(
    r"hmma|(?<![a-z])imma|wgmma|utcmma|tcgen05|mfma|wmma|s16816|s1688|s884|h884|h1688|h16816|i16832|i8816|xmma_gemm|xmma_fprop"
    r"|xmma_dgrad|xmma_wgrad|nvjet|tensorop|gmma|sm(90|100|103|120)_xmma|flash_?(fwd|bwd|attn|attention)"
    r"|fmha|attn_fwd|attn_bwd|_attn_fwd|Cijk_\w*(MI|MFMA)|cudnn_generated_fort_native_sdpa|deep_gemm|fp8_gemm|marlin"
    r"|(?<![a-z])bmm_\w*(E4m3|E5m2|E2m1|Bfloat16|Fp16)\w*_t\d+x\d+",
    re.IGNORECASE,
)


def classify(trace: Trace) -> Kinds:
    """Kind of each row. Annotations on the device and synchronisation are NONE, as is everything on the host but the
    communication of gloo and its like."""
    kinds = np.full(len(trace), Kind.NONE, dtype=np.int8)
    kinds[trace.of(Category.MEMSET)] = Kind.COMPUTE
    kinds[trace.of(Category.MEMCPY)] = Kind.MEMORY
    of_name = np.where(names_like(trace, _COPY), Kind.MEMORY, Kind.COMPUTE).astype(np.int8)
    of_name[names_like(trace, _COMMUNICATION)] = Kind.COMMUNICATION
    kernels = trace.of(Category.KERNEL)
    kinds[kernels] = of_name[trace.name[kernels]]
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
