"""Chooses the ranks of a large job whose operations are looked at in depth.

Ranks that are connected by groups other than data groups are a replica. Replicas meet in data groups alone, a few times
a step, and the one that arrives last sets the job's pace. So a window looks at the replicas that arrive last, at those
that were suspected before, and at others in turn as their peers. Of all other ranks, it takes no more than when they
arrive at data groups: all leave together, so that the last to arrive is the one whose operation is the shortest, by any
clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, grouped_median, is_one_of, number_groups, take_rows
from rankscope.analysis.step_graph.group_kinds import MAX_CONTROL_BYTES, GroupKind, infer_group_kinds
from rankscope.analysis.step_graph.operations import Operations, since_issued
from rankscope.analysis.step_graph.window_operations import PackedRows, RankOperations, SeatIndex, join

# A group was not looked at yet, lies inside a replica, or connects replicas: by small operations, or by gradients.
UNKNOWN_GROUP, INNER, CONTROL, DATA = range(4)
NAMED = (GroupKind.TENSOR, GroupKind.PIPELINE, GroupKind.EXPERT, GroupKind.EMBEDDING)
# To name the groups of a replica, so many times its known members are looked at, and ranks that they meet.
MAX_ROUNDS = 6
# Rows of data groups in a window; of more, every second operation is taken, or fewer.
MAX_MEETING_ROWS = 1 << 18
# Windows until groups are looked at again, where they show no replicas.
RETRY_WINDOWS = 16
NEVER_NS = np.iinfo(np.int64).max


class Sample(NamedTuple):
    """The operations of some ranks in some steps, and what is known of all others."""

    operations: Operations
    # The time from the arrival of the last other rank to the end, by row; NEVER_NS where no other meets. None: all are
    # there.
    outside_ns: Ints | None = None
    # How much later than most the replica of each rank arrived, in all steps together.
    late_ns: Floats | None = None


@dataclass(frozen=True)
class _Meetings:
    """The rows of groups in which replicas meet. `rank` is an index into the ranks of the job."""

    rank: Ints
    meeting: Ints
    keys: Ints  # by meeting, ascending
    duration_ns: Floats
    is_data: Bools
    weight: int  # one of so many operations is here

    def earliness(self) -> tuple[Ints, Floats]:
        """How much longer than most members each rank waits, of data groups."""
        rows = np.flatnonzero(self.is_data) if self.is_data.any() else np.arange(len(self.rank))
        usual = grouped_median(self.duration_ns[rows], self.meeting[rows], len(self.keys))[self.meeting[rows]]
        return rows, self.duration_ns[rows] - usual


class ReplicaSampler:
    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._index: SeatIndex | None = None
        self._ranks = np.zeros(0, dtype=np.int64)
        self._places: dict[str, int] = {}  # of each group
        self._known = np.zeros(0, dtype=np.int64)  # of each group
        self._replica = np.zeros(0, dtype=np.int64)  # of each rank
        self._largest = 0  # replica of which all groups are known
        self._pause = 0
        self._window = 0
        self._last_chosen = np.zeros(0, dtype=np.int64)  # the window, by replica

    def sample(
        self,
        ranks: Sequence[int],
        parts: Sequence[RankOperations],
        first: int,
        min_steps: int,
        suspects: Collection[int],
    ) -> Sample | None:
        """The last steps from `first` on that all ranks have sent, at least so many that follow another. None if there
        are too few, while it is not known how the job is made of replicas, or if one of them has too many operations.
        `parts` are those of `ranks`, in this order. `suspects`: ranks to look at again."""
        if self._pause:
            self._pause -= 1
            return None
        self._window += 1
        packed = self._pack(ranks, parts)
        of_part = np.searchsorted(self._ranks, packed.of_parts("rank"))
        stretches = packed.stretches()
        steps = _last_steps(of_part, stretches, len(ranks), first, min_steps)
        if not len(steps):
            return None
        sizes = np.diff(stretches[0], append=len(packed.table))
        is_inside = is_one_of(stretches[2], steps.tolist())
        rows_of_rank = np.bincount(of_part[stretches[1]], sizes * is_inside, len(ranks)).astype(np.int64)
        if not self._explore(parts, of_part, steps, rows_of_rank):
            return None
        meetings = self._meetings(packed, of_part, np.repeat(is_inside, sizes))
        late_ns = self._lateness(meetings)
        chosen = self._choose(rows_of_rank, late_ns, np.isin(self._ranks, list(suspects)))
        if chosen is None:
            return None
        self._last_chosen[chosen] = self._window
        is_inside = np.isin(self._replica, chosen)
        operations = self._decode(parts, is_inside[of_part], steps)
        return Sample(operations, self._outside(operations, meetings, is_inside), late_ns)

    def stages(self, stages: dict[int, int]) -> dict[int, int]:
        """Extend the stages of some ranks to all whom they meet in data groups, who do the same."""
        index = self._index
        if index is None or not len(self._replica):
            return stages
        of_group = np.full(len(index.groups), -1)
        of_seat = np.array([stages.get(rank, -1) for rank in index.rank.tolist()], dtype=np.int64)
        is_known = (of_seat >= 0) & (self._known[index.group] == DATA)
        of_group[index.group[is_known]] = of_seat[is_known]
        follows = (of_group[index.group] >= 0) & (self._known[index.group] == DATA)
        others = zip(index.rank[follows].tolist(), of_group[index.group[follows]].tolist(), strict=True)
        return {**dict(others), **stages}

    def check(self, groups: Iterable[str], kinds: Iterable[GroupKind]) -> None:
        """Look at all groups again if one of these, seen more often by now, is not what was taken for granted."""
        for name, kind in zip(groups, kinds, strict=True):
            known = self._known[self._places[name]] if name in self._places else UNKNOWN_GROUP
            if (known == INNER and kind is GroupKind.DATA) or (known == DATA and kind in NAMED):
                self._forget()
                return

    def _pack(self, ranks: Sequence[int], parts: Sequence[RankOperations]) -> PackedRows:
        """Ranks create groups while a job runs."""
        if self._index is not None and self._ranks.tolist() == list(ranks):
            packed = PackedRows.of(parts, self._index)
            if (packed.first_seat >= 0).all():
                return packed
        self._index, self._ranks = SeatIndex.of(parts), np.array(ranks, dtype=np.int64)
        self._places = {group.name: place for place, group in enumerate(self._index.groups)}
        self._pause = 0
        self._forget()
        return PackedRows.of(parts, self._index)

    def _forget(self) -> None:
        assert self._index is not None
        self._known = np.full(len(self._index.groups), UNKNOWN_GROUP)
        self._largest = 0
        self._connect()

    def _connect(self) -> None:
        """Number the replicas: the lowest rank of each goes from group to group until nothing changes."""
        assert self._index is not None
        count = len(self._ranks)
        place = np.searchsorted(self._ranks, self._index.rank).clip(max=max(count - 1, 0))
        is_link = (self._known[self._index.group] <= INNER) & (self._ranks[place] == self._index.rank)
        place, group = place[is_link], self._index.group[is_link]
        lowest, before = np.arange(count), np.full(count, -1)
        while not np.array_equal(lowest, before):
            before = lowest.copy()
            of_group = np.full(len(self._known), count)
            np.minimum.at(of_group, group, lowest[place])
            np.minimum.at(lowest, place, of_group[group])
            lowest = lowest[lowest]
        self._replica = np.unique(lowest, return_inverse=True)[1]
        self._last_chosen = np.zeros(int(self._replica.max(initial=-1)) + 1, dtype=np.int64)

    def _explore(self, parts: Sequence[RankOperations], of_part: Ints, steps: Ints, rows_of_rank: Ints) -> bool:
        """Name the groups of one more replica, if some are not known yet. A replica as large as one that is known has
        no unknown group that leads elsewhere."""
        looked_at = 0
        sizes = np.bincount(self._replica)
        while sizes.max() > self._largest:
            if looked_at > self._max_rows:
                return False  # for the next window
            seed = int(np.flatnonzero(self._replica == np.argmax(sizes))[0])
            members = self._grow(seed, parts, of_part, steps, rows_of_rank)
            if members is None:
                self._pause = RETRY_WINDOWS
                return False
            self._connect()
            is_closed = np.array_equal(np.flatnonzero(self._replica == self._replica[seed]), members)
            self._largest = max(self._largest, len(members)) if is_closed else len(self._ranks)
            if len(members) == len(self._ranks) or not is_closed:
                self._pause = RETRY_WINDOWS
                return False
            looked_at += int(rows_of_rank[members].sum())
            sizes = np.bincount(self._replica)
        return True

    def _grow(
        self, seed: int, parts: Sequence[RankOperations], of_part: Ints, steps: Ints, rows_of_rank: Ints
    ) -> Ints | None:
        """Return the ranks of the replica of one, and remember what its groups are; None if it has too many
        operations."""
        inside = np.zeros(len(self._ranks), dtype=bool)
        inside[seed] = True
        for _ in range(MAX_ROUNDS):
            if rows_of_rank[inside].sum() > self._max_rows:
                return None
            operations = self._decode(parts, inside[of_part], steps)
            kinds = infer_group_kinds(operations, len(self._ranks))
            known = _classify(operations, kinds)
            named = [kind in NAMED for kind in kinds]
            grown = self._with_members(inside, operations, named)
            if np.array_equal(grown, inside):
                grown = self._with_members(inside, operations, (known == INNER).tolist())
            if np.array_equal(grown, inside):
                for group, each in zip(operations.groups, known.tolist(), strict=True):
                    self._known[self._places[group.name]] = each
                return np.flatnonzero(inside)
            inside = grown
        return None

    def _with_members(self, inside: Bools, operations: Operations, wanted: Sequence[bool]) -> Bools:
        groups = zip(operations.groups, wanted, strict=True)
        members = {rank for group, is_wanted in groups if is_wanted for rank in group.ranks}
        return np.asarray(inside | np.isin(self._ranks, np.array(list(members), dtype=np.int64)))

    def _decode(self, parts: Sequence[RankOperations], wanted: Bools, steps: Ints) -> Operations:
        some = [part for part, is_wanted in zip(parts, wanted.tolist(), strict=True) if is_wanted]
        operations = join(some, self._index)
        operations = take_rows(operations, np.isin(operations.step, steps))
        return replace(operations, queued_ns=since_issued(operations.rank, operations.queued_ns))

    def _meetings(self, packed: PackedRows, of_part: Ints, is_wanted: Bools) -> _Meetings:
        rows = packed.rows_in(self._known >= CONTROL)
        rows = rows[is_wanted[rows]]
        weight = 1 + len(rows) // MAX_MEETING_ROWS
        sequence = packed.table["sequence"][rows].astype(np.int64)
        if weight > 1:
            rows, sequence = rows[sequence % weight == 0], sequence[sequence % weight == 0]
        group, _ = packed.groups(rows)
        keys, meeting = np.unique(_key(group, packed.table["kind"][rows], sequence), return_inverse=True)
        part = packed.of_part[rows]
        duration = np.maximum(packed.table["length"][rows] * packed.of_parts("tick_ns")[part], 1)
        is_data = self._known[group] == DATA
        return _Meetings(of_part[part], meeting, keys, duration.astype(np.float64), is_data, weight)

    def _lateness(self, meetings: _Meetings) -> Floats:
        rows, early = meetings.earliness()
        late = np.bincount(meetings.rank[rows], np.maximum(-early, 0.0), len(self._ranks))
        of_replica = np.zeros(len(self._last_chosen))
        np.maximum.at(of_replica, self._replica, late)
        return of_replica[self._replica] * meetings.weight

    def _choose(self, rows_of_rank: Ints, late_ns: Floats, suspects: Bools) -> Ints | None:
        """A third each: replicas that are suspected, that are late, and others in turn that meet these."""
        count = len(self._last_chosen)
        rows = np.bincount(self._replica, rows_of_rank, count)
        late = np.zeros(count)
        late[self._replica] = late_ns
        is_suspected = np.bincount(self._replica, suspects, count) > 0
        most = int(self._max_rows // max(rows.max(), 1))
        if not most:
            return None
        by_lateness = np.argsort(-late, kind="stable")
        suspected = by_lateness[is_suspected[by_lateness]][: max(1, most // 3)]
        latest = by_lateness[~np.isin(by_lateness, suspected)][: max(1, most // 3)]
        first = np.concatenate([suspected, latest])[:most]
        neighbours = self._neighbours(first)
        in_turn = np.argsort(self._last_chosen, kind="stable")
        in_turn = in_turn[neighbours[in_turn] & ~np.isin(in_turn, first)]
        return np.concatenate([first, in_turn[: most - len(first)]])

    def _neighbours(self, replicas: Ints) -> Bools:
        """Replicas that share data groups with some: their clocks can be aligned."""
        assert self._index is not None
        place = np.searchsorted(self._ranks, self._index.rank).clip(max=len(self._ranks) - 1)
        replica = self._replica[place]
        is_meeting = self._known[self._index.group] == DATA
        groups = np.unique(self._index.group[is_meeting & np.isin(replica, replicas)])
        found = np.zeros(len(self._last_chosen), dtype=bool)
        found[replica[is_meeting & np.isin(self._index.group, groups)]] = True
        return found if found.any() else np.ones(len(found), dtype=bool)

    def _outside(self, operations: Operations, meetings: _Meetings, is_inside: Bools) -> Ints:
        outside = np.full(len(meetings.keys), np.inf)
        others = ~is_inside[meetings.rank]
        np.minimum.at(outside, meetings.meeting[others], meetings.duration_ns[others])
        of_group = np.array([self._places[group.name] for group in operations.groups], dtype=np.int64)
        rows = np.flatnonzero(operations.sequence >= 0)
        keys = _key(of_group[operations.group[rows]], operations.kind[rows], operations.sequence[rows])
        place = np.searchsorted(meetings.keys, keys).clip(max=max(len(meetings.keys) - 1, 0))
        result = np.full(len(operations), NEVER_NS)
        if len(meetings.keys):
            is_known = (meetings.keys[place] == keys) & np.isfinite(outside[place])
            result[rows[is_known]] = outside[place[is_known]].astype(np.int64)
        return result


def _last_steps(of_part: Ints, stretches: tuple[Ints, Ints, Ints], ranks: int, first: int, needed: int) -> Ints:
    """Return the last steps that follow each other, of those that all ranks have sent."""
    _, part, step = stretches
    late = step >= first
    # A rank may have a step in two windows.
    number, count = number_groups(step[late], of_part[part[late]])
    sent = np.zeros(count, dtype=np.int64)
    sent[number] = step[late]
    steps, ranks_of_step = np.unique(sent, return_counts=True)
    steps = steps[ranks_of_step == ranks]
    return last_following(steps, needed)


def last_following(steps: Ints, needed: int) -> Ints:
    """The last of some steps, of which as many as needed follow another: without a gap between them, unless there are
    twice as many with gaps. None if there are too few."""
    follows = np.diff(steps) == 1
    together = np.convolve(follows, np.ones(needed), "valid") == needed if len(follows) >= needed else follows[:0]
    if together.any():
        first = int(np.flatnonzero(together)[-1])
        return np.asarray(steps[first : first + needed + 1])
    places = np.flatnonzero(follows)
    return np.asarray(steps[places[-needed] :] if len(places) >= 2 * needed else steps[:0])


def _key(group: Ints, kind: Ints, sequence: Ints) -> Ints:
    return np.asarray((group << 5 | kind & 31) << 32 | sequence)


def _classify(operations: Operations, kinds: Sequence[GroupKind]) -> Ints:
    """A group of unknown kind with nothing but counts and norms says nothing of who works together."""
    largest = np.zeros(len(kinds), dtype=np.int64)
    np.maximum.at(largest, operations.group, operations.bytes)
    return np.array(
        [
            DATA
            if kind is GroupKind.DATA
            else CONTROL
            if kind is GroupKind.GLOBAL or (kind is GroupKind.UNKNOWN and size <= MAX_CONTROL_BYTES)
            else INNER
            for kind, size in zip(kinds, largest.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
