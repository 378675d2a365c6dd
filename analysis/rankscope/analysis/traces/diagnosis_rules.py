"""The rules of a diagnosis: each examines the evidence of a job and estimates what one way of losing time costs.

A rule's saving is an upper bound: the time gained if that loss vanished and nothing else changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct

from rankscope.analysis.quantities import count, quantity
from rankscope.analysis.traces.summary_records import BubbleSummary, ComputeSummary, RankSummary

_SMALL_MESSAGE_BYTES = 1 << 20
_MANY_COLLECTIVES = 8
# What bounds the job, and the title, by kind of finding.
_LOSSES = {
    "exposed_communication": ("communication", "exposed communication"),
    "pipeline_bubble": ("communication", "pipeline waits"),
    "waiting_for_ranks": ("communication", "waiting for the last rank in collectives"),
    "input_wait": ("input", "waiting for the next batch"),
    "launch_gaps": ("host", "the host launching work too late"),
    "synchronisation": ("host", "the host waiting for the device"),
    "memory_copies": ("memory", "exposed memory copies"),
    "no_tensor_cores": ("compute", "matrix products without tensor cores"),
    "unfused_kernels": ("memory", "kernels that only move data"),
    "allocator": ("memory", "allocating device memory during the step"),
}
# What to try next, by kind of finding. Suggestions name settings, so that they can be applied directly.
SUGGESTIONS = {
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
    "slow_rank": "Look at its machine first: clocks and throttling (nvidia-smi -q -d PERFORMANCE), CPU contention, a "
    "slow disk or link; move the job off it if it stays slow.",
    "slow_stage": "Move layers from the slow pipeline stage to others; the last one also carries the loss and the "
    "vocabulary.",
    "data_imbalance": "Give every rank as many tokens: sort or pack sequences by length, balance experts.",
    "slow_communication": "Check the network: NCCL_DEBUG=INFO for the transports taken, link errors, and `rankscope "
    "analyze alphabeta` for the bandwidth that these collectives should reach.",
    "waiting_for_ranks": "No rank is clearly slow. Record more steps, or the missing traces, to distinguish uneven "
    "work from a slow rank.",
}
_PREFETCH_SUGGESTION = (
    "Parameters are gathered too late: let FSDP prefetch (forward_prefetch=True, backward_prefetch=BACKWARD_PRE), or "
    "keep them between forward and backward (reshard_after_forward=False) where memory allows; gather and reduce in "
    "bf16 (MixedPrecisionPolicy)."
)
_DDP_SUGGESTION = (
    "Start the all-reduce of gradients earlier (another bucket_cap_mb, static_graph=True), send less (gradients in "
    "bf16 by DDP's bf16_compress_hook, accumulating over micro-batches under no_sync()), and compare busbw with what "
    "the links can do (`rankscope analyze alphabeta`)."
)
# Advice on exposed communication, by the kind of the groups that have most of it.
_OVERLAP_SUGGESTIONS = {
    "tensor": "Use sequence parallelism and run the collectives beside the matrix products (Megatron's "
    "--sequence-parallel with --tp-comm-overlap, torch.compile's async tensor parallelism), or make the tensor group "
    "smaller and keep it within NVLink.",
    "data": "Reduce gradients beside the backward pass (Megatron's --overlap-grad-reduce and --overlap-param-gather), "
    "in bf16, or after more micro-batches; compare busbw with what the links can do (`rankscope analyze alphabeta`).",
    "expert": "Exchange tokens in fewer, larger all-to-alls, bound them by a capacity factor, keep the expert group "
    "within a node, and compute shared experts meanwhile.",
    "embedding": "Do not share the embedding between the first and the last stage (Megatron's "
    "--untie-embeddings-and-output-weights), or reduce its gradients beside the backward pass.",
    "global": "Reduce norms, losses and flags together or in fewer steps: each such collective waits for all ranks.",
}
_OVERLAP_SUGGESTION = (
    "Start collectives earlier so that they run beside computation (async_op=True), send less, and compare busbw with "
    "what the links can do (`rankscope analyze alphabeta`)."
)
_SCHEDULE_SUGGESTION = (
    "Use more micro-batches a step, or an interleaved schedule (Megatron's --num-layers-per-virtual-pipeline-stage)."
)
_BALANCE_SUGGESTION = (
    "Even out the stages: move layers from those that others wait for; the last one also carries the loss and the "
    "vocabulary, the first one the embedding."
)
# Tensor cores are at least eight times as fast as FP32 without them (A100: 156 versus 19.5 TFLOP/s with TF32).
_PLAIN_MATRIX_SAVING = 7 / 8
# A chain of elementwise kernels reads and writes its data in every kernel; fused, once. Half is a conservative
# estimate.
_FUSING_SAVING = 1 / 2
# Kernels shorter than this cannot be launched one by one fast enough.
_SHORT_KERNEL_US = 10.0


class Finding(Struct, frozen=True):
    """`saving_us` is an upper bound per step (for the whole trace if it has no steps); `numbers` is the evidence in
    machine-readable form."""

    kind: str
    bound: str
    title: str
    saving_us: float
    saving_ratio: float
    evidence: str
    suggestion: str
    numbers: dict[str, float] = {}
    ranks: tuple[int, ...] = ()

    @property
    def largest_kind(self) -> str:
        """The kind of group that has most of exposed communication."""
        kinds = [name[len("exposed_") : -len("_us")] for name in self.numbers if name.startswith("exposed_")]
        return next((kind for kind in kinds if kind != "communication"), "unknown")


@dataclass(frozen=True)
class Evidence:
    """The typical rank: medians over the ranks of a job, which all step together."""

    ranks: tuple[RankSummary, ...]
    # The share of exposed communication that is waiting for others, by rank and kind of group, if known.
    wait_ratio: Mapping[int, Mapping[str, float]]

    @cached_property
    def step_us(self) -> float:
        """The whole span if a trace shows no steps."""
        return float(np.median([_step_us(rank) for rank in self.ranks]))

    @cached_property
    def shares(self) -> dict[str, float]:
        return self.shares_of(self.ranks)

    def shares_of(self, ranks: Sequence[RankSummary]) -> dict[str, float]:
        """Shares of the span by part. The parts do not overlap. Time in a pipeline's messages and waiting for others in
        a collective do not count as communication."""
        rows = []
        for rank in ranks:
            exposed = rank.parts_us["communication"]
            split = self.split_communication(rank)
            moved, messages = sum(split.values()), exposed * _share_of_kinds(rank).get("pipeline", 0.0)
            apart = {"communication": moved, "waiting": exposed - moved - messages, "pipeline": messages}
            rows.append({part: value / rank.span_us for part, value in {**rank.parts_us, **apart}.items()})
        return {part: float(np.median([row[part] for row in rows])) for part in rows[0]}

    def split_communication(self, rank: RankSummary) -> dict[str, float]:
        """Exposed communication in µs by kind of group, without waiting and without messages of pipelines."""
        exposed, waits = rank.parts_us["communication"], self.wait_ratio.get(-1 if rank.rank is None else rank.rank, {})
        shares = _share_of_kinds(rank) or {"unknown": 1.0}
        return {
            kind: exposed * share * (1 - waits.get(kind, 0.0)) for kind, share in shares.items() if kind != "pipeline"
        }

    @cached_property
    def kinds_of_communication(self) -> dict[str, float]:
        """Shares of what `split_communication` has on all ranks, the largest first."""
        sums: Counter[str] = Counter()
        for rank in self.ranks:
            sums.update(self.split_communication(rank))
        total = sum(sums.values())
        return {kind: value / total for kind, value in sums.most_common() if value > 0}

    def typical(self, of: Callable[[RankSummary], float | None]) -> float | None:
        known = [value for value in map(of, self.ranks) if value is not None]
        return float(np.median(known)) if known else None

    def per_step(self, of: Callable[[RankSummary], float | None]) -> float | None:
        """The amount per step of something counted over the whole trace."""

        def share(rank: RankSummary) -> float | None:
            counted = of(rank)
            return None if counted is None else per_step_share(rank, counted)

        return self.typical(share)

    def lost(self, part: str) -> tuple[float, float]:
        """Saving in µs per step and as a share of the step."""
        return self.shares[part] * self.step_us, self.shares[part]

    def finding(
        self, kind: str, saving_ratio: float, evidence: str, numbers: dict[str, float], suggestion: str | None = None
    ) -> Finding:
        bound, title = _LOSSES[kind]
        advice = SUGGESTIONS[kind] if suggestion is None else suggestion
        return Finding(kind, bound, title, saving_ratio * self.step_us, saving_ratio, evidence, advice, numbers)


def per_step_share(rank: RankSummary, counted: float) -> float:
    return counted * _step_us(rank) / rank.span_us


def _step_us(rank: RankSummary) -> float:
    return rank.step_us or rank.span_us


def _share_of_kinds(rank: RankSummary) -> dict[str, float]:
    """Shares of exposed communication by kind of group."""
    total = sum(rank.exposed_by_group_kind_us.values())
    return {kind: value / total for kind, value in rank.exposed_by_group_kind_us.items() if value > 0}


def _communication_suggestion(evidence: Evidence) -> str:
    """Chosen by the kind of group that most of the exposed communication is in, on the rank with most of that."""
    kind = next(iter(evidence.kinds_of_communication), "unknown")
    rank = max(evidence.ranks, key=lambda one: one.exposed_by_group_kind_us.get(kind, 0.0))
    mine = [one for one in rank.collectives if one.group_kind == kind]
    if kind == "data" and rank.buckets is not None and rank.buckets.advice:
        return f"{rank.buckets.advice[0].upper()}{rank.buckets.advice[1:]}."
    exposed = sum(one.exposed_us for one in mine)
    small = [
        one
        for one in mine
        if one.bytes_median is not None and one.bytes_median < _SMALL_MESSAGE_BYTES and one.count >= _MANY_COLLECTIVES
    ]
    if small and kind != "global" and sum(one.exposed_us for one in small) > exposed / 2:
        most = max(small, key=lambda one: one.exposed_us)
        means = "larger bucket_cap_mb, flattened parameters, " if kind == "data" else ""
        return (
            f"Most of it is {most.count} {most.title} with {quantity(most.bytes_median, 'B')}: latency, not bandwidth. "
            f"Coalesce them ({means}one call in place of many)."
        )
    if kind in ("data", "unknown") and rank.sharding is not None and rank.sharding.framework:
        late = [one for one in rank.sharding.gathers if one.kind == "all_gather"]
        if sum(one.exposed_us for one in late) > exposed / 2:
            return _PREFETCH_SUGGESTION
    if kind == "data" and rank.buckets is not None:
        return _DDP_SUGGESTION
    return _OVERLAP_SUGGESTIONS.get(kind, _OVERLAP_SUGGESTION)


def _communication(evidence: Evidence) -> Finding:
    saving, ratio = evidence.lost("communication")
    kinds = {kind: share * saving for kind, share in evidence.kinds_of_communication.items()}
    words = f"{quantity(saving, 'us')} a step of communication runs while nothing computes"
    if set(kinds) - {"unknown"}:
        names = {kind: "other" if kind == "unknown" else kind for kind in kinds}
        listed = [f"{names[kind]} {quantity(us, 'us')}" for kind, us in kinds.items() if us >= saving / 100]
        words += f" ({', '.join(listed)})"
    numbers = {"exposed_communication_us": saving} | {f"exposed_{kind}_us": us for kind, us in kinds.items()}
    overlap = evidence.typical(lambda rank: rank.overlap_ratio)
    if overlap is not None:
        words += f"; {quantity(overlap, 'ratio')} of all communication is hidden under computation"
        numbers["overlap_ratio"] = overlap
    if evidence.wait_ratio:
        words += "; waiting for other ranks is not counted here"
    if evidence.shares["pipeline"] > 0:
        words += f"{' and' if evidence.wait_ratio else ';'} pipeline waits are counted apart"
    return evidence.finding("exposed_communication", ratio, words, numbers, _communication_suggestion(evidence))


def _bubble(evidence: Evidence) -> Finding | None:
    """All time in messages between stages, with nothing computed meanwhile. No other finding counts it."""
    saving, ratio = evidence.lost("pipeline")
    bubbles = [rank.bubble for rank in evidence.ranks if rank.bubble is not None]
    words = f"ranks wait {quantity(saving, 'us')} a step in messages between stages, {quantity(ratio, 'ratio')} of it"
    numbers = {"bubble_ratio": ratio}
    expected = evidence.typical(lambda rank: rank.bubble.theoretical_ratio if rank.bubble else None)
    if expected is None:
        return evidence.finding("pipeline_bubble", ratio, words, numbers, _SCHEDULE_SUGGESTION)
    excess = max(ratio - expected, 0.0)
    # Only the first and the last stage see that the schedule is interleaved.
    chunks = max(one.chunks or 1 for one in bubbles)
    sends = evidence.typical(lambda rank: _sends(rank.bubble))
    stages = max(one.stages or 0 for one in bubbles)
    numbers |= {"theoretical_bubble_ratio": expected, "excess_bubble_ratio": excess, "stages": stages}
    schedule = f"the schedule of {count(stages, 'stage')}"
    if sends is not None:
        numbers |= {"microbatches": sends // chunks, "chunks": chunks}
        schedule += f" and {count(round(sends // chunks), 'micro-batch', 'micro-batches')}"
        schedule += f" in {count(chunks, 'chunk')}" if chunks > 1 else ""
    words += f"; {schedule} has {quantity(expected, 'ratio')} by construction, "
    words += f"{quantity(excess, 'ratio')} exceeds it" if excess > 0 else "and nothing exceeds it"
    advice = (_SCHEDULE_SUGGESTION, _BALANCE_SUGGESTION) if excess > 0 else (_SCHEDULE_SUGGESTION,)
    dominates = excess > ratio / 2
    return evidence.finding("pipeline_bubble", ratio, words, numbers, " ".join(advice[::-1] if dominates else advice))


def _sends(bubble: BubbleSummary | None) -> float | None:
    """Micro-batches times chunks."""
    return bubble.microbatches * (bubble.chunks or 1) if bubble is not None and bubble.microbatches else None


def _input(evidence: Evidence) -> Finding:
    saving, ratio = evidence.lost("input")
    words = f"nothing runs for {quantity(saving, 'us')} a step while the host waits in the data loader"
    return evidence.finding("input_wait", ratio, words, {"input_wait_us": saving})


def _launches(evidence: Evidence) -> Finding:
    saving, ratio = evidence.lost("host")
    launches = evidence.per_step(lambda rank: rank.launch.count if rank.launch else None)
    kernel_us = evidence.typical(lambda rank: rank.compute_mix.kernel_median_us if rank.compute_mix else None)
    words = f"nothing runs for {quantity(saving, 'us')} a step because the host has not launched the next kernel"
    numbers = {"host_bound_us": saving}
    if launches is not None:
        words += f"; {launches:,.0f} launches a step"
        numbers["launches_per_step"] = launches
    if kernel_us is not None:
        words += f", median kernel {quantity(kernel_us, 'us')}"
        numbers["kernel_median_us"] = kernel_us
    short = kernel_us is not None and kernel_us < _SHORT_KERNEL_US
    return evidence.finding(
        "launch_gaps", ratio, words, numbers, SUGGESTIONS["short_kernels" if short else "launch_gaps"]
    )


def _synchronisation(evidence: Evidence) -> Finding:
    saving, ratio = evidence.lost("synchronisation")
    idle = f"the device is idle for {quantity(saving, 'us')} a step"
    words = f"{idle}: the host waited for it and launched nothing meanwhile"
    return evidence.finding("synchronisation", ratio, words, {"synchronisation_us": saving})


def _copies(evidence: Evidence) -> Finding:
    saving, ratio = evidence.lost("memory_copies")
    total = evidence.per_step(lambda rank: rank.memory_copy_us) or 0.0
    words = f"copies take {quantity(total, 'us')} a step, {quantity(saving, 'us')} of it while no kernel runs"
    numbers = {"memory_copy_us": total, "exposed_memory_copy_us": saving}
    return evidence.finding("memory_copies", ratio, words, numbers)


def _plain_matrices(evidence: Evidence) -> Finding:
    share = _of_compute(evidence, lambda compute: compute.plain_matrix_ratio)
    spent = share * evidence.step_us
    words = f"{quantity(spent, 'us')} a step of matrix products run in FP32 without tensor cores"
    return evidence.finding("no_tensor_cores", share * _PLAIN_MATRIX_SAVING, words, {"plain_matrix_us": spent})


def _fusing(evidence: Evidence) -> Finding:
    share = _of_compute(evidence, lambda compute: compute.unfused_ratio)
    spent = share * evidence.step_us
    words = (
        f"elementwise, copying, normalising and reducing kernels take {quantity(spent, 'us')} a step; memory "
        "bandwidth bounds them, not arithmetic. Half of it is counted as the saving"
    )
    return evidence.finding("unfused_kernels", share * _FUSING_SAVING, words, {"unfused_us": spent})


def _allocations(evidence: Evidence) -> Finding:
    calls = evidence.per_step(lambda rank: rank.memory.allocator_calls) or 0.0
    spent = evidence.per_step(lambda rank: rank.memory.allocator_us) or 0.0
    words = (
        f"{count(round(calls), 'call')} a step to allocate or free device memory take the host "
        f"{quantity(spent, 'us')}, and each waits for the device"
    )
    numbers = {"allocator_calls_per_step": calls, "allocator_us": spent}
    return evidence.finding("allocator", spent / evidence.step_us, words, numbers)


def _of_compute(evidence: Evidence, ratio: Callable[[ComputeSummary], float]) -> float:
    """A share of computation as a share of the span."""
    return evidence.typical(lambda r: ratio(r.compute_mix) * r.compute_us / r.span_us if r.compute_mix else None) or 0.0


# All rules. Findings are ordered by their saving, not by this list.
RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    _communication,
    _bubble,
    _input,
    _launches,
    _synchronisation,
    _copies,
    _plain_matrices,
    _fusing,
    _allocations,
)
