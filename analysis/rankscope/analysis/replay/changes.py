"""What could be changed about a job, each as a function from its graphs to others. `CHANGES` is the list."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rankscope.analysis.replay.bucket_changes import other_buckets
from rankscope.analysis.replay.compute_changes import (
    accumulated,
    bf16,
    double_batch,
    faster_kernels,
    fused_operators,
    recomputed,
    tf32,
)
from rankscope.analysis.replay.edits import NotApplicableError, Ranks, Traced, each, each_on_device, merged, of_launch
from rankscope.analysis.replay.graph import NOTHING, Graph
from rankscope.analysis.replay.replay import collective_wait_ns, replay
from rankscope.analysis.stats.robust import Bools
from rankscope.analysis.traces.communication.gradient_buckets import CAPS_MB
from rankscope.analysis.traces.kernels import Kind
from rankscope.analysis.traces.steps import OPTIMIZER_STEP
from rankscope.analysis.traces.trace import Category, Trace

# Memory that a fused optimizer reads and writes, as a share of what its separate kernels do. Adam without fusing takes
# eight passes over 21 arrays (weight decay, lerp, mul, addcmul, sqrt, div, add, addcdiv). Fused, it reads four and
# writes three. SGD with momentum: 5 of 11. On an H200 AdamW of 226 million parameters went from 4.8 to 1.65 ms.
_FUSED_SHARES = {"Adam": 7 / 21, "AdamW": 7 / 21, "SGD": 5 / 11}
_OPTIMIZER_NAME = re.compile(r"Optimizer\.step#(\w+)\.step")
_FUSED = re.compile(r"fused", re.IGNORECASE)
# From kernel to kernel within a graph: 559 kernels of a step on an H200 took 1.1 ms longer than their sum.
_GRAPH_WORK_NS = 2_000
_GRAPH_LAUNCH_NS = 30_000
# One call that launches more is a graph.
_GRAPH_WORKS = 8
_LINK_FACTOR = 2.0


@dataclass(frozen=True)
class Change:
    name: str
    what: str  # is then the case
    remedy: str  # what to do for it
    costs: str
    apply: Callable[[Ranks], Ranks]  # raises NotApplicableError
    samples: int = 1  # in a step, as a multiple of those before
    alters_training: bool = False  # other batches or updates: a decision of its own, never part of a default
    instead_of: tuple[str, ...] = ()  # changes that it cannot be combined with


def _without_input(ranks: Ranks) -> Ranks:
    if not any(one.graph.input_ns.any() for one in ranks.values()):
        raise NotApplicableError("no step waits for its input")

    def change(rank: Traced) -> Graph:
        graph = rank.graph
        return replace(graph, gap_ns=graph.gap_ns - graph.input_ns, input_ns=np.zeros_like(graph.input_ns))

    return each(change)(ranks)


def _fused_optimizer(rank: Traced) -> Graph:
    """The work of each step's optimizer becomes one kernel; the host's operators for it become one."""
    graph, trace = rank.graph, rank.trace
    share = _fused_share(trace)
    mine = of_launch(graph, graph.in_optimizer)
    if not mine.any():
        raise NotApplicableError("no work of an optimizer is in the trace")
    names = {trace.names[name] for name in np.unique(trace.name[graph.work_row[mine]]).tolist()}
    if any(_FUSED.search(name) for name in names):
        raise NotApplicableError("the optimizer is fused")
    duration, replacement = graph.duration_ns.copy(), np.arange(len(mine))
    gap, own, operators = graph.gap_ns.copy(), graph.own_ns.copy(), graph.optimizer_ns.copy()
    for step in np.unique(graph.work_step[mine]).tolist():
        works = np.flatnonzero(mine & (graph.work_step == step))
        replacement[works] = works[0]
        duration[works[0]] = round(share * int(duration[works].sum()))
        calls = np.unique(graph.launch[works])[1:]
        gap[calls] -= operators[calls]
        own[calls] = operators[calls] = 0
    fused = replace(graph, duration_ns=duration, gap_ns=gap, own_ns=own, optimizer_ns=operators)
    return merged(fused, replacement)


def _fused_share(trace: Trace) -> float:
    marks = np.unique(trace.name[trace.of(Category.USER_ANNOTATION)]).tolist()
    names = [trace.names[name] for name in marks if OPTIMIZER_STEP.match(trace.names[name])]
    kinds = {found[1] for name in names if (found := _OPTIMIZER_NAME.match(name))}
    if not kinds:
        raise NotApplicableError("the trace names no optimizer")
    unknown = sorted(kinds - set(_FUSED_SHARES))
    if unknown:
        raise NotApplicableError(f"what fusing {', '.join(unknown)} would bring is not known")
    return max(_FUSED_SHARES[kind] for kind in kinds)


def _cuda_graph(rank: Traced) -> Graph:
    """All launches of a step become one. What the host does for its input, or apart from operators, stays."""
    graph = rank.graph
    launching = np.zeros(len(graph.gap_ns), dtype=bool)
    launching[graph.launch[graph.launch != NOTHING]] = True
    works = np.bincount(graph.launch[graph.launch != NOTHING], minlength=len(launching))
    if works.max(initial=0) > max(_GRAPH_WORKS, len(graph.launch) / (2 * len(graph.steps))):
        raise NotApplicableError("a step is a graph already")
    inside = graph.call_step >= 0
    waiting = inside & ((graph.waits_for != NOTHING) | graph.waits_for_all)
    if waiting.any():
        raise NotApplicableError("the host waits for the device within the step, which a graph cannot hold")
    gap = np.where(inside, graph.input_ns + graph.apart_ns, graph.gap_ns)
    own = np.where(inside, 0, graph.own_ns)
    _, first = np.unique(np.where(inside & launching, graph.call_step, -1), return_index=True)
    own[first] += _GRAPH_LAUNCH_NS
    latencies = replace(graph.latencies, work_ns=_GRAPH_WORK_NS)
    return replace(
        graph, gap_ns=gap, own_ns=own, optimizer_ns=np.where(inside, 0, graph.optimizer_ns), latencies=latencies
    )


def _perfect_overlap(rank: Traced) -> Graph:
    """Nothing waits for communication; it still takes its time."""
    graph = rank.graph
    communicates = _communication(graph)
    waits = ~communicates[graph.earlier] | communicates[graph.later]
    # On a CPU it is the host that waits.
    waits_for = np.full_like(graph.waits_for, NOTHING) if graph.on_host else graph.waits_for
    return replace(graph, later=graph.later[waits], earlier=graph.earlier[waits], waits_for=waits_for)


def _communication(graph: Graph) -> Bools:
    communicates: Bools = graph.kind == Kind.COMMUNICATION
    if not communicates.any():
        raise NotApplicableError(f"the job does not communicate{'' if graph.on_host else ' on the device'}")
    return communicates


def _faster_link(rank: Traced) -> Graph:
    graph = rank.graph
    communicates = _communication(graph)
    faster = np.where(communicates, graph.duration_ns / _LINK_FACTOR, graph.duration_ns).astype(np.int64)
    return replace(graph, duration_ns=faster, transfer_ns=(graph.transfer_ns / _LINK_FACTOR).astype(np.int64))


def _no_straggler(ranks: Ranks) -> Ranks:
    """The rank that the others wait for works like the one in the middle."""
    if len(ranks) < 2:
        raise NotApplicableError("it needs the traces of several ranks")
    waits = waits_ns(ranks)
    if not any(waits.values()):
        raise NotApplicableError("the ranks share no collective in these traces")
    order = sorted(waits, key=lambda rank: waits[rank])
    return {**ranks, order[0]: ranks[order[len(order) // 2]]}


def waits_ns(ranks: Ranks) -> dict[int, int]:
    """By rank, how long it waits in collectives for others to enter."""
    times = replay({rank: one.graph for rank, one in ranks.items()})
    return {rank: int(collective_wait_ns(one.graph, times[rank]).sum()) for rank, one in ranks.items()}


def faster(pattern: str, factor: float) -> Change:
    """Kernels whose name contains the pattern take less time by the factor."""
    return Change(
        f"{pattern}*{factor:g}",
        f"kernels named {pattern} are {factor:g} times as fast",
        "better kernels",
        "unknown",
        each_on_device(partial(faster_kernels, pattern=pattern, factor=factor)),
    )


def are_alternatives(changes: Sequence[Change]) -> bool:
    """Whether one of them takes the place of another."""
    names = {change.name for change in changes}
    return any(names & set(change.instead_of) for change in changes)


def bucket(cap_mb: int) -> Change:
    return Change(
        f"bucket{cap_mb}",
        f"DDP's buckets hold {cap_mb} MB",
        f"bucket_cap_mb={cap_mb} for DistributedDataParallel",
        "nothing",
        partial(other_buckets, cap_mb=cap_mb),
        instead_of=tuple(f"bucket{other}" for other in CAPS_MB if other != cap_mb),
    )


CHANGES = (
    Change(
        "input",
        "no step waits for its next batch",
        "more workers for the DataLoader (num_workers, persistent_workers=True, prefetch_factor), pinned memory",
        "memory and cores of the host",
        _without_input,
    ),
    Change(
        "fused",
        "the optimizer is one kernel",
        "fused=True for the optimizer",
        "nothing",
        each_on_device(_fused_optimizer),
    ),
    Change(
        "graph",
        "a step is launched as one CUDA graph",
        "torch.compile(mode='reduce-overhead') or torch.cuda.graph, with capturable=True for the optimizer",
        "memory of its own for the graph, and shapes that do not change",
        each_on_device(_cuda_graph),
    ),
    Change(
        "bf16",
        "matrix products run in bf16",
        "torch.autocast('cuda', torch.bfloat16) around the forward pass",
        "accuracy of activations and gradients",
        each_on_device(bf16),
    ),
    Change(
        "tf32",
        "matrix products run in TF32",
        "torch.set_float32_matmul_precision('high')",
        "accuracy: 10 bits of the products' inputs in place of 23",
        each_on_device(tf32),
        instead_of=("bf16",),
    ),
    Change(
        "compile",
        "neighbouring kernels that only move data are one",
        "torch.compile",
        "time to compile at the start, and again when shapes change",
        each_on_device(fused_operators),
    ),
    Change(
        "batch2",
        "a step has twice as many samples",
        "a batch of twice the size",
        "memory for activations, and a learning rate for the larger batch",
        each_on_device(double_batch),
        samples=2,
        alters_training=True,
    ),
    Change(
        "accumulate4",
        "the optimizer runs after every fourth batch",
        "gradient accumulation over 4 batches, under no_sync() with DDP",
        "a learning rate for the larger batch",
        each_on_device(accumulated),
        alters_training=True,
    ),
    Change(
        "recompute",
        "activations are computed again for the backward pass",
        "torch.utils.checkpoint around each layer",
        "nothing; it frees the memory of activations",
        each_on_device(recomputed),
    ),
    Change(
        "overlap",
        "nothing waits for communication",
        "collectives that start earlier: DDP's buckets, FSDP's prefetch, async_op=True",
        "memory for what is fetched ahead",
        each(_perfect_overlap),
    ),
    bucket(5),
    bucket(100),
    Change(
        "link",
        "communication takes half as long",
        "half the bytes (for gradients: bf16, by DDP's bf16_compress_hook or FSDP's MixedPrecisionPolicy), or a link "
        "of twice the bandwidth",
        "accuracy of the gradients",
        each(_faster_link),
    ),
    Change(
        "even",
        "the slowest rank works like its peers",
        "see the verdict of `rankscope analyze trace` for what makes it slow",
        "nothing",
        _no_straggler,
    ),
)
