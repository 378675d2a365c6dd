"""What to try next, by kind of finding. Advice names settings, so that it can be followed without a search."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.drawing.quantities import quantity
from rankscope.analysis.traces.summaries.records import RankSummary

_SMALL_MESSAGE_BYTES = 1 << 20
_MANY_COLLECTIVES = 8

NEXT = {
    "input_wait": "Give the DataLoader more workers (num_workers, persistent_workers=True, prefetch_factor), pin "
    "memory, and move decoding or tokenising out of the training process.",
    "short_kernels": "Kernels are short: launch fewer of them with torch.compile(mode='reduce-overhead') or CUDA "
    "graphs, a fused optimizer (fused=True), or a larger batch.",
    "launch_gaps": "Find what the host does between launches: Python in the step, logging, garbage collection, a busy "
    "CPU; a py-spy stack of the rank shows it. torch.compile takes most of Python out of the step.",
    "synchronisation": "Take .item(), .cpu(), print(loss) and torch.cuda.synchronize() out of the step, or do them "
    "every few steps; copy with non_blocking=True.",
    "memory_copies": "Copy from pinned memory with non_blocking=True on a stream of its own, keep what every step uses "
    "on the device, and look for offloading that is no longer needed.",
    "no_tensor_cores": "Use bf16 autocast, or torch.set_float32_matmul_precision('high') for TF32; keep sizes "
    "multiples of 8.",
    "unfused_kernels": "Fuse them: torch.compile, fused attention and cross-entropy, a fused optimizer (fused=True).",
    "allocator": "The caching allocator runs out and returns memory: leave it more room (smaller batch, activation "
    "checkpointing), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation.",
    "pipeline_bubble": "Use more micro-batches a step, or an interleaved schedule; where stages wait longer than the "
    "schedule alone explains, even out their layers.",
    "slow_rank": "Look at its machine first: clocks and throttling (nvidia-smi -q -d PERFORMANCE), CPU contention, a "
    "slow disk or link; move the job off it if it stays slow.",
    "slow_stage": "Move layers from the slow pipeline stage to others; the last one also carries the loss and the "
    "vocabulary.",
    "data_imbalance": "Give every rank as many tokens: sort or pack sequences by length, balance experts.",
    "slow_communication": "Check the network: NCCL_DEBUG=INFO for the transports taken, link errors, and `rankscope "
    "analyze alphabeta` for the bandwidth that these collectives should reach.",
    "waiting_for_ranks": "Nobody stands out enough to be named: compare the ranks' steps, and take more steps, or the "
    "traces that are missing, to tell uneven work from a slow rank.",
}

_GATHERS = (
    "Parameters are gathered too late: let FSDP prefetch (forward_prefetch=True, backward_prefetch=BACKWARD_PRE), or "
    "keep them between forward and backward (reshard_after_forward=False) where memory allows."
)
_OVERLAP = (
    "Start collectives earlier so that they run beside computation (DDP's buckets, FSDP's prefetch, async_op=True), "
    "send less (bf16 gradients, accumulating over micro-batches under no_sync()), and compare busbw with what the "
    "links can do (`rankscope analyze alphabeta`)."
)


def communication_next(ranks: Sequence[RankSummary]) -> str:
    """By what most of the exposed communication is made of, on the rank where it is longest."""
    rank = max(ranks, key=lambda one: one.exposed_communication_us)
    if rank.buckets is not None and rank.buckets.advice:
        return f"{rank.buckets.advice[0].upper()}{rank.buckets.advice[1:]}."
    exposed = sum(one.exposed_us for one in rank.collectives)
    small = [one for one in rank.collectives if _is_small(one.bytes_median) and one.count >= _MANY_COLLECTIVES]
    if small and sum(one.exposed_us for one in small) > exposed / 2:
        most = max(small, key=lambda one: one.exposed_us)
        return (
            f"Most of it is {most.count} {most.kind} of {quantity(most.bytes_median, 'B')}: latency, not bandwidth. "
            "Coalesce them (larger bucket_cap_mb, flattened parameters, one call in place of many)."
        )
    if rank.sharding is not None and rank.sharding.framework:
        late = [one for one in rank.sharding.gathers if one.kind == "all_gather"]
        if sum(one.exposed_us for one in late) > exposed / 2:
            return _GATHERS
    return _OVERLAP


def _is_small(size_bytes: float | None) -> bool:
    return size_bytes is not None and size_bytes < _SMALL_MESSAGE_BYTES
