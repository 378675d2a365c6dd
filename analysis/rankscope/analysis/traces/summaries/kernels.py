"""How computation divides: dense work that arithmetic bounds, and kernels that only move data through memory."""

from __future__ import annotations

import re

import numpy as np

from rankscope.analysis.robust import Bools
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.kernels import Kind, classify, tensor_core
from rankscope.analysis.traces.summaries.records import ComputeSummary

# FP32 products on the plain units; a name that shows tensor cores overrules it.
_PLAIN_MATRIX = re.compile(r"sgemm|dgemm|simt_|_ffma_|gemmSN|gemmk1|scudnn|implicit_convolve_sgemm", re.IGNORECASE)
_DENSE = re.compile(
    r"gemm|conv|fprop|dgrad|wgrad|attn|attention|fmha|flash|cutlass|xmma|nvjet|Cijk_|matmul|winograd|_mma_|wgmma|lstm|rnn"
    r"|triton_(tem|mm|bmm)",
    re.IGNORECASE,
)
_MOVING = re.compile(
    r"elementwise|reduce_kernel|softmax|layer_?norm|rms_?norm|batch_?norm|group_?norm|bn_(fw|bw)|copy|CatArray|index|gather"
    r"|scatter|embedding|multi_tensor_apply|dropout|[Ff]ill|transpose|permute|nll_loss|cross_entropy|gemv|radixsort|sort"
    r"|scan|\bcub::|where|adam|pool|memcpy|memset|triton_(poi|red|per)|GammaBeta|compute_grad|rotary|silu|gelu|swiglu",
    re.IGNORECASE,
)
_FUSED = re.compile(r"triton_|fused", re.IGNORECASE)


def mix_compute(trace: Trace) -> ComputeSummary | None:
    """None where no kernel computed."""
    rows = np.flatnonzero(classify(trace) == Kind.COMPUTE)
    is_set = trace.of(Category.MEMSET)[rows]
    duration = trace.duration_ns[rows].astype(np.float64)
    total = float(duration.sum())
    if total <= 0 or is_set.all():
        return None
    names, name_of = np.unique(trace.name[rows], return_inverse=True)

    def like(pattern: re.Pattern[str]) -> Bools:
        # Of kernels only: a trace names many more things, and these patterns are slow.
        return np.array([pattern.search(trace.names[name]) is not None for name in names.tolist()])[name_of]

    on_tensor_cores = tensor_core(trace)[rows]
    dense = like(_DENSE) | on_tensor_cores
    moving = (like(_MOVING) & ~dense) | is_set
    plain = like(_PLAIN_MATRIX) & ~on_tensor_cores
    unfused = moving & ~is_set & ~like(_FUSED)

    def share(which: Bools) -> float:
        return float(duration[which].sum()) / total

    return ComputeSummary(
        moving_ratio=share(moving),
        unfused_ratio=share(unfused),
        plain_matrix_ratio=share(plain),
        tensor_core_ratio=share(on_tensor_cores),
        kernel_median_us=float(np.median(duration[~is_set])) / 1000,
        kernel_count=int((~is_set).sum()),
    )
