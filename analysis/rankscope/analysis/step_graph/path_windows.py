"""Splits the time of steps, in windows, into communication and the own work of each rank on the critical path, and
estimates what would come back if a rank worked as its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, median_or_nan, number_groups, rows_of_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.roles import find_stages, peers_own_ns
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, FIXED, Policy
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.analysis.verdicts.verdict import ranks as ranks_text

WINDOW_STEPS = 16
MIN_WINDOW_STEPS = 4
# The ranks with the largest excess on the path are replayed, twice each.
MAX_RANKS_REPLAYED = 8
MIN_EXCESS_SHARE = 0.02
# A step with fewer operations than this share of the usual was not recorded as a whole.
WHOLE_STEP_RATIO = 0.6


@dataclass(frozen=True)
class PathWindow:
    """Shares are of the critical path. `returns` is the share of the window's time that would come back if the rank
    worked as its peers; 0 of a rank that is hardly on the path."""

    first_step: int
    last_step: int
    step_seconds: float  # mean
    communication: float
    own: Floats  # by rank
    returns: Floats
    compared: float  # share of the own work of which a peer does the same


@dataclass(frozen=True)
class PathReport:
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    operations: int
    lonely: int
    windows: tuple[PathWindow, ...]
    verdict: Verdict


def report_path(operations: Operations, policy: Policy = DEFAULT_POLICY) -> PathReport:
    graph = StepGraph.build(operations)
    by_rank = find_stages(graph)
    ranks = np.array(list(by_rank), dtype=np.int64)
    stages = np.array(list(by_rank.values()), dtype=np.int64)
    steps = _Steps.of(graph)
    peers_ns = peers_own_ns(graph, by_rank)
    shares = _Shares.of(graph, steps, np.searchsorted(ranks, graph.operations.rank), peers_ns)
    losses = _losses(graph, steps, shares, ranks, stages, peers_ns)
    windows = _windows(steps, shares, losses)
    verdict = _judge(windows, steps, losses, ranks, stages, policy)
    return PathReport(
        tuple(ranks.tolist()), tuple(stages.tolist()), len(graph), graph.meetings.lonely, windows, verdict
    )


@dataclass(frozen=True)
class _Steps:
    """One row per step and stretch. Windows have a number from 0; steps that are in none have -1."""

    of_row: Ints  # of the graph
    stretch: Ints
    step: Ints
    window: Ints
    nanoseconds: Floats

    @classmethod
    def of(cls, graph: StepGraph) -> _Steps:
        of_row, count = number_groups(graph.meetings.stretch, graph.meetings.step)
        stretch, step = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        stretch[of_row], step[of_row] = graph.meetings.stretch, graph.meetings.step
        operations = np.bincount(of_row, minlength=count).astype(np.float64)
        whole = operations >= WHOLE_STEP_RATIO * median_or_nan(operations)
        # A step begins where the one before ends, so that the first of a stretch has no beginning.
        follows = np.zeros(count, dtype=bool)
        follows[1:] = whole[1:] & whole[:-1] & (np.diff(step) == 1) & (np.diff(stretch) == 0)
        steps = cls(of_row, stretch, step, _chunks(follows), np.zeros(count))
        return cls(of_row, stretch, step, steps.window, steps.durations(graph.operations.stop_ns))

    def durations(self, stop_ns: Ints) -> Floats:
        """Nanoseconds from the end of the step before; 0 for a step outside the windows."""
        ends = np.full(len(self.step), np.iinfo(np.int64).min)
        np.maximum.at(ends, self.of_row, stop_ns)
        for rows in rows_of_groups(self.stretch, int(self.stretch.max(initial=-1)) + 1):
            ends[rows] = np.maximum.accumulate(ends[rows])
        return np.where(self.window >= 0, np.diff(ends, prepend=ends[:1]), 0).astype(np.float64)

    @property
    def windows(self) -> int:
        return int(self.window.max(initial=-1)) + 1


def _chunks(follows: Bools) -> Ints:
    """Numbers of windows of consecutive steps."""
    window = np.full(len(follows), -1, dtype=np.int64)
    count = 0
    borders = np.flatnonzero(np.diff(follows, prepend=False, append=False))
    for begin, end in borders.reshape(-1, 2).tolist():
        for first in range(begin, end, WINDOW_STEPS):
            last = min(first + WINDOW_STEPS, end)
            if last - first >= MIN_WINDOW_STEPS:
                window[first:last] = count
                count += 1
    return window


@dataclass(frozen=True)
class _Shares:
    """Shares of the critical path, by window and rank."""

    communication: Floats
    own: Floats
    excess: Floats  # over the peers
    compared: Floats

    @classmethod
    def of(cls, graph: StepGraph, steps: _Steps, position: Ints, peers_ns: Floats) -> _Shares:
        path = graph.path()
        window = steps.window[steps.of_row[path]]
        path, window = path[window >= 0], window[window >= 0]
        rows = graph.last[path]
        shape = (steps.windows, int(position.max(initial=-1)) + 1)
        cell = window * shape[1] + position[rows]
        own_ns, peers = graph.own_ns[rows].astype(np.float64), peers_ns[rows]

        def summed(values: Floats) -> Floats:
            table = np.bincount(cell, weights=values, minlength=shape[0] * shape[1]).astype(np.float64)
            return table.reshape(shape)

        transfers = summed(graph.transfer_ns[path].astype(np.float64)).sum(axis=1)
        own, excess = summed(own_ns), summed(np.nan_to_num(own_ns - peers))
        compared = summed(np.where(np.isnan(peers), 0.0, own_ns)).sum(axis=1)
        total = np.maximum(transfers + own.sum(axis=1), 1.0)
        by_rank = total[:, None]
        return cls(transfers / total, own / by_rank, excess / by_rank, compared / np.maximum(own.sum(axis=1), 1.0))


def _losses(graph: StepGraph, steps: _Steps, shares: _Shares, ranks: Ints, stages: Ints, peers_ns: Floats) -> Floats:
    """Nanoseconds by step and rank that would come back if the rank worked as its peers; NaN of ranks that were not
    replayed. All others work at their best meanwhile: of two slow ranks, either alone would bring back nothing."""
    losses = np.full((len(steps.step), len(ranks)), np.nan)
    as_peers = np.where(np.isnan(peers_ns), graph.own_ns, np.nan_to_num(peers_ns)).astype(np.int64)
    best = np.minimum(graph.own_ns, as_peers)
    for position in _replayed(shares.excess.max(axis=0, initial=0.0), stages):
        mine = graph.operations.rank == ranks[position]
        as_is, replaced = (graph.replay(np.where(mine, own_ns, best)) for own_ns in (graph.own_ns, as_peers))
        losses[:, position] = steps.durations(as_is) - steps.durations(replaced)
    return losses


def _replayed(excess: Floats, stages: Ints) -> list[int]:
    """The ranks with an excess, and peers of the first for comparison."""
    order = np.argsort(-excess, kind="stable")
    suspected = order[excess[order] >= MIN_EXCESS_SHARE]
    if not len(suspected):
        return []
    peers = order[(stages[order] == stages[suspected[0]]) & (excess[order] < MIN_EXCESS_SHARE)]
    return [int(rank) for rank in np.concatenate([suspected, peers])[:MAX_RANKS_REPLAYED]]


def _windows(steps: _Steps, shares: _Shares, losses: Floats) -> tuple[PathWindow, ...]:
    windows = []
    for number in range(steps.windows):
        rows = steps.window == number
        seen, total = steps.step[rows], float(steps.nanoseconds[rows].sum())
        windows.append(
            PathWindow(
                int(seen[0]),
                int(seen[-1]),
                total / len(seen) / 1e9,
                float(shares.communication[number]),
                shares.own[number],
                np.nan_to_num(losses[rows]).sum(axis=0) / max(total, 1.0),
                float(shares.compared[number]),
            )
        )
    return tuple(windows)


def _judge(
    windows: Sequence[PathWindow], steps: _Steps, losses: Floats, ranks: Ints, stages: Ints, policy: Policy
) -> Verdict:
    """The ranks that are slow in enough windows of a row, and beyond what steps vary by."""
    kept, needed = policy.windows_kept, policy.windows_for_alarm
    if len(windows) < needed:
        return Verdict(Kind.INSUFFICIENT_DATA, f"{len(windows)} windows of whole steps; a verdict needs {needed}")
    compared = median_or_nan(np.array([window.compared for window in windows]))
    if not compared >= FIXED.path_compared_share:
        reason = f"only {compared:.0%} of the work on the critical path can be compared with that of a peer"
        return Verdict(Kind.INSUFFICIENT_DATA, reason)
    slow = np.array([window.returns >= FIXED.path_impact_ratio for window in windows])
    counts = np.array([slow[begin : begin + kept].sum(axis=0) for begin in range(len(windows) - needed + 1)])
    during = {
        rank: _between(steps.window, np.flatnonzero(slow[:, rank]))
        for rank in np.flatnonzero((counts >= needed).any(axis=0)).tolist()
    }
    named = {rank: rows for rank, rows in during.items() if _stands_out(losses[rows], rank, stages)}
    if not named:
        return Verdict(Kind.HEALTHY, "no rank holds up the others on the critical path")
    rows = np.logical_or.reduce(list(named.values()))
    impact = float(losses[rows][:, list(named)].sum() / steps.nanoseconds[rows].sum())
    culprits = tuple(int(ranks[rank]) for rank in named)
    reason = (
        f"{impact:.0%} of the time of steps {steps.step[rows][0]:,} to {steps.step[rows][-1]:,} would come back if "
        f"{ranks_text(culprits)} worked as the peers"
    )
    return Verdict(Kind.SLOW_RANK, reason, Severity.ALARM, culprits=culprits, impact_ratio=impact)


def _between(window: Ints, numbers: Ints) -> Bools:
    return np.asarray((window >= numbers[0]) & (window <= numbers[-1]))


def _stands_out(losses: Floats, rank: int, stages: Ints) -> bool:
    """Whether a rank costs more than its peers beyond chance: where data is uneven, each of them is last at times."""
    peers = np.flatnonzero((stages == stages[rank]) & ~np.isnan(losses[0]) & (np.arange(len(stages)) != rank))
    usual = np.maximum(losses[:, peers].mean(axis=0), 0.0)
    beyond = losses[:, rank] - (float(np.median(usual)) if len(usual) else 0.0)
    mean, error = float(losses[:, rank].mean()), float(beyond.std(ddof=1)) / np.sqrt(len(beyond))
    is_odd = not len(usual) or mean >= FIXED.path_peers_ratio * float(np.median(usual))
    return is_odd and bool(beyond.mean() >= FIXED.path_score * error)
