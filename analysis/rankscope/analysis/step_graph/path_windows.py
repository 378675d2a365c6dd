"""Splits the time of steps, in windows, into communication and the own work of each rank on the critical path, and
estimates what would come back if a rank worked as its peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mode
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import (
    Bools,
    Floats,
    Ints,
    median_or_nan,
    number_groups,
    order_by_group,
    rows_of_groups,
    take_rows,
)
from rankscope.analysis.step_graph.common_losses import CommonLosses, CommonPast, Question, WindowRows
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import Operations, since_issued
from rankscope.analysis.step_graph.past_work import PastWork
from rankscope.analysis.step_graph.roles import Parts, Peers, find_stages
from rankscope.analysis.step_graph.window_parts import Inside, KindVotes, WindowParts, split_window

# A recording is judged in windows of so many steps, about as many as a window of a running job has.
WINDOW_STEPS = 8
MIN_WINDOW_STEPS = 4
# The ranks with the largest excess on the path are replayed, twice each.
MAX_RANKS_REPLAYED = 8
# Fewer ranks of a large job are replayed, with at most so many rows in all.
MANY_RANKS_REPLAYED = 4
MAX_ROWS_REPLAYED = 1 << 20
MIN_EXCESS_SHARE = 0.02
# A rank that costs less is as it usually is.
UNREMARKABLE_RETURNS = 0.025
# A step with fewer operations than this share of the usual was not recorded as a whole.
WHOLE_STEP_RATIO = 0.6
MAX_STAGES = 5  # of a rank, of which the most frequent counts
# Nothing is concluded where more of the operations have no partner on another rank.
MAX_LONELY_RATIO = 0.5


@dataclass(frozen=True)
class PathWindow:
    """Some whole steps. Shares are of the critical path; columns are by rank, in the order of `ranks`."""

    ranks: Ints
    stages: Ints
    steps: Ints
    step_ns: Floats  # of each step
    losses_ns: Floats  # by step and rank, that would come back if the rank worked as its peers; NaN: hardly on the path
    communication: float
    own: Floats
    compared: float  # share of the own work of which a peer does the same
    own_seconds: Floats  # of a step
    peers_seconds: Floats  # of a step: what the rank's peers need for the same; own work where there is no peer
    issued_late_share: Floats  # of the excess over the peers: how much of it the host took, before it issued operations
    parts: WindowParts
    common: CommonLosses
    is_covered: Bools  # ranks whose operations were looked at

    @property
    def step_seconds(self) -> float:
        return float(self.step_ns.mean()) / 1e9

    @property
    def returns(self) -> Floats:
        """The share of the window's time that would come back if the rank worked as its peers."""
        return self.returns_in(np.ones(len(self.steps), dtype=bool))

    def among(self, ranks: Ints, stages: Mapping[int, int], late_ns: Floats) -> PathWindow:
        """Return the window with a row for every rank of the job: the operations of some were not looked at. No rank
        costs more than `late_ns`, by which its replica arrived later than most: the others may be as late. `stages`: of
        these ranks, and of others as far as they are known."""
        place = np.searchsorted(ranks, self.ranks)

        def spread(column: Floats, fill: float) -> Floats:
            wide = np.full((*column.shape[:-1], len(ranks)), fill)
            wide[..., place] = column
            return wide

        stage = np.array([stages.get(rank, 0) for rank in ranks.tolist()], dtype=np.int64)
        stage[place] = self.stages
        total = np.maximum(np.nan_to_num(self.losses_ns).sum(axis=0), 1.0)
        losses = self.losses_ns * np.minimum(1.0, late_ns[place] / total)
        parts = self.parts
        own, excess, idle = (spread(column, 0.0) for column in (parts.own_ns, parts.excess_ns, parts.idle_ns))
        return replace(
            self,
            ranks=ranks,
            stages=stage,
            losses_ns=spread(losses, np.nan),
            own_seconds=spread(self.own_seconds, np.nan),
            peers_seconds=spread(self.peers_seconds, np.nan),
            issued_late_share=spread(self.issued_late_share, np.nan),
            parts=replace(parts, stages=stage, own_ns=own, excess_ns=excess, idle_ns=idle),
            common=self.common.among(ranks, place, stages),
            is_covered=np.isin(ranks, self.ranks),
        )

    def returns_in(self, steps: Bools) -> Floats:
        """The share of the window's time that would come back in some of its steps."""
        returns: Floats = np.nan_to_num(self.losses_ns[steps]).sum(axis=0) / max(float(self.step_ns.sum()), 1.0)
        return returns


