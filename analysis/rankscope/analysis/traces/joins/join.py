"""Joins the traces of many ranks into one job: matches collectives, aligns clocks, finds who arrived last and who
waited, and reaches a verdict. `keep_essentials` reduces a trace to what a join needs, so that a thousand ranks fit
in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints, number_groups, rows_of_groups, take_rows
from rankscope.analysis.step_graph.clock_alignment import Clocks, align
from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown
from rankscope.analysis.traces.breakdown import Breakdown, break_down
from rankscope.analysis.traces.communication.collectives import PURPOSES, Collectives, compute_intervals
from rankscope.analysis.traces.intervals import difference, total, union
from rankscope.analysis.traces.joins.channels import Calls, gather_calls
from rankscope.analysis.traces.joins.collective_matching import Matched, match_calls
from rankscope.analysis.traces.joins.comparison import RankExcess, compare_losses, compare_ranks
from rankscope.analysis.traces.joins.operations import operations_in_steps
from rankscope.analysis.traces.joins.self_time import (
    Arrivals,
    StepTimes,
    find_arrivals,
    find_common_steps,
    measure_steps,
    waits_of_rank,
)
from rankscope.analysis.traces.joins.step_verdict import comparable, judge_steps
from rankscope.analysis.traces.trace import ABSENT, Category, CollectiveColumns, Trace
from rankscope.analysis.verdicts.critical_path import where_steps_go
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Confidence, Kind
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words

_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class RankWaits:
    collectives: int
    last: int  # how often it arrived last
    wait_us: float  # waiting for others, in all collectives
    exposed_wait_us: float | None  # the part of wait_us while nothing computed, in the compared steps
    transfer_us: float
    self_us_per_step: float | None


@dataclass(frozen=True)
class GroupWaits:
    group: str
    group_kind: str  # a GroupKind
    kind: str
    collectives: int
    ranks: tuple[int, ...]  # those with a trace
    last_arrivals: Mapping[int, int]
    wait_us: Mapping[int, float]
    transfer_us: float  # of all its collectives together


@dataclass(frozen=True)
class Join:
    clock_residual_us: float | None  # standard deviation of the ends of a collective on the common clock
    collectives_matched: int
    last_arrivals: Mapping[int, int]  # each collective counts once; 0 for ranks that were never last
    close_arrivals: int  # collectives in which the last two arrived closer together than the clocks can resolve
    waits: Mapping[int, RankWaits]
    groups: tuple[GroupWaits, ...]
    # The share of exposed time in collectives that was waiting for others, by rank and kind of group.
    exposed_wait_ratio: Mapping[int, Mapping[str, float]]
    verdict: Kind
    culprits: tuple[int, ...]
    stage: int | None
    impact_ratio: float | None
    confidence: Confidence
    reason: str
    excesses: tuple[RankExcess, ...]  # of the recorded ranks against each other, also where the job is not judged
    breakdown: StepBreakdown | None  # on the critical path; None without two steps of most ranks
    notes: tuple[str, ...]
    world_size: int
    steps: StepTimes
    clocks: Clocks
    matched: Matched
    arrivals: Arrivals


def join_traces(
    traces: Mapping[int, Trace],
    collectives: Mapping[int, Collectives],
    *,
    breakdowns: Mapping[int, Breakdown | None] | None = None,
    stage_of: Mapping[int, int] | None = None,
    policy: Policy = DEFAULT_POLICY,
) -> Join:
    """Traces by rank. `stage_of` gives each rank's pipeline stage, if known."""
    ranks = sorted(traces)
    calls = gather_calls(traces, collectives)
    matched = match_calls(calls)
    clocks = align(matched.ends, ranks)
    arrivals = find_arrivals(matched, clocks)
    impossible = int((~arrivals.possible).sum())
    notes = list(matched.notes)
    if impossible:
        notes.append(f"{impossible} matches are impossible (one rank left before another arrived); excluded")
        matched = matched.keep(arrivals.possible)
        clocks = align(matched.ends, ranks)
        arrivals = find_arrivals(matched, clocks)
    if breakdowns is None:
        breakdowns = {rank: break_down(trace) for rank, trace in traces.items()}
    common = find_common_steps(traces, breakdowns, np.unique(matched.calls.rank), clocks)
    steps = measure_steps(traces, collectives, breakdowns, matched, arrivals, clocks, common)
    world = _world_size(traces, calls)
    path, by_path = None, _have_roles(matched, world)
    is_seen = len(ranks) >= policy.ranks_seen_ratio * world
    if len(common.windows) > 1 and (by_path or is_seen):
        path = PathFinder(min_steps=1).find(operations_in_steps(traces, collectives, matched, clocks, common))
    notes += _alignment_notes(ranks, matched, clocks)
    last = np.bincount(np.searchsorted(ranks, matched.calls.rank[arrivals.last]), minlength=len(ranks))
    last_arrivals = dict(zip(ranks, last.tolist(), strict=True))
    verdict = judge_steps(
        steps, world, ranks, matched.count, clocks.residual_us, stage_of, policy, last_arrivals, path, by_path
    )
    excesses = compare_losses(path) if by_path else compare_ranks(comparable(steps), stage_of or {})
    return Join(
        clock_residual_us=clocks.residual_us,
        collectives_matched=matched.count,
        last_arrivals=last_arrivals,
        close_arrivals=int((arrivals.lead_ns <= 1000 * (clocks.residual_us or 0.0)).sum()),
        waits=_rank_waits(last_arrivals, collectives, matched, arrivals, steps),
        groups=_group_waits(matched, arrivals, collectives),
        exposed_wait_ratio=_exposed_wait_ratios(traces, collectives, matched, arrivals),
        verdict=verdict.kind,
        culprits=verdict.culprits,
        stage=verdict.stage,
        impact_ratio=verdict.impact_ratio,
        confidence=verdict.confidence,
        reason=verdict.reason,
        excesses=excesses,
        breakdown=where_steps_go([path], verdict.culprits) if path is not None and is_seen else None,
        notes=tuple(notes),
        world_size=world,
        steps=steps,
        clocks=clocks,
        matched=matched,
        arrivals=arrivals,
    )


