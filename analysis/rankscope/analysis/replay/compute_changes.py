"""Changes of what the device computes: number formats, fusion, batches, recomputation, faster kernels."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from rankscope.analysis.models.device_peaks import PeakError, find_peak
from rankscope.analysis.replay.edits import (
    NotApplicableError,
    Traced,
    host_ns,
    merged,
    of_launch,
    with_copies,
)
from rankscope.analysis.replay.graph import NOTHING, Graph
from rankscope.analysis.replay.kernel_work import in_formats
from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.traces.kernels import KernelClasses, Kind, classify_kernels
from rankscope.analysis.traces.summary import device_name
from rankscope.analysis.traces.trace import Trace

# The shortest kernel of a matrix product, as seen on an H200, whatever its number format.
_MIN_KERNEL_NS = 4_000
# FP32 attention without loss of accuracy takes three products of TF32 for each.
_TF32_PRODUCTS_OF_FP32_ATTENTION = 3.0
# Autocast casts the input, the weight and the bias of a product, and a gradient of it. Measured on transformers with
# bias: 5.5 casts for the three products of a linear layer, of which 2.75 in its forward.
_FORWARD_CASTS, _BACKWARD_CASTS = 3, 1
_MICRO_BATCHES = 4
_ALL_REDUCE = re.compile(r"all_?reduce", re.IGNORECASE)
# A forward pass repeats with its layers if so many of its kernels are the same one period later.
_SAME_RATIO = 0.9


def tf32(rank: Traced) -> Graph:
    graph, trace = rank.graph, rank.trace
    plain = _classes(graph, trace).plain
    if not plain.any():
        raise NotApplicableError("no matrix product runs in FP32 without tensor cores")
    return replace(graph, duration_ns=_faster(graph, plain, _speedup(trace, "fp32", "tf32")))


def bf16(rank: Traced) -> Graph:
    """Matrix products reach the same share of a higher peak; autocast adds casts."""
    graph, trace = rank.graph, rank.trace
    classes = _classes(graph, trace)
    in_tf32 = in_formats(trace, graph.work_row, classes, "tf32") & ~classes.fp32_attention
    products = classes.plain | in_tf32
    if not products.any():
        raise NotApplicableError("no matrix product runs in FP32 or TF32")
    from_tf32 = _speedup(trace, "tf32", "bf16")
    factor = np.ones(len(graph.launch))
    factor[classes.plain] = _speedup(trace, "fp32", "bf16")
    factor[in_tf32] = from_tf32
    factor[classes.fp32_attention] = _TF32_PRODUCTS_OF_FP32_ATTENTION * from_tf32
    made = replace(graph, duration_ns=_faster(graph, factor > 1, factor))
    return _with_casts(made, products, classes.moving)


def _with_casts(graph: Graph, products: Bools, moving: Bools) -> Graph:
    """A cast takes as long as a typical operator of the backward pass, which has no Python, and a typical kernel that
    moves data."""
    calls = np.unique(graph.launch[products & (graph.launch != NOTHING)])
    is_launch = np.isin(np.arange(len(graph.gap_ns)), graph.launch)
    plain = is_launch & (graph.in_backward if (is_launch & graph.in_backward).any() else ~graph.in_optimizer)
    moving_ns = graph.duration_ns[moving & ~of_launch(graph, graph.in_optimizer)]
    if not len(calls) or not len(moving_ns):
        return graph
    casts = np.repeat(calls, np.where(graph.in_backward[calls], _BACKWARD_CASTS, _FORWARD_CASTS))
    copied = with_copies(graph, casts, casts)
    made = copied.graph
    gap, own, duration = made.gap_ns.copy(), made.own_ns.copy(), made.duration_ns.copy()
    own[copied.calls] = int(np.median(graph.own_ns[plain]))
    gap[copied.calls] = max(int(np.median(host_ns(graph)[plain])) - int(np.median(graph.own_ns[plain])), 0)
    duration[copied.is_copy] = int(np.median(moving_ns))
    apart = made.apart_ns.copy()
    apart[copied.calls] = 0
    return replace(made, gap_ns=gap, own_ns=own, apart_ns=apart, duration_ns=duration)


def fused_operators(rank: Traced) -> Graph:
    """Neighbouring kernels that only move data become one, which takes as long as the longest of them. The host's time
    stays: compiled code of a transformer launched as many kernels as before."""
    graph, trace = rank.graph, rank.trace
    optimizer = of_launch(graph, graph.in_optimizer)
    chained = _classes(graph, trace).unfused & ~optimizer & (graph.launch != NOTHING)
    duration, replacement = graph.duration_ns.copy(), np.arange(len(graph.launch))
    backward = of_launch(graph, graph.in_backward)
    for stream in range(graph.streams):
        works = np.flatnonzero(graph.stream == stream)
        follows = chained[works[1:]] & chained[works[:-1]]
        follows &= backward[works[1:]] == backward[works[:-1]]
        follows &= graph.work_step[works[1:]] == graph.work_step[works[:-1]]
        is_head = np.concatenate((np.ones(min(len(works), 1), dtype=bool), ~follows))
        heads = np.flatnonzero(is_head)
        replacement[works] = works[heads[np.cumsum(is_head) - 1]]
        duration[works[heads]] = np.maximum.reduceat(graph.duration_ns[works], heads)
    if (replacement == np.arange(len(replacement))).all():
        raise NotApplicableError("no two kernels that only move data follow each other")
    return merged(replace(graph, duration_ns=duration), replacement)


def double_batch(rank: Traced) -> Graph:
    """Everything but the optimizer and communication takes twice as long, and so does reading the batch."""
    graph = rank.graph
    grows = (graph.kind != Kind.COMMUNICATION) & ~of_launch(graph, graph.in_optimizer)
    longer = graph.duration_ns + np.maximum(graph.duration_ns - _MIN_KERNEL_NS, 0)
    return replace(
        graph,
        duration_ns=np.where(grows, longer, graph.duration_ns),
        gap_ns=graph.gap_ns + graph.input_ns,
        input_ns=2 * graph.input_ns,
    )


def accumulated(rank: Traced) -> Graph:
    """The optimizer, and DDP's reduction, run for one batch of four: on average a quarter of them in each."""
    graph, trace = rank.graph, rank.trace
    optimizer = of_launch(graph, graph.in_optimizer)
    reduces = of_launch(graph, graph.in_backward) & (graph.kind == Kind.COMMUNICATION)
    reduces &= names_of_work(graph, trace, _ALL_REDUCE)
    if not (optimizer | reduces).any():
        raise NotApplicableError("neither an optimizer nor a reduction of gradients is in the trace")
    quarter = optimizer | reduces
    calls = graph.in_optimizer
    return replace(
        graph,
        duration_ns=np.where(quarter, graph.duration_ns // _MICRO_BATCHES, graph.duration_ns),
        transfer_ns=np.where(reduces, graph.transfer_ns // _MICRO_BATCHES, graph.transfer_ns),
        gap_ns=np.where(calls, graph.gap_ns // _MICRO_BATCHES, graph.gap_ns),
        own_ns=np.where(calls, graph.own_ns // _MICRO_BATCHES, graph.own_ns),
        optimizer_ns=graph.optimizer_ns // _MICRO_BATCHES,
        apart_ns=np.where(calls, graph.apart_ns // _MICRO_BATCHES, graph.apart_ns),
    )


def recomputed(rank: Traced) -> Graph:
    """The forward pass runs once more before its backward pass. Of each layer, recomputation stops after what the
    backward pass needs: its last matrix product, and what follows, is not among it."""
    graph, trace = rank.graph, rank.trace
    launching = np.unique(graph.launch[(graph.launch != NOTHING) & (graph.kind == Kind.COMPUTE)])
    is_forward = ~graph.in_backward & ~graph.in_optimizer & (graph.call_step >= 0)
    forward = launching[is_forward[launching]]
    backward = np.flatnonzero(graph.in_backward)
    following = np.searchsorted(backward, forward)
    forward, following = forward[following < len(backward)], following[following < len(backward)]
    before = backward[following]
    within = graph.call_step[before] == graph.call_step[forward]
    forward, before = forward[within], before[within]
    if not len(forward):
        raise NotApplicableError("no forward pass before a backward pass is in the trace")
    needed = np.ones(len(forward), dtype=bool)
    first_work = np.searchsorted(graph.launch, forward)
    name, dense = trace.name[graph.work_row[first_work]], _classes(graph, trace).dense[first_work]
    for start in np.unique(before):
        mine = np.flatnonzero(before == start)
        needed[mine] = _needed_again(name[mine], dense[mine])
    return with_copies(graph, forward[needed], before[needed]).graph


def _needed_again(name: Ints, dense: Bools) -> Bools:
    """Of one forward pass, by call: all but the end of each layer, from its last matrix product on. All if the pass
    does not repeat."""
    needed = np.ones(len(name), dtype=bool)
    for period in range(2, len(name) // 2 + 1):
        same = name[period:] == name[:-period]
        if same.mean() < _SAME_RATIO:
            continue
        start = int(np.argmax(same))
        for layer in range(start, len(name), period):
            products = np.flatnonzero(dense[layer : layer + period])
            if len(products):
                needed[layer + int(products[-1]) : layer + period] = False
        break
    return needed


def faster_kernels(rank: Traced, pattern: str, factor: float) -> Graph:
    graph = rank.graph
    chosen = names_of_work(graph, rank.trace, re.compile(re.escape(pattern), re.IGNORECASE))
    if not chosen.any():
        raise NotApplicableError("no kernel has that name")
    duration = np.where(chosen, graph.duration_ns / factor, graph.duration_ns)
    return replace(graph, duration_ns=duration.astype(np.int64))


def names_of_work(graph: Graph, trace: Trace, pattern: re.Pattern[str]) -> Bools:
    """Per piece of work, whether its name contains the pattern."""
    names, name_of = np.unique(trace.name[graph.work_row], return_inverse=True)
    return np.array([pattern.search(trace.names[name]) is not None for name in names.tolist()], dtype=bool)[name_of]


def _classes(graph: Graph, trace: Trace) -> KernelClasses:
    """Of the work, by its names; what communicates or copies is in none."""
    classes = classify_kernels(trace, graph.work_row)
    computes = graph.kind == Kind.COMPUTE
    return KernelClasses(**{name: column & computes for name, column in vars(classes).items()})


def _faster(graph: Graph, chosen: Bools, factor: float | Floats) -> Ints:
    least = np.minimum(graph.duration_ns, _MIN_KERNEL_NS)
    faster = np.maximum(graph.duration_ns / factor, least).astype(np.int64)
    return np.where(chosen, faster, graph.duration_ns)


def _speedup(trace: Trace, old: str, new: str) -> float:
    device = device_name(trace)
    try:
        return find_peak(device, new).tflops / find_peak(device, old).tflops
    except PeakError as error:
        raise NotApplicableError(f"the speed of its arithmetic is not known: {error}") from None
