"""When the calls and the work of a graph begin and end, from their durations alone. Ranks meet in their collectives."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rankscope.analysis.replay.graph import MAX_QUEUE, NOTHING, Graph, ReplayError
from rankscope.analysis.stats.robust import Ints

# A rank tells a collective and when it enters; it is answered when the last rank enters.
_Rank: TypeAlias = Generator[tuple[int, int], int, "Times"]


@dataclass(frozen=True)
class Times:
    call_end_ns: Ints
    work_start_ns: Ints
    work_end_ns: Ints


def replay(graphs: Mapping[int, Graph]) -> dict[int, Times]:
    """Graphs by rank. A collective begins to transfer on all ranks when the last of them has entered."""
    members: dict[int, set[int]] = {}
    for rank, graph in graphs.items():
        for number in np.unique(graph.collective[graph.collective != NOTHING]).tolist():
            members.setdefault(number, set()).add(rank)
    running = {rank: _run(graph) for rank, graph in graphs.items()}
    entered: dict[int, dict[int, int]] = {}
    done: dict[int, Times] = {}
    answers: list[tuple[int, int | None]] = [(rank, None) for rank in running]
    while answers:
        rank, answer = answers.pop()
        try:
            number, start = next(running[rank]) if answer is None else running[rank].send(answer)
        except StopIteration as stopped:
            done[rank] = stopped.value
            continue
        waiting = entered.setdefault(number, {})
        waiting[rank] = start
        if len(waiting) == len(members[number]):
            latest = max(waiting.values())
            answers += [(one, latest) for one in waiting]
    if len(done) < len(graphs):
        raise ReplayError("ranks enter their collectives in different orders")
    return done


def _run(graph: Graph) -> _Rank:
    """In the order of launches: all that a call or its work waits for comes before it."""
    gap, own = graph.gap_ns.tolist(), graph.own_ns.tolist()
    waits_for, waits_for_all = graph.waits_for.tolist(), graph.waits_for_all.tolist()
    stream, duration = graph.stream.tolist(), graph.duration_ns.tolist()
    collective, transfer = graph.collective.tolist(), graph.transfer_ns.tolist()
    launch = graph.launch.tolist()
    launch_ns, work_ns, wake_ns = graph.latencies.launch_ns, graph.latencies.work_ns, graph.latencies.wake_ns
    earlier: dict[int, list[int]] = {}
    for one, other in zip(graph.later.tolist(), graph.earlier.tolist(), strict=True):
        earlier.setdefault(one, []).append(other)
    works = len(launch)
    work_start, work_end, call_end = [0] * works, [0] * works, [0] * len(gap)
    queued: list[list[int]] = [[] for _ in range(graph.streams)]  # the starts of work, by stream
    stream_end = [-(1 << 62)] * graph.streams
    recorded = graph.start_ns.tolist()
    work = 0
    # Work that was launched before the trace runs when it ran.
    while work < works and launch[work] == NOTHING:
        work_start[work], work_end[work] = recorded[work], recorded[work] + duration[work]
        stream_end[stream[work]] = work_end[work]
        queued[stream[work]].append(work_start[work])
        work += 1
    reached = int(graph.call_start_ns[0]) if len(gap) else 0
    last_end = max((end for end in stream_end), default=reached)
    start = reached
    # Comparisons in place of max(): this loop is most of a prediction's time.
    for call, host_ns in enumerate(gap):
        if reached + host_ns > start:
            start = reached + host_ns
        end = start + own[call]
        arrives = start + launch_ns
        while work < works and launch[work] == call:
            lane = stream[work]
            starts = queued[lane]
            if len(starts) >= MAX_QUEUE and starts[-MAX_QUEUE] > end:
                end = starts[-MAX_QUEUE]
                arrives = end - own[call] + launch_ns
            begin = stream_end[lane] + work_ns
            if arrives > begin:
                begin = arrives
            for other in earlier.get(work, ()):
                if work_end[other] + work_ns > begin:
                    begin = work_end[other] + work_ns
            if collective[work] == NOTHING:
                ended = begin + duration[work]
            else:
                ended = (yield collective[work], begin) + transfer[work]
            work_start[work], work_end[work] = begin, ended
            stream_end[lane] = ended
            starts.append(begin)
            if ended > last_end:
                last_end = ended
            work += 1
        if waits_for[call] != NOTHING:
            end = max(end, work_end[waits_for[call]] + wake_ns)
        elif waits_for_all[call]:
            end = max(end, last_end + wake_ns)
        call_end[call] = end
        reached = end
    return Times(np.array(call_end), np.array(work_start), np.array(work_end))


def call_starts(graph: Graph, times: Times) -> Ints:
    if not len(graph.gap_ns):
        return np.zeros(0, np.int64)
    reached = np.concatenate((graph.call_start_ns[:1], times.call_end_ns[:-1]))
    starts: Ints = np.maximum.accumulate(reached + graph.gap_ns)
    return starts


def collective_wait_ns(graph: Graph, times: Times) -> Ints:
    """Per piece of work, how long it waits for other ranks to enter its collective."""
    waited = times.work_end_ns - graph.transfer_ns - times.work_start_ns
    return np.where(graph.collective != NOTHING, waited, 0)


def step_ends(graph: Graph, call_end_ns: Ints, work_end_ns: Ints) -> Ints:
    """The end of each step: of its last work, or of its last call where it launches none."""
    ends = np.full(len(graph.steps), np.iinfo(np.int64).min)
    for step, end in ((graph.call_step, call_end_ns), (graph.work_step, work_end_ns)):
        np.maximum.at(ends, step[step >= 0], end[step >= 0])
    return np.maximum.accumulate(ends)


def step_ns(graph: Graph, call_end_ns: Ints, work_end_ns: Ints) -> float:
    """The mean step between the ends of the first and the last whole one; a single step from its first call on."""
    first, last = graph.step_range
    ends = step_ends(graph, call_end_ns, work_end_ns)
    if last > first:
        return float(ends[last] - ends[first]) / (last - first)
    calls = np.flatnonzero(graph.call_step == first)
    return float(ends[first] - (call_end_ns[calls[0]] - graph.own_ns[calls[0]]))