def _have_roles(matched: Matched, world_size: int) -> bool:
    """Return whether ranks meet in messages, or in groups smaller than the job: they may do different work then."""
    channels = [matched.channels[number] for number in np.unique(matched.channel).tolist()]
    return any(channel.pair is not None or 1 < channel.size < world_size for channel in channels)


def _world_size(traces: Mapping[int, Trace], calls: Calls) -> int:
    known = max((trace.world_size or 0 for trace in traces.values()), default=0)
    largest = max((channel.size for channel in calls.channels), default=0)
    return max(known, largest, len(traces), max(traces, default=-1) + 1)


def _alignment_notes(ranks: list[int], matched: Matched, clocks: Clocks) -> list[str]:
    notes = []
    unmatched = sorted(set(ranks) - set(matched.calls.rank.tolist()))
    if unmatched and len(ranks) > 1:
        notes.append(f"{ranks_in_words(unmatched)}: no collective in common with another trace; clock not aligned")
    apart = [part for part in clocks.components if len(part) > 1]
    if len(apart) > 1:
        listed = "; ".join(ranks_in_words(part) for part in apart)
        notes.append(
            f"{len(apart)} sets of ranks share no collective; their clocks are not aligned with each other: {listed}"
        )
    return notes


def _rank_waits(
    last_arrivals: Mapping[int, int],
    collectives: Mapping[int, Collectives],
    matched: Matched,
    arrivals: Arrivals,
    steps: StepTimes,
) -> dict[int, RankWaits]:
    row = {rank: position for position, rank in enumerate(steps.rank.tolist())}
    found = {}
    for rank, count in last_arrivals.items():
        measured = rank in row and len(steps.step) > 0
        rows, wait = waits_of_rank(rank, matched, arrivals)
        waited = float(wait.sum()) / 1000
        found[rank] = RankWaits(
            collectives=len(rows),
            last=count,
            wait_us=waited,
            exposed_wait_us=float(np.nansum(steps.wait_ns[row[rank]])) / 1000 if measured else None,
            transfer_us=float(collectives[rank].duration_ns[rows].sum()) / 1000 - waited,
            self_us_per_step=float(np.nanmean(steps.self_ns[row[rank]])) / 1000 if measured else None,
        )
    return found


def _exposed_wait_ratios(
    traces: Mapping[int, Trace], collectives: Mapping[int, Collectives], matched: Matched, arrivals: Arrivals
) -> dict[int, dict[str, float]]:
    ratios: dict[int, dict[str, float]] = {}
    for rank, trace in traces.items():
        rows, wait = waits_of_rank(rank, matched, arrivals)
        begun, ended = collectives[rank].start_ns[rows], collectives[rank].end_ns[rows]
        turned = begun + np.minimum(wait, ended - begun)  # from waiting to transfer
        purpose, hiding = collectives[rank].purpose[rows], compute_intervals(trace)
        of_rank = ratios[rank] = {}
        for kind in np.unique(purpose).tolist():
            mine = purpose == kind
            waited = total(*difference(union(begun[mine], turned[mine]), hiding))
            moved = total(*difference(union(turned[mine], ended[mine]), hiding))
            if waited + moved:
                of_rank[PURPOSES[kind].value] = waited / (waited + moved)
    return ratios