class JudgedSteps(NamedTuple):
    """The graph behind a window; as large as its operations."""

    window: PathWindow
    graph: StepGraph
    path: Ints  # rows of the graph in the steps of the window
    peers: Peers
    kinds: tuple[GroupKind, ...]  # of the groups


class PathFinder:
    """Finds the path in one window of a job after the other, and learns from them what a window alone does not show."""

    def __init__(self, min_steps: int = MIN_WINDOW_STEPS) -> None:
        self._min_steps = min_steps
        self._stages: dict[int, deque[int]] = {}
        self._past = PastWork()
        self._common = CommonPast()
        self._kinds = KindVotes()
        self.lonely = 0  # operations that one rank alone recorded
        # The operations of the last window have partners. Those of a CUDA graph have none: all of its replays have the
        # same sequence numbers.
        self.is_matched = True
        self.judged: JudgedSteps | None = None  # of the last window; None saves its memory

    @property
    def stages(self) -> dict[int, int]:
        """The pipeline stage of each rank, as most of the last windows show; empty before the first one."""
        return {rank: mode(reversed(stages)) for rank, stages in self._stages.items()}

    def find(self, operations: Operations, outside_ns: Ints | None = None) -> PathWindow | None:
        """The window of these steps; None if too few are whole. A step begins where the one before ends, so that the
        first of consecutive steps only shows where the next begins. `outside_ns`: as in StepGraph.build, where only
        some of a job's ranks are there, others in each window; these have peers and need no past."""
        graph = StepGraph.build(operations, outside_ns)
        self.lonely += graph.meetings.lonely
        is_some = outside_ns is not None or len(graph.operations.ranks) == 1
        self.is_matched = is_some or graph.meetings.lonely <= MAX_LONELY_RATIO * len(graph)
        if not self.is_matched:
            return None
        by_rank = self._vote(find_stages(graph), outside_ns is not None)
        steps = _Steps.of(graph)
        if np.count_nonzero(steps.inside) < self._min_steps:
            return None
        ranks = np.array(list(by_rank), dtype=np.int64)
        stages = np.array(list(by_rank.values()), dtype=np.int64)
        parts = Parts.of(graph, by_rank)
        peers = Peers.of(graph, by_rank, parts)
        if outside_ns is None:
            peers = self._past.fill(graph, parts, peers)
        position = np.searchsorted(ranks, graph.operations.rank)
        path, is_inside = graph.path(), steps.inside[steps.of_row]
        kinds = self._kinds.add(graph.operations, by_rank, outside_ns is not None)
        split = split_window(graph, path, steps.spans, is_inside, by_rank, kinds, peers.own_ns)
        path = path[is_inside[path]]
        sums = _Sums(graph, path, is_inside, position, len(ranks))
        rows = WindowRows(
            steps.place[steps.of_row],
            position,
            path,
            sums.own_ns / sums.path_ns,
            ranks,
            stages,
            steps.nanoseconds[steps.inside],
            outside_ns is not None,
        )
        suspicion = self._common.suspect(graph, rows, is_inside, kinds)
        losses, answers = _losses(sums, steps, ranks, stages, peers.own_ns, suspicion.questions(graph))
        common = suspicion.conclude(graph, answers)
        window = _window(sums, steps, peers, ranks, stages, losses, split, common)
        self._common.learn(suspicion, common, window.step_ns, window.returns)
        self.judged = JudgedSteps(window, graph, path, peers, kinds)
        if outside_ns is None:
            self._past.learn(graph, parts, (window.returns < UNREMARKABLE_RETURNS)[position])
        return window

    def _vote(self, seen: dict[int, int], is_sample: bool) -> dict[int, int]:
        if not is_sample and seen.keys() != self._stages.keys():
            self._stages.clear()
        for rank, stage in seen.items():
            self._stages.setdefault(rank, deque(maxlen=MAX_STAGES)).append(stage)
        return {rank: mode(reversed(self._stages[rank])) for rank in seen}

    def find_all(self, operations: Operations) -> Iterator[PathWindow]:
        """The windows of a recording, in their order."""
        steps, order = whole_steps(operations), np.argsort(operations.step, kind="stable")
        sorted_steps = operations.step[order]
        for stretch in np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1):
            # Windows of a stretch share a step: the end of one is the beginning of the next.
            for first in range(0, len(stretch) - 1, WINDOW_STEPS):
                some = stretch[first : first + WINDOW_STEPS + 1]
                begin, end = np.searchsorted(sorted_steps, [some[0], some[-1] + 1])
                rows = take_rows(operations, np.sort(order[begin:end]))
                # The clocks of host and GPU drift apart over a recording.
                window = self.find(replace(rows, queued_ns=since_issued(rows.rank, rows.queued_ns)))
                if window is not None:
                    yield window


