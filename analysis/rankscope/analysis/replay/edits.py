"""Edits of a graph that changes share: work that is gone, and calls that are made once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.replay.graph import CALL_COLUMNS, NOTHING, WORK_COLUMNS, Graph
from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.kernels import Kind
from rankscope.analysis.traces.trace import Trace


@dataclass(frozen=True)
class Traced:
    """One rank: its graph, and the trace that it was made of."""

    graph: Graph
    trace: Trace


Ranks = Mapping[int, Traced]


class NotApplicableError(Exception):
    """The change makes no sense for this job; the text says why."""


def each(change: Callable[[Traced], Graph]) -> Callable[[Ranks], Ranks]:
    return lambda ranks: {rank: replace(one, graph=change(one)) for rank, one in ranks.items()}


def each_on_device(change: Callable[[Traced], Graph]) -> Callable[[Ranks], Ranks]:
    def apply(ranks: Ranks) -> Ranks:
        if any(one.graph.on_host for one in ranks.values()):
            raise NotApplicableError("the job runs on the CPU")
        return each(change)(ranks)

    return apply


def of_launch(graph: Graph, column: Bools) -> Bools:
    """Per piece of work, the column of the call that launched it; false if that is not in the trace."""
    return np.where(graph.launch != NOTHING, column[graph.launch], False)


def host_ns(graph: Graph) -> Ints:
    """Per call, the host's time since the call before and in it."""
    return graph.gap_ns + graph.own_ns


def merged(graph: Graph, replacement: Ints) -> Graph:
    """Per piece of work, the one that takes its place: itself if it stays. What waited for work that is gone, or was
    waited for by it, waits for its replacement."""
    stays = replacement == np.arange(len(replacement))
    kept = np.flatnonzero(stays)
    position = (np.cumsum(stays) - 1)[replacement]
    later, earlier = position[graph.later], position[graph.earlier]
    # A wait for work that is launched later cannot be replayed.
    possible = earlier < later
    waits_for = np.where(graph.waits_for == NOTHING, NOTHING, position[graph.waits_for])
    return replace(
        graph,
        **{name: getattr(graph, name)[kept] for name in WORK_COLUMNS},
        later=later[possible],
        earlier=earlier[possible],
        waits_for=waits_for,
    )


@dataclass(frozen=True)
class Copied:
    graph: Graph
    calls: Ints  # the copies, in the order in which they were asked for
    is_copy: Bools  # per piece of work


def with_copies(graph: Graph, calls: Ints, before: Ints, *, communication: bool = False) -> Copied:
    """Each of `calls` is made once more, directly before the call `before`, with the work that it launches; that is
    communication only if asked for. Copies wait for nothing but their stream."""
    count = len(graph.gap_ns)
    order = np.argsort(np.concatenate((2 * np.arange(count) + 1, 2 * before)), kind="stable")
    source = np.concatenate((np.arange(count), calls))[order]
    is_copied_call = order >= count
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = {name: getattr(graph, name)[source] for name in CALL_COLUMNS}
    columns["gap_ns"] = np.where(is_copied_call, columns["gap_ns"] - columns["input_ns"], columns["gap_ns"])
    columns["input_ns"] = np.where(is_copied_call, 0, columns["input_ns"])
    columns["waits_for_all"] = columns["waits_for_all"] & ~is_copied_call

    first, last = (np.searchsorted(graph.launch, calls, side) for side in ("left", "right"))
    lengths = last - first
    copies = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
    launch = np.concatenate(
        (np.where(graph.launch == NOTHING, NOTHING, place[graph.launch]), np.repeat(place[count:], lengths))
    )
    works = np.concatenate((np.arange(len(graph.launch)), copies))
    is_copy = np.arange(len(works)) >= len(graph.launch)
    kept = ~is_copy | (graph.kind[works] != Kind.COMMUNICATION) | communication
    works, launch, is_copy = works[kept], launch[kept], is_copy[kept]
    order = np.argsort(launch, kind="stable")
    works, launch, is_copy = works[order], launch[order], is_copy[order]
    work_place = np.empty(len(graph.launch), np.int64)
    work_place[works[~is_copy]] = np.flatnonzero(~is_copy)
    waits_for = columns["waits_for"]
    waits_for = np.where(is_copied_call | (waits_for == NOTHING), NOTHING, work_place[waits_for])
    made = replace(
        graph,
        **{**columns, "waits_for": waits_for},
        **{**{name: getattr(graph, name)[works] for name in WORK_COLUMNS}, "launch": launch},
        later=work_place[graph.later],
        earlier=work_place[graph.earlier],
    )
    return Copied(made, place[count:], is_copy)