def _group_waits(
    matched: Matched, arrivals: Arrivals, collectives: Mapping[int, Collectives]
) -> tuple[GroupWaits, ...]:
    found = []
    purpose = np.zeros(len(matched.calls), dtype=np.int64)
    for rank, rows in collectives.items():
        mine = matched.calls.rank == rank
        purpose[mine] = rows.purpose[matched.calls.row[mine]]
    numbers, count = number_groups(matched.channel, matched.kind)
    groups, calls = rows_of_groups(numbers, count), rows_of_groups(numbers[matched.collective], count)
    for chosen, members in zip(groups, calls, strict=True):
        channel, kind = int(matched.channel[chosen[0]]), int(matched.kind[chosen[0]])
        ranks, index = np.unique(matched.calls.rank[members], return_inverse=True)
        wait = np.bincount(index, weights=arrivals.wait_ns[members]) / 1000
        came_last = matched.calls.rank[arrivals.last[chosen]]
        found.append(
            GroupWaits(
                group=matched.channels[channel].label,
                group_kind=PURPOSES[int(purpose[members].min())].value,
                kind=CollectiveKind(kind).label,
                collectives=len(chosen),
                ranks=tuple(ranks.tolist()),
                last_arrivals={rank: int((came_last == rank).sum()) for rank in ranks.tolist()},
                wait_us=dict(zip(ranks.tolist(), wait.tolist(), strict=True)),
                transfer_us=float(arrivals.transfer_ns[chosen].sum()) / 1000,
            )
        )
    return tuple(found)


def keep_essentials(trace: Trace, collectives: Collectives) -> tuple[Trace, Collectives]:
    """Keep the annotations of steps, the calls and kernels of collectives, and the intervals of computation, one row
    each. Joining these gives the same result as joining the whole traces."""
    steps = np.fromiter((name.startswith("ProfilerStep") for name in trace.names), dtype=bool, count=len(trace.names))
    marked = np.flatnonzero(steps[trace.name] & trace.of(Category.USER_ANNOTATION, Category.CPU_OP))
    communicating = np.concatenate((collectives.call_row, collectives.kernel_row))
    rows = np.unique(np.concatenate((marked, communicating[communicating >= 0])))
    busy_start, busy_end = compute_intervals(trace)
    on_device = bool(trace.of(Category.KERNEL).any())
    names, name_of = np.unique(trace.name[rows], return_inverse=True)
    texts = (*(trace.names[index] for index in names.tolist()), "anything that computes")
    count = len(busy_start)
    start = np.concatenate((trace.start_ns[rows], busy_start))
    duration = np.concatenate((trace.duration_ns[rows], busy_end - busy_start))
    order = np.lexsort((-duration, start))

    def column(values: Ints, of_busy: int) -> Ints:
        return np.concatenate((values[rows], np.full(count, of_busy, dtype=np.int64)))[order]

    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    kind = np.int8(Category.KERNEL if on_device else Category.CPU_OP)
    small = replace(
        trace,
        start_ns=start[order],
        duration_ns=duration[order],
        category=np.concatenate((trace.category[rows], np.full(count, kind, dtype=np.int8)))[order],
        name=np.concatenate((name_of, np.full(count, len(names))))[order],
        process=column(trace.process, ABSENT),
        thread=column(trace.thread, ABSENT),
        device=column(trace.device, 0 if on_device else ABSENT),
        stream=column(trace.stream, 0 if on_device else ABSENT),
        correlation=column(trace.correlation, ABSENT),
        external_id=column(trace.external_id, ABSENT),
        size_bytes=column(trace.size_bytes, ABSENT),
        names=texts,
        collectives=CollectiveColumns(*(_NO_ROWS for _ in fields(CollectiveColumns))),
        memory=take_rows(trace.memory, _NO_ROWS),
        flows=take_rows(trace.flows, _NO_ROWS),
    )

    def moved(old: Ints) -> Ints:
        if not len(rows):
            return old
        return np.where(old >= 0, place[np.minimum(np.searchsorted(rows, old), len(rows) - 1)], ABSENT)

    return small, replace(collectives, call_row=moved(collectives.call_row), kernel_row=moved(collectives.kernel_row))
