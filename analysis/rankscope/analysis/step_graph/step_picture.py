"""Draws one step of a judged window: the operations of ranks over time, who waits for whom, the critical path, and the
late operation of the rank that holds up the others. The picture is small, however large the job is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, occurrence, take_rows
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations
from rankscope.analysis.step_graph.path_windows import JudgedSteps, PathWindow

MAX_RANKS = 16
# A large job has as many ranks of each kind drawn before more of one: those that wait, those that meet, peers, others.
RANKS_OF_A_KIND = 4
# The longest operations are drawn, and those on the path. The JSON of a bar takes about 40 bytes.
MAX_BARS = 3000
MAX_PATH = 1000
MAX_LATE = 500
# A picture of the culprit gives way to a newer one that shows at least this share of its loss.
MIN_SHOWN_LOSS = 0.5
# Another rank waits meanwhile if it waits for this share of the late time.
WAITING_SHARE = 0.5


class OperationName(NamedTuple):
    kind: CollectiveKind
    group: GroupKind
    size: int  # ranks of the group


@dataclass(frozen=True)
class Bars:
    """A row per operation; columns are equally long. Times are from the beginning of the step."""

    row: Ints  # index into the ranks of the picture
    operation: Ints  # index into the operations of the picture
    own_ns: Ints  # own work of the rank until the operation starts
    start_ns: Ints
    arrived_ns: Ints  # when the last of the ranks that meet had arrived: the rank waits until then
    stop_ns: Ints
    bytes: Ints
    awaited: Ints  # the rank that arrived last; UNKNOWN where this rank waits for nobody


@dataclass(frozen=True)
class PathParts:
    """The critical path in the order of time: own work of a rank, or the transfer of an operation."""

    row: Ints  # UNKNOWN for a rank that is not drawn
    start_ns: Ints
    stop_ns: Ints
    is_own: Bools


@dataclass(frozen=True)
class Focus:
    """The stretch of own work on the path that exceeds that of the peers most, and the operation that it delays."""

    rank: int
    start_ns: int
    stop_ns: int  # the start of the operation
    end_ns: int  # the end of the operation
    excess_ns: int  # beyond what the peers need
    operation: OperationName
    is_compared_with_past: bool  # no other rank does the same
    waiting: tuple[int, ...]  # ranks that wait in the operation
    waiting_meanwhile: tuple[int, ...]  # ranks that wait for those, or for others
    late_start_ns: Ints  # everything on the path of this step that exceeds the peers
    late_stop_ns: Ints


@dataclass(frozen=True)
class StepPicture:
    step: int
    step_ns: int
    ranks: Ints  # by stage, then by number
    stages: Ints
    ranks_left_out: int
    operations: tuple[OperationName, ...]
    bars: Bars
    bars_left_out: int
    path: PathParts
    own_share: float  # of the path
    lost_ns: int  # of the step, that would come back if the rank in focus worked as its peers
    focus: Focus | None = None

    @property
    def size_bytes(self) -> int:
        tables = (self, self.bars, self.path, self.focus)
        columns = (getattr(table, field.name) for table in tables if table for field in fields(table))
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def better_picture(before: StepPicture | None, picture: StepPicture, culprits: Sequence[int]) -> StepPicture:
    """Return the newer picture, unless the one before shows a culprit that this one hardly shows."""
    if before is None or before.focus is None or before.focus.rank not in culprits:
        return picture
    return picture if picture.lost_ns >= MIN_SHOWN_LOSS * before.lost_ns else before


def draw_step(judged: JudgedSteps, culprits: Collection[int] = ()) -> StepPicture:
    """The step in which the most costly of the culprits costs most; without culprits, the one of median length."""
    window = judged.window
    losses = np.nan_to_num(window.losses_ns)
    costs = np.where(np.isin(window.ranks, list(culprits)), losses.sum(axis=0), -np.inf)
    culprit = int(np.argmax(costs)) if np.isfinite(costs).any() else None
    if culprit is None:
        place, lost_ns = int(np.argsort(window.step_ns, kind="stable")[len(window.step_ns) // 2]), 0
    else:
        place = int(np.argmax(losses[:, culprit]))
        lost_ns = max(int(losses[place, culprit]), 0)
    span = _Span.of(judged, place)
    focus = None if culprit is None else _focus(judged, span, culprit)
    drawn = _drawn_ranks(window, span, focus)
    rows = _drawn_rows(span, drawn, window.ranks)
    names, number = _names(span.graph.operations, rows, judged.kinds)
    return StepPicture(
        step=int(window.steps[place]),
        step_ns=span.stop_ns - span.start_ns,
        ranks=window.ranks[drawn],
        stages=window.stages[drawn],
        ranks_left_out=len(window.ranks) - len(drawn),
        operations=names,
        bars=_bars(span, rows[:MAX_BARS], number[:MAX_BARS], window.ranks[drawn]),
        bars_left_out=max(len(rows) - MAX_BARS, 0),
        path=_path(span.path, window.ranks[drawn]),
        own_share=span.own_share,
        lost_ns=0 if focus is None else lost_ns,
        focus=focus,
    )


@dataclass(frozen=True)
class _Span:
    """The time of one step, from the end of the step before. Some ranks are in another step at its borders."""

    graph: StepGraph
    start_ns: int
    stop_ns: int
    rows: Ints  # operations that overlap with it, with the work before them
    on_path: Ints  # those of them that are on the path
    late: Ints  # the operations before which own work is on the path
    path: PathParts  # `row` is the rank

    @classmethod
    def of(cls, judged: JudgedSteps, place: int) -> _Span:
        graph, step = judged.graph, judged.window.steps[place]
        operations, meetings = graph.operations, graph.meetings
        stretch = meetings.stretch[np.argmax(meetings.step == step)]
        stop = int(operations.stop_ns[(meetings.step <= step) & (meetings.stretch == stretch)].max())
        start = stop - max(int(judged.window.step_ns[place]), 1)
        rows = np.flatnonzero((operations.stop_ns > start) & (operations.start_ns - graph.own_ns < stop))
        on_path = judged.path[operations.stop_ns[judged.path] > start]
        late = graph.last[on_path]
        worked = late[graph.before[late] >= 0]
        begins = np.concatenate([operations.stop_ns[graph.before[worked]], operations.start_ns[late]])
        ends = np.concatenate([operations.start_ns[worked], operations.stop_ns[on_path]])
        ranks = np.concatenate([operations.rank[worked], operations.rank[on_path]])
        begins, ends = np.clip(begins, start, stop) - start, np.clip(ends, start, stop) - start
        order = np.lexsort((ends, begins))
        order = order[ends[order] > begins[order]]
        path = PathParts(ranks[order], begins[order], ends[order], order < len(worked))
        inside = (operations.start_ns[worked] > start) & (operations.start_ns[worked] <= stop)
        return cls(graph, start, stop, rows, on_path, worked[inside], path)

    @property
    def own_share(self) -> float:
        lengths = self.path.stop_ns - self.path.start_ns
        return float(lengths[self.path.is_own].sum()) / max(float(lengths.sum()), 1.0)


def _focus(judged: JudgedSteps, span: _Span, culprit: int) -> Focus | None:
    """None if no work of the rank on the path exceeds that of its peers in this step."""
    graph, window = span.graph, judged.window
    operations, rank = graph.operations, int(window.ranks[culprit])
    mine = span.late[operations.rank[span.late] == rank]
    excess = np.minimum(np.nan_to_num(graph.own_ns[mine] - judged.peers.own_ns[mine]), graph.own_ns[mine])
    order = np.argsort(-excess, kind="stable")[: min(MAX_LATE, np.count_nonzero(excess >= 1))]
    if not len(order):
        return None
    mine, excess_ns = mine[order], excess[order].astype(np.int64)
    row, longest = int(mine[0]), int(excess_ns[0])
    start, group = int(operations.start_ns[row]), int(operations.group[row])
    waiting = set(operations.rank[span.rows[graph.last[span.rows] == row]].tolist()) - {rank}
    meanwhile = set(_waiting_ranks(span, window.ranks, start - longest, start)) - waiting - {rank}
    late_stop_ns = operations.start_ns[mine] - span.start_ns
    in_time = np.argsort(late_stop_ns)
    return Focus(
        rank=rank,
        start_ns=start - int(graph.own_ns[row]) - span.start_ns,
        stop_ns=start - span.start_ns,
        end_ns=int(operations.stop_ns[row]) - span.start_ns,
        excess_ns=longest,
        operation=OperationName(
            CollectiveKind(operations.kind[row]), judged.kinds[group], len(operations.groups[group].ranks)
        ),
        is_compared_with_past=np.count_nonzero(window.stages == window.stages[culprit]) == 1,
        waiting=tuple(sorted(waiting)),
        waiting_meanwhile=tuple(sorted(meanwhile)),
        late_start_ns=(late_stop_ns - excess_ns)[in_time],
        late_stop_ns=late_stop_ns[in_time],
    )


def _waiting_ranks(span: _Span, ranks: Ints, start_ns: int, stop_ns: int) -> list[int]:
    """Return the ranks that wait for a good part of this time."""
    operations, rows = span.graph.operations, span.rows
    begins = np.maximum(operations.start_ns[rows], start_ns)
    ends = np.minimum(operations.start_ns[span.graph.last[rows]], stop_ns)
    position = np.searchsorted(ranks, operations.rank[rows])
    waited = np.bincount(position, weights=np.maximum(ends - begins, 0), minlength=len(ranks))
    return [int(rank) for rank in ranks[waited >= WAITING_SHARE * (stop_ns - start_ns)]]


def _drawn_ranks(window: PathWindow, span: _Span, focus: Focus | None) -> Ints:
    """Return positions in the ranks of the window, by stage. Of a large job: the culprit, those that wait for it, those
    that it meets, its peers, and ranks on the path."""
    ranks, stages = window.ranks, window.stages
    lengths = span.path.stop_ns - span.path.start_ns
    position = np.searchsorted(ranks, span.path.row)
    on_path = np.bincount(position, weights=lengths, minlength=len(ranks))
    kind = np.where(on_path > 0, 4, 5)
    is_peer = np.zeros(len(ranks), dtype=bool)
    if focus is not None:
        is_peer = stages == stages[ranks == focus.rank]
        kind[is_peer] = 3
        kind[np.isin(ranks, _met(span, focus.rank))] = 2
        kind[np.isin(ranks, focus.waiting)] = 1
        kind[ranks == focus.rank] = 0
    order = np.lexsort((ranks, -on_path, is_peer, kind))
    turn = occurrence(kind[order]) // RANKS_OF_A_KIND
    chosen = order[np.argsort(turn, kind="stable")[:MAX_RANKS]]
    return np.asarray(chosen[np.lexsort((ranks[chosen], stages[chosen]))])


def _met(span: _Span, rank: int) -> Ints:
    ranks, number = span.graph.operations.rank[span.rows], span.graph.meetings.number[span.rows]
    mine = number[(ranks == rank) & (number >= 0)]
    return np.unique(ranks[np.isin(number, mine)])


def _drawn_rows(span: _Span, drawn: Ints, ranks: Ints) -> Ints:
    """The operations of the ranks: those on the path first, then the longest."""
    operations = span.graph.operations
    rows = span.rows[np.isin(operations.rank[span.rows], ranks[drawn])]
    length = operations.stop_ns[rows] - operations.start_ns[rows]
    return np.asarray(rows[np.lexsort((-length, ~np.isin(rows, span.on_path)))])


def _names(operations: Operations, rows: Ints, kinds: Sequence[GroupKind]) -> tuple[tuple[OperationName, ...], Ints]:
    """The names of operations, and the number of each row's."""
    order = list(GroupKind)
    of_group = np.array([order.index(kind) for kind in kinds], dtype=np.int64)[operations.group[rows]]
    size = np.array([len(group.ranks) for group in operations.groups], dtype=np.int64)[operations.group[rows]]
    table, number = np.unique(np.stack([operations.kind[rows], of_group, size]), axis=1, return_inverse=True)
    names = (OperationName(CollectiveKind(kind), order[group], size) for kind, group, size in table.T.tolist())
    return tuple(names), number.reshape(-1)


