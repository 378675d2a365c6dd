"""Splits the time of steps, in windows, into communication and the own work of each rank on the critical path, and
estimates what would come back if a rank worked as its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, median_or_nan, number_groups, rows_of_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.past_work import PastWork
from rankscope.analysis.step_graph.roles import Parts, Peers, find_stages

WINDOW_STEPS = 16
MIN_WINDOW_STEPS = 4
# The ranks with the largest excess on the path are replayed, twice each.
MAX_RANKS_REPLAYED = 8
MIN_EXCESS_SHARE = 0.02
# A rank that costs less is as it usually is.
UNREMARKABLE_RETURNS = 0.025
# A step with fewer operations than this share of the usual was not recorded as a whole.
WHOLE_STEP_RATIO = 0.6


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

    @property
    def step_seconds(self) -> float:
        return float(self.step_ns.mean()) / 1e9

    @property
    def returns(self) -> Floats:
        """The share of the window's time that would come back if the rank worked as its peers."""
        returns: Floats = np.nan_to_num(self.losses_ns).sum(axis=0) / max(float(self.step_ns.sum()), 1.0)
        return returns


@dataclass(frozen=True)
class PathWindows:
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    operations: int
    lonely: int
    windows: tuple[PathWindow, ...]


StagesOf = Callable[[StepGraph], dict[int, int]]


def find_windows(
    operations: Operations,
    window_steps: int | None = WINDOW_STEPS,
    stages_of: StagesOf = find_stages,
    past: PastWork | None = None,
) -> PathWindows:
    """Windows of so many steps that follow each other; with None, one window of all steps. `past` learns from it."""
    graph = StepGraph.build(operations)
    by_rank = stages_of(graph)
    ranks = np.array(list(by_rank), dtype=np.int64)
    stages = np.array(list(by_rank.values()), dtype=np.int64)
    steps = _Steps.of(graph, window_steps)
    parts = Parts.of(graph, by_rank)
    peers = Peers.of(graph, by_rank, parts)
    if past is not None:
        peers = past.fill(graph, parts, peers)
    position = np.searchsorted(ranks, graph.operations.rank)
    table = _Table(graph, steps, position, len(ranks))
    excess = table.on_path(np.nan_to_num(graph.own_ns - peers.own_ns)) / table.path_ns[:, None]
    losses = _losses(graph, steps, excess.max(axis=0, initial=0.0), ranks, stages, peers.own_ns)
    windows = tuple(_window(number, table, peers, losses, ranks, stages) for number in range(steps.windows))
    if past is not None and windows:
        past.learn(graph, parts, (windows[0].returns < UNREMARKABLE_RETURNS)[position])
    return PathWindows(tuple(ranks.tolist()), tuple(stages.tolist()), len(graph), graph.meetings.lonely, windows)


@dataclass(frozen=True)
class _Steps:
    """One row per step and stretch. Windows have a number from 0; steps that are in none have -1."""

    of_row: Ints  # of the graph
    stretch: Ints
    step: Ints
    window: Ints
    nanoseconds: Floats

    @classmethod
    def of(cls, graph: StepGraph, window_steps: int | None) -> _Steps:
        of_row, count = number_groups(graph.meetings.stretch, graph.meetings.step)
        stretch, step = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        stretch[of_row], step[of_row] = graph.meetings.stretch, graph.meetings.step
        operations = np.bincount(of_row, minlength=count).astype(np.float64)
        whole = operations >= WHOLE_STEP_RATIO * median_or_nan(operations)
        # A step begins where the one before ends, so that the first of a stretch has no beginning.
        follows = np.zeros(count, dtype=bool)
        follows[1:] = whole[1:] & whole[:-1] & (np.diff(step) == 1) & (np.diff(stretch) == 0)
        steps = cls(of_row, stretch, step, _chunks(follows, window_steps), np.zeros(count))
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


