"""Other buckets for DDP's gradients: the same gradients, from the same hooks, in all-reduces of another size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.replay.edits import NotApplicableError, Ranks, Traced, merged, with_copies
from rankscope.analysis.replay.graph import NOTHING, Graph
from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.communication.gradient_buckets import (
    MEBIBYTE,
    Gradients,
    find_buckets,
    gradients_of_steps,
    last_gradients,
)
from rankscope.analysis.traces.kernels import Kind

# Numbers of the new collectives begin here; those of a trace are fewer.
_FIRST_NUMBER = 1 << 40


@dataclass(frozen=True)
class _Reduced:
    """One rank's steps with their gradients, and the all-reduces of these."""

    rank: Traced
    steps: tuple[Gradients, ...]
    work: tuple[Ints, ...]  # by step, the all-reduces in the graph


def other_buckets(ranks: Ranks, cap_mb: int) -> Ranks:
    reduced = {rank: _find(one) for rank, one in ranks.items()}
    first = reduced[min(reduced)]
    latency_ns, ns_per_byte = _line(first)
    numbers = [step.number for step in first.steps]
    closed = [last_gradients(step, cap_mb * MEBIBYTE) for step in first.steps]
    sizes = [np.diff(np.cumsum(step.bytes)[ends], prepend=0.0) for step, ends in zip(first.steps, closed, strict=True)]
    durations = [(latency_ns + ns_per_byte * size).astype(np.int64) for size in sizes]
    for other in reduced.values():
        same = [step.number for step in other.steps] == numbers
        if not same or any(len(a.bytes) != len(b.bytes) for a, b in zip(other.steps, first.steps, strict=True)):
            raise NotApplicableError("the ranks do not reduce the same gradients in the same steps")
    return {rank: replace(one.rank, graph=_edit(one, closed, durations)) for rank, one in reduced.items()}


def _find(rank: Traced) -> _Reduced:
    graph, trace = rank.graph, rank.trace
    if graph.on_host:
        raise NotApplicableError("the job runs on the CPU")
    collectives = find_collectives(trace)
    buckets = find_buckets(trace, collectives)
    if not len(buckets):
        raise NotApplicableError("the trace shows no buckets of DDP")
    order = np.argsort(graph.work_row, kind="stable")
    steps, works = [], []
    for step in gradients_of_steps(buckets):
        row = collectives.kernel_row[buckets.collective[step.buckets]]
        place = order[np.minimum(np.searchsorted(graph.work_row, row, sorter=order), len(order) - 1)]
        if (graph.work_row[place] == row).all() and (graph.launch[place] != NOTHING).all():
            steps.append(step)
            works.append(place)
    if not steps or any(step.bytes.min() <= 0 for step in steps):
        raise NotApplicableError("the sizes of the buckets are not in the trace")
    return _Reduced(rank, tuple(steps), tuple(works))


def _line(reduced: _Reduced) -> tuple[float, float]:
    """Latency, and time per byte, of an all-reduce."""
    graph = reduced.rank.graph
    works = np.concatenate(reduced.work)
    size = np.concatenate([step.bucket_bytes for step in reduced.steps])
    took = np.where(graph.collective[works] != NOTHING, graph.transfer_ns[works], graph.duration_ns[works])
    sizes = np.unique(size)
    if len(sizes) < 2:
        raise NotApplicableError("buckets of one size do not tell latency from bandwidth")
    typical = np.array([np.median(took[size == one]) for one in sizes])
    slope, constant = _fit(sizes, typical)
    return constant, slope


def _fit(sizes: Floats, took: Floats) -> tuple[float, float]:
    slope, constant = np.polyfit(sizes, took, 1)
    if slope <= 0 or constant < 0:  # noise: through the origin
        return float(took.sum() / sizes.sum()), 0.0
    return float(slope), float(constant)


def _edit(reduced: _Reduced, closed: list[Ints], durations: list[Ints]) -> Graph:
    graph, trace = reduced.rank.graph, reduced.rank.trace
    called_ns = trace.start_ns[graph.call_row]
    calls, before, took, step_of = [], [], [], []
    for turn, (step, works) in enumerate(zip(reduced.steps, reduced.work, strict=True)):
        count = len(closed[turn])
        calls.append(np.full(count, graph.launch[works[0]]))
        hooks = np.searchsorted(called_ns, step.called_ns[closed[turn]])
        # The last bucket starts where it did: DDP has finished its hooks there.
        before.append(np.append(hooks[:-1], graph.launch[works[-1]]))
        took.append(durations[turn])
        step_of.append(np.full(count, turn))
    copied = with_copies(graph, np.concatenate(calls), np.concatenate(before), communication=True)
    made, new = copied.graph, np.flatnonzero(copied.is_copy)
    turn_of, duration = np.concatenate(step_of), np.concatenate(took)
    if len(new) != len(duration):
        raise NotApplicableError("an all-reduce is more than one kernel")
    shared = np.array([graph.collective[works[0]] != NOTHING for works in reduced.work])[turn_of]
    columns = {name: getattr(made, name).copy() for name in ("duration_ns", "transfer_ns", "collective")}
    columns["duration_ns"][new] = columns["transfer_ns"][new] = duration
    columns["collective"][new] = np.where(shared, _FIRST_NUMBER + np.arange(len(new)), NOTHING)
    originals = np.flatnonzero(~copied.is_copy)
    old = [originals[works] for works in reduced.work]
    last_new = new[np.searchsorted(turn_of, np.arange(len(old)), "right") - 1]
    replacement = np.arange(len(made.launch))
    for works, last in zip(old, last_new.tolist(), strict=True):
        replacement[works] = last
    # What an old bucket waited for is computed before one of the new ones anyway.
    waits = replacement[made.later] == made.later
    ready = _computed_before(made, new)
    made = replace(
        made,
        **columns,
        later=np.concatenate((made.later[waits], new[ready != NOTHING])),
        earlier=np.concatenate((made.earlier[waits], ready[ready != NOTHING])),
    )
    return merged(made, replacement)


def _computed_before(graph: Graph, works: Ints) -> Ints:
    """The last computation that was launched before each."""
    computes: Bools = graph.kind == Kind.COMPUTE
    positions = np.flatnonzero(computes)
    place = np.searchsorted(positions, works) - 1
    found: Ints = np.where(place >= 0, positions[np.maximum(place, 0)] if len(positions) else NOTHING, NOTHING)
    return found