def whole_steps(operations: Operations) -> Ints:
    """The numbers of the steps of which all ranks have operations."""
    number, count = number_groups(operations.step, operations.rank)
    sent = np.zeros(count, dtype=np.int64)
    sent[number] = operations.step
    steps, ranks_of_step = np.unique(sent, return_counts=True)
    return np.asarray(steps[ranks_of_step == len(operations.ranks)])


@dataclass(frozen=True)
class _Steps:
    """One row per step and stretch."""

    of_row: Ints  # of the graph
    stretch: Ints
    step: Ints
    inside: Bools  # whole, and after one that is whole
    ends_ns: Ints
    nanoseconds: Floats

    @classmethod
    def of(cls, graph: StepGraph) -> _Steps:
        of_row, count = number_groups(graph.meetings.stretch, graph.meetings.step)
        stretch, step = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        stretch[of_row], step[of_row] = graph.meetings.stretch, graph.meetings.step
        operations = np.bincount(of_row, minlength=count).astype(np.float64)
        whole = operations >= WHOLE_STEP_RATIO * median_or_nan(operations)
        inside = np.zeros(count, dtype=bool)
        inside[1:] = whole[1:] & whole[:-1] & (np.diff(step) == 1) & (np.diff(stretch) == 0)
        steps = cls(of_row, stretch, step, inside, np.zeros(count, dtype=np.int64), np.zeros(count))
        stop_ns = graph.operations.stop_ns
        return replace(steps, ends_ns=steps._ends(stop_ns), nanoseconds=steps.durations(stop_ns))

    @property
    def place(self) -> Ints:
        """The position among the steps inside, their number for others."""
        return np.where(self.inside, np.cumsum(self.inside) - 1, np.count_nonzero(self.inside))

    @property
    def spans(self) -> Inside:
        begins = np.roll(self.ends_ns, 1)
        return Inside(self.stretch[self.inside], begins[self.inside], self.ends_ns[self.inside])

    def durations(self, stop_ns: Ints) -> Floats:
        """Nanoseconds from the end of the step before; 0 for a step that is not inside. Columns stay apart."""
        ends = self._ends(stop_ns).T
        nanoseconds = np.where(self.inside, np.diff(ends, prepend=ends[..., :1]), 0)
        return np.asarray(nanoseconds.astype(np.float64).T)

    def _ends(self, stop_ns: Ints) -> Ints:
        order = order_by_group(self.of_row, len(self.step))
        begins = np.searchsorted(self.of_row[order], np.arange(len(self.step)))
        ends = np.maximum.reduceat(stop_ns[order], begins, axis=0) if len(begins) else stop_ns
        for rows in rows_of_groups(self.stretch, int(self.stretch.max(initial=-1)) + 1):
            ends[rows] = np.maximum.accumulate(ends[rows], axis=0)
        return ends


class _Sums:
    """Sums of nanoseconds by rank, of all operations or of those on the critical path."""

    def __init__(self, graph: StepGraph, path: Ints, inside: Bools, position: Ints, ranks: int) -> None:
        self.graph = graph
        self._ranks = ranks
        self._rows = np.flatnonzero(inside)
        self._position = position
        self._late = graph.last[path]
        self.transfer_ns = float(graph.transfer_ns[path].sum())
        self.own_ns = self.on_path(graph.own_ns)
        self.path_ns = max(self.transfer_ns + float(self.own_ns.sum()), 1.0)

    def on_path(self, values: Ints | Floats) -> Floats:
        """Sums over the operations on the path, for the ranks that arrived last."""
        return self._by_rank(self._late, values)

    def of_all(self, values: Ints | Floats) -> Floats:
        return self._by_rank(self._rows, values)

    def _by_rank(self, rows: Ints, values: Ints | Floats) -> Floats:
        sums = np.bincount(self._position[rows], weights=values[rows], minlength=self._ranks)
        return sums.astype(np.float64)