def _chunks(follows: Bools, window_steps: int | None) -> Ints:
    """Numbers of windows of steps that follow each other."""
    if window_steps is None:
        is_enough = np.count_nonzero(follows) >= MIN_WINDOW_STEPS
        return np.where(follows & is_enough, 0, -1)
    window = np.full(len(follows), -1, dtype=np.int64)
    count = 0
    borders = np.flatnonzero(np.diff(follows, prepend=False, append=False))
    for begin, end in borders.reshape(-1, 2).tolist():
        for first in range(begin, end, window_steps):
            last = min(first + window_steps, end)
            if last - first >= MIN_WINDOW_STEPS:
                window[first:last] = count
                count += 1
    return window


class _Table:
    """Sums of nanoseconds by window and rank, of all operations or of those on the critical path."""

    def __init__(self, graph: StepGraph, steps: _Steps, position: Ints, ranks: int) -> None:
        self.graph, self.steps = graph, steps
        self._shape = (steps.windows, ranks)
        window = steps.window[steps.of_row]
        self._rows = np.flatnonzero(window >= 0)
        self._cell = window[self._rows] * ranks + position[self._rows]
        path = graph.path()
        self._path = path[window[path] >= 0]
        self._late = graph.last[self._path]
        self._path_cell = window[self._path] * ranks + position[self._late]
        self.transfer_ns = self._sums(self._path_cell, graph.transfer_ns[self._path]).sum(axis=1)
        self.own_ns = self.on_path(graph.own_ns)
        self.path_ns = np.maximum(self.transfer_ns + self.own_ns.sum(axis=1), 1.0)

    def on_path(self, values: Ints | Floats) -> Floats:
        """Sums over the operations on the path, for the ranks that arrived last."""
        return self._sums(self._path_cell, values[self._late])

    def of_all(self, values: Ints | Floats) -> Floats:
        return self._sums(self._cell, values[self._rows])

    def _sums(self, cell: Ints, values: Ints | Floats) -> Floats:
        sums = np.bincount(cell, weights=values, minlength=self._shape[0] * self._shape[1])
        return sums.astype(np.float64).reshape(self._shape)


def _window(number: int, table: _Table, peers: Peers, losses: Floats, ranks: Ints, stages: Ints) -> PathWindow:
    graph, steps = table.graph, table.steps
    rows = steps.window == number
    count, own = int(rows.sum()), table.own_ns[number]
    is_compared = ~np.isnan(peers.own_ns)
    own_ns = table.of_all(graph.own_ns)[number]
    excess = table.of_all(np.where(is_compared, graph.own_ns - peers.own_ns, 0.0))[number]
    issued_late = table.of_all(np.where(is_compared, graph.host_ns - peers.host_ns, 0.0))[number]
    with np.errstate(divide="ignore", invalid="ignore"):
        late_share = np.where(excess > 0, issued_late / excess, np.nan)
    return PathWindow(
        ranks,
        stages,
        steps.step[rows],
        steps.nanoseconds[rows],
        losses[rows],
        float(table.transfer_ns[number] / table.path_ns[number]),
        own / table.path_ns[number],
        float(table.on_path(np.where(is_compared, graph.own_ns, 0))[number].sum() / max(own.sum(), 1.0)),
        own_ns / count / 1e9,
        (own_ns - excess) / count / 1e9,
        late_share,
    )


def _losses(graph: StepGraph, steps: _Steps, excess: Floats, ranks: Ints, stages: Ints, peers_ns: Floats) -> Floats:
    """Nanoseconds by step and rank that would come back if the rank worked as its peers; NaN of ranks that were not
    replayed. All others work at their best meanwhile: of two slow ranks, either alone would bring back nothing."""
    losses = np.full((len(steps.step), len(ranks)), np.nan)
    as_peers = np.where(np.isnan(peers_ns), graph.own_ns, np.nan_to_num(peers_ns)).astype(np.int64)
    best = np.minimum(graph.own_ns, as_peers)
    replayed = _replayed(excess, stages)
    if not replayed:
        return losses
    mine = graph.operations.rank[:, None] == ranks[replayed]
    own_ns = [np.where(mine, column[:, None], best[:, None]) for column in (graph.own_ns, as_peers)]
    stops = graph.replay(np.concatenate(own_ns, axis=1))
    for column, position in enumerate(replayed):
        as_is, replaced = stops[:, column], stops[:, len(replayed) + column]
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
