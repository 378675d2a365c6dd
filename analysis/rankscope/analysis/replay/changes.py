"""What could be changed about a job, each as a function from its graphs to others. `CHANGES` is the list."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.replay.graph import NOTHING, WORK_COLUMNS, Graph
from rankscope.analysis.replay.replay import replay
from rankscope.analysis.stats.robust import Bools
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
class Traced:
    """One rank: its graph, and the trace that it was made of."""

    graph: Graph
    trace: Trace


Ranks = Mapping[int, Traced]


class NotApplicableError(Exception):
    """The change makes no sense for this job; the text says why."""


@dataclass(frozen=True)
class Change:
    name: str
    what: str  # is then the case
    remedy: str  # what to do for it
    costs: str
    apply: Callable[[Ranks], Ranks]  # raises NotApplicableError


def _each(change: Callable[[Traced], Graph]) -> Callable[[Ranks], Ranks]:
    return lambda ranks: {rank: replace(one, graph=change(one)) for rank, one in ranks.items()}


def _each_on_device(change: Callable[[Traced], Graph]) -> Callable[[Ranks], Ranks]:
    def apply(ranks: Ranks) -> Ranks:
        if any(one.graph.on_host for one in ranks.values()):
            raise NotApplicableError("the job runs on the CPU")
        return _each(change)(ranks)

    return apply


def _without_input(ranks: Ranks) -> Ranks:
    if not any(one.graph.input_ns.any() for one in ranks.values()):
        raise NotApplicableError("no step waits for its input")

    def change(rank: Traced) -> Graph:
        graph = rank.graph
        return replace(graph, gap_ns=graph.gap_ns - graph.input_ns, input_ns=np.zeros_like(graph.input_ns))

    return _each(change)(ranks)


def _without_work(graph: Graph, dropped: Bools) -> Graph:
    """Nothing that stays may wait for what is dropped: such waits are dropped too."""
    kept = np.flatnonzero(~dropped)
    position = np.where(dropped, NOTHING, np.cumsum(~dropped) - 1)
    waits = ~dropped[graph.later] & ~dropped[graph.earlier]
    waits_for = np.where(graph.waits_for == NOTHING, NOTHING, position[graph.waits_for])
    return replace(
        graph,
        **{name: getattr(graph, name)[kept] for name in WORK_COLUMNS},
        later=position[graph.later[waits]],
        earlier=position[graph.earlier[waits]],
        waits_for=waits_for,
    )


def _fused_optimizer(rank: Traced) -> Graph:
    """The work of each step's optimizer becomes one kernel; the host's operators for it become one."""
    graph, trace = rank.graph, rank.trace
    share = _fused_share(trace)
    mine = np.zeros(len(graph.launch), dtype=bool)
    known = graph.launch != NOTHING
    mine[known] = graph.in_optimizer[graph.launch[known]]
    if not mine.any():
        raise NotApplicableError("no work of an optimizer is in the trace")
    names = {trace.names[name] for name in np.unique(trace.name[graph.work_row[mine]]).tolist()}
    if any(_FUSED.search(name) for name in names):
        raise NotApplicableError("the optimizer is fused")
    duration, first = graph.duration_ns.copy(), np.zeros(len(mine), dtype=bool)
    gap, own, operators = graph.gap_ns.copy(), graph.own_ns.copy(), graph.optimizer_ns.copy()
    for step in np.unique(graph.work_step[mine]).tolist():
        works = np.flatnonzero(mine & (graph.work_step == step))
        first[works[0]] = True
        duration[works[0]] = round(share * int(duration[works].sum()))
        calls = np.unique(graph.launch[works])[1:]
        gap[calls] -= operators[calls]
        own[calls] = operators[calls] = 0
    fused = replace(graph, duration_ns=duration, gap_ns=gap, own_ns=own, optimizer_ns=operators)
    return _without_work(fused, mine & ~first)


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
    entered: dict[int, list[tuple[int, int]]] = {}
    for rank, one in ranks.items():
        shared = np.flatnonzero(one.graph.collective != NOTHING)
        for number, work in zip(one.graph.collective[shared].tolist(), shared.tolist(), strict=True):
            entered.setdefault(number, []).append((rank, int(times[rank].work_start_ns[work])))
    waits = dict.fromkeys(ranks, 0)
    for members in entered.values():
        latest = max(start for _, start in members)
        for rank, start in members:
            waits[rank] += latest - start
    return waits


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
        _each_on_device(_fused_optimizer),
    ),
    Change(
        "graph",
        "a step is launched as one CUDA graph",
        "torch.compile(mode='reduce-overhead') or torch.cuda.graph, with capturable=True for the optimizer",
        "memory of its own for the graph, and shapes that do not change",
        _each_on_device(_cuda_graph),
    ),
    Change(
        "overlap",
        "nothing waits for communication",
        "collectives that start earlier: DDP's buckets, FSDP's prefetch, async_op=True",
        "memory for what is fetched ahead",
        _each(_perfect_overlap),
    ),
    Change(
        "link",
        "communication takes half as long",
        "gradients in bf16 (DDP's bf16_compress_hook, FSDP's MixedPrecisionPolicy), or a link of twice the bandwidth",
        "accuracy of the gradients",
        _each(_faster_link),
    ),
    Change(
        "even",
        "the slowest rank works like its peers",
        "see the verdict of `rankscope analyze trace` for what makes it slow",
        "nothing",
        _no_straggler,
    ),
)