def _window(
    sums: _Sums,
    steps: _Steps,
    peers: Peers,
    ranks: Ints,
    stages: Ints,
    losses_ns: Floats,
    parts: WindowParts,
    common: CommonLosses,
) -> PathWindow:
    graph, count = sums.graph, int(np.count_nonzero(steps.inside))
    is_compared = ~np.isnan(peers.own_ns)
    own_ns = sums.of_all(graph.own_ns)
    excess = sums.of_all(np.where(is_compared, graph.own_ns - peers.own_ns, 0.0))
    issued_late = sums.of_all(np.where(is_compared, graph.host_ns - peers.host_ns, 0.0))
    with np.errstate(divide="ignore", invalid="ignore"):
        late_share = np.where(excess > 0, issued_late / excess, np.nan)
    return PathWindow(
        ranks,
        stages,
        steps.step[steps.inside],
        steps.nanoseconds[steps.inside],
        losses_ns,
        sums.transfer_ns / sums.path_ns,
        sums.own_ns / sums.path_ns,
        float(sums.on_path(np.where(is_compared, graph.own_ns, 0)).sum() / max(float(sums.own_ns.sum()), 1.0)),
        own_ns / count / 1e9,
        (own_ns - excess) / count / 1e9,
        late_share,
        parts,
        common,
        np.ones(len(ranks), dtype=bool),
    )


def _losses(
    sums: _Sums, steps: _Steps, ranks: Ints, stages: Ints, peers_ns: Floats, questions: Sequence[Question]
) -> tuple[Floats, list[Floats]]:
    """Nanoseconds by step and rank that would come back if the rank worked as its peers; NaN of ranks that were not
    replayed. All others work at their best meanwhile: of two slow ranks, either alone would bring back nothing. Then
    nanoseconds by step for each question. One replay answers all, as its columns cost next to nothing."""
    graph = sums.graph
    losses = np.full((len(steps.step), len(ranks)), np.nan)
    replayed = _replayed(sums.on_path(np.nan_to_num(graph.own_ns - peers_ns)) / sums.path_ns, stages)
    if not replayed and not questions:
        return losses[steps.inside], []
    as_peers = np.where(np.isnan(peers_ns), graph.own_ns, np.nan_to_num(peers_ns)).astype(np.int64)
    best = np.minimum(graph.own_ns, as_peers)
    count = max(MANY_RANKS_REPLAYED, min(MAX_RANKS_REPLAYED, MAX_ROWS_REPLAYED // max(2 * len(graph), 1)))
    replayed = replayed[:count]
    mine = graph.operations.rank[:, None] == ranks[replayed]
    own_ns = [np.where(mine, column[:, None], best[:, None]) for column in (graph.own_ns, as_peers)]
    own_ns += [(graph.own_ns if one.own_ns is None else one.own_ns)[:, None] for one in questions]
    transfer_ns = None
    if any(one.transfer_ns is not None for one in questions):
        transfer_ns = np.repeat(graph.transfer_ns[:, None], 2 * len(replayed) + len(questions), axis=1)
        for column, one in enumerate(questions, 2 * len(replayed)):
            transfer_ns[:, column] = graph.transfer_ns if one.transfer_ns is None else one.transfer_ns
    durations = steps.durations(graph.replay(np.concatenate(own_ns, axis=1), transfer_ns))[steps.inside]
    as_is, replaced, answers = np.split(durations, [len(replayed), 2 * len(replayed)], axis=1)
    losses = losses[steps.inside]
    losses[:, replayed] = as_is - replaced
    return losses, [steps.nanoseconds[steps.inside] - answer for answer in answers.T]


def _replayed(excess: Floats, stages: Ints) -> list[int]:
    """The ranks with an excess, and peers of the first for comparison."""
    order = np.argsort(-excess, kind="stable")
    suspected = order[excess[order] >= MIN_EXCESS_SHARE]
    if not len(suspected):
        return []
    peers = order[(stages[order] == stages[suspected[0]]) & (excess[order] < MIN_EXCESS_SHARE)]
    return [int(rank) for rank in np.concatenate([suspected, peers])[:MAX_RANKS_REPLAYED]]