def _bars(span: _Span, rows: Ints, number: Ints, drawn: Ints) -> Bars:
    graph, operations = span.graph, span.graph.operations
    order = np.lexsort((operations.start_ns[rows], _place_of(operations.rank[rows], drawn)))
    rows, number = rows[order], number[order]
    last = graph.last[rows]
    return Bars(
        row=_place_of(operations.rank[rows], drawn),
        operation=number,
        own_ns=graph.own_ns[rows],
        start_ns=operations.start_ns[rows] - span.start_ns,
        arrived_ns=np.clip(operations.start_ns[last], operations.start_ns[rows], operations.stop_ns[rows])
        - span.start_ns,
        stop_ns=operations.stop_ns[rows] - span.start_ns,
        bytes=operations.bytes[rows],
        awaited=np.where(last == rows, UNKNOWN, operations.rank[last]),
    )


def _path(path: PathParts, drawn: Ints) -> PathParts:
    if len(path.row) > MAX_PATH:
        longest = np.argsort(path.start_ns - path.stop_ns, kind="stable")[:MAX_PATH]
        path = take_rows(path, np.sort(longest))
    return replace(path, row=_place_of(path.row, drawn))


def _place_of(ranks: Ints, drawn: Ints) -> Ints:
    """The place of each rank in the picture; UNKNOWN of one that is not drawn."""
    order = np.argsort(drawn)
    place = np.minimum(np.searchsorted(drawn[order], ranks), len(drawn) - 1)
    return np.where(drawn[order][place] == ranks, order[place], UNKNOWN)
