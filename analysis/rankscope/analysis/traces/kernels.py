"""Classifies device work by kernel name, and sums where the kernel time goes. Each distinct name is matched once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.intervals import nest
from rankscope.analysis.traces.summary_records import ComputeSummary, KernelSummary
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

Kinds = npt.NDArray[np.int8]
# NCCL and RCCL, which kept NCCL's names (ncclKernel_…, ncclDevKernel_…); kernels that write to peers' memory directly;
# MTIA's collectives.
_COMMUNICATION = re.compile(
    r"nccl.*Kernel|.*\b(nccl\w*Kernel|rccl|mscclpp?|nvshmem|rocshmem|deep_ep|c10d::|symm_mem)"
    r"|.*\b(one|two)_shot_(all_reduce|allreduce)|.*multimem_(one_shot_)?all_(reduce|gather)|.*\bcross_device_reduce"
    r"|hccl|collective_subgraph_execution",
    re.DOTALL,
)
# ROCm before 7.2 shows copies as kernels of its runtime.
_COPY = re.compile(r"__amd_rocclr_copy|MEMORY_COPY_")
# Backends that transfer on the host; with NCCL the host only enqueues.
_HOST_COMMUNICATION = re.compile(r"(gloo|mpi|ucc):")
_TENSOR_CORE = re.compile(
    r"hmma|(?<![a-z])imma|wgmma|utcmma|tcgen05|mfma|wmma|s16816|s1688|s884|h884|h1688|h16816|i16832|i8816|xmma_gemm|xmma_fprop"
    r"|xmma_dgrad|xmma_wgrad|nvjet|tensorop|gmma|sm(90|100|103|120)_xmma|flash_?(fwd|bwd|attn|attention)"
    r"|fmha|attn_fwd|attn_bwd|_attn_fwd|Cijk_\w*(MI|MFMA)|cudnn_generated_fort_native_sdpa|deep_gemm|fp8_gemm|marlin"
    r"|(?<![a-z])bmm_\w*(E4m3|E5m2|E2m1|Bfloat16|Fp16)\w*_t\d+x\d+",
    re.IGNORECASE,
)
TOP = 20
# cuBLAS and cuDNN name their products xmma also where plain FP32 units do them.
_PLAIN_UNITS = re.compile(r"_ffma_|simt_")
# FP32 matrix products without tensor cores. A name that indicates tensor cores takes precedence.
_PLAIN_MATRIX = re.compile(r"sgemm|dgemm|simt_|_ffma_|gemmSN|gemmk1|scudnn|implicit_convolve_sgemm", re.IGNORECASE)
_DENSE = re.compile(
    r"gemm|conv|fprop|dgrad|wgrad|attn|attention|fmha|flash|cutlass|xmma|nvjet|Cijk_|matmul|winograd|_mma_|wgmma|lstm|rnn"
    r"|triton_(tem|mm|bmm)",
    re.IGNORECASE,
)
_MOVING = re.compile(
    r"elementwise|reduce_kernel|softmax|layer_?norm|rms_?norm|batch_?norm|group_?norm|bn_(fw|bw)|copy|CatArray|index|gather"
    r"|scatter|embedding|multi_tensor_apply|dropout|[Ff]ill|transpose|permute|nll_loss|cross_entropy|gemv|radixsort|sort"
    r"|scan|\bcub::|where|adam|pool|memcpy|memset|triton_(poi|red|per)|GammaBeta|compute_grad|rotary|silu|gelu|swiglu"
    r"|nchwToNhwc|nhwcToNchw",
    re.IGNORECASE,
)
_FUSED = re.compile(r"triton_|fused", re.IGNORECASE)
_FP32_ATTENTION = re.compile(r"fmha_cutlass[FB]_f32")


class Kind(IntEnum):
    NONE = 0  # neither device work nor communication on the host
    COMPUTE = 1  # includes memory sets: torch fills a tensor by a kernel or by a memset
    COMMUNICATION = 2
    MEMORY = 3  # copies


def classify(trace: Trace) -> Kinds:
    """The kind of each row. NONE for annotations on the device, for synchronisation and for all host events except
    communication of gloo and similar backends."""
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
    """Transfers by the host itself: `gloo:…` and similar."""
    return trace.of(Category.USER_ANNOTATION) & names_like(trace, _HOST_COMMUNICATION)[trace.name]


def tensor_core(trace: Trace) -> Bools:
    """Kernels that, by their name, run on tensor or matrix cores."""
    of_name = names_like(trace, _TENSOR_CORE, anywhere=True) & ~names_like(trace, _PLAIN_UNITS, anywhere=True)
    return trace.of(Category.KERNEL) & of_name[trace.name]


def names_like(trace: Trace, pattern: re.Pattern[str], *, anywhere: bool = False) -> Bools:
    """Per name of the trace, whether it starts with the pattern (or contains it, with `anywhere`)."""
    return _names_like(trace.names, pattern, anywhere)


@lru_cache(maxsize=32)  # several modules match the same trace, and matching is most of their cost
def _names_like(names: tuple[str, ...], pattern: re.Pattern[str], anywhere: bool) -> Bools:
    matches = pattern.search if anywhere else pattern.match
    found = np.fromiter((matches(name) is not None for name in names), dtype=bool, count=len(names))
    found.flags.writeable = False
    return found


def top_kernels(trace: Trace, limit: int = TOP) -> tuple[KernelSummary, ...]:
    """By total time, longest first. Durations are summed even if they overlap."""
    kind = classify(trace)
    duration = trace.duration_ns
    rows = np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    if len(rows) == 0:
        rows = np.flatnonzero(trace.of(Category.CPU_OP))
        kind = np.full(len(trace), Kind.COMPUTE, dtype=np.int8)
        duration = _own_durations(trace, rows)
    size = len(trace.names)
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, trace.name[rows], duration[rows])
    counts = np.bincount(trace.name[rows], minlength=size)
    longest = np.zeros(size, dtype=np.int64)
    np.maximum.at(longest, trace.name[rows], duration[rows])
    kind_of_name = np.zeros(size, dtype=np.int8)
    kind_of_name[trace.name[rows]] = kind[rows]
    on_tensor_core = np.zeros(size, dtype=bool)
    on_tensor_core[trace.name[tensor_core(trace)]] = True
    everything = max(int(totals.sum()), 1)
    best = np.argsort(-totals, kind="stable")[:limit]
    return tuple(
        KernelSummary(
            name=trace.names[name],
            kind=Kind(int(kind_of_name[name])).name.lower(),
            tensor_core=bool(on_tensor_core[name]),
            count=int(counts[name]),
            total_us=int(totals[name]) / 1000,
            mean_us=float(totals[name] / counts[name]) / 1000,
            longest_us=int(longest[name]) / 1000,
            share_ratio=float(totals[name] / everything),
        )
        for name in best
        if counts[name]
    )


def _own_durations(trace: Trace, rows: Ints) -> Ints:
    """Per row, its duration without the rows that it directly encloses on its thread."""
    # Only the order of times matters here. Their ranks stay small even if the times of a corrupt trace are far apart.
    _, rank = np.unique(np.concatenate((trace.start_ns, trace.end_ns)), return_inverse=True)
    start, end = np.split(rank, 2)
    spans = nest(replace(trace, start_ns=start, duration_ns=end - start), rows)
    inner = spans.parent != ABSENT
    own: Ints = trace.duration_ns.copy()
    np.subtract.at(own, spans.row[spans.parent[inner]], trace.duration_ns[spans.row[inner]])
    np.maximum(own, 0, out=own)
    return own


@dataclass(frozen=True)
class KernelClasses:
    """What kernels do, by their names; one entry per row that was asked for. A kernel may be in no class."""

    dense: Bools  # matrix products, convolution, attention: limited by FLOP/s
    on_tensor_cores: Bools  # of the dense ones
    plain: Bools  # dense, known to be without tensor cores
    moving: Bools  # elementwise, norms, copies, fills: limited by memory bandwidth
    unfused: Bools  # of the moving ones
    fp32_attention: Bools  # of the dense ones


def classify_kernels(trace: Trace, rows: Ints) -> KernelClasses:
    is_set, is_copy = trace.of(Category.MEMSET)[rows], trace.of(Category.MEMCPY)[rows]
    names, name_of = np.unique(trace.name[rows], return_inverse=True)

    def like(pattern: re.Pattern[str]) -> Bools:
        # Only names of kernels: a trace has many more, and these patterns are slow.
        return np.array([pattern.search(trace.names[name]) is not None for name in names.tolist()], dtype=bool)[name_of]

    on_tensor_cores = tensor_core(trace)[rows]
    dense = (like(_DENSE) | on_tensor_cores) & ~is_copy
    moving = (like(_MOVING) & ~dense) | is_set | is_copy
    return KernelClasses(
        dense=dense,
        on_tensor_cores=on_tensor_cores,
        plain=like(_PLAIN_MATRIX) & ~on_tensor_cores,
        moving=moving,
        unfused=moving & ~is_set & ~like(_FUSED),
        fp32_attention=like(_FP32_ATTENTION),
    )


def summarize_compute(trace: Trace) -> ComputeSummary | None:
    """None if there are no computation kernels."""
    rows = np.flatnonzero(classify(trace) == Kind.COMPUTE)
    is_set = trace.of(Category.MEMSET)[rows]
    duration = trace.duration_ns[rows].astype(np.float64)
    total = float(duration.sum())
    if total <= 0 or is_set.all():
        return None
    classes = classify_kernels(trace, rows)

    def share(which: Bools) -> float:
        return float(duration[which].sum()) / total

    return ComputeSummary(
        moving_ratio=share(classes.moving),
        unfused_ratio=share(classes.unfused),
        plain_matrix_ratio=share(classes.plain),
        tensor_core_ratio=share(classes.on_tensor_cores),
        kernel_median_us=float(np.median(duration[~is_set])) / 1000,
        kernel_count=int((~is_set).sum()),
    )
