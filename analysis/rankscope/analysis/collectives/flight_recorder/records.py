"""The records of all dumps of a job as columns: groups with their members, batches of operations as one, and which
ranks are at the same place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, Group, Operation
from rankscope.analysis.collectives.flight_recorder.dump import Dump, State
from rankscope.analysis.stats.robust import Bools, Ints

_DEFAULT_GROUP = "default_pg"
# No rank can finish these before all have entered.
_SYMMETRIC = (
    *(CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER),
    *(CollectiveKind.ALL_TO_ALL, CollectiveKind.BARRIER),
)


@dataclass(frozen=True)
class Position:
    """Ranks whose record of an operation is the same."""

    ranks: tuple[int, ...]
    group: Group
    sequence: int
    operation: Operation
    line: str | None  # train_step (train.py:88)
    state: State


@dataclass(frozen=True)
class Absence:
    """Ranks that did not enter an operation, and whose records are otherwise the same."""

    ranks: tuple[int, ...]
    last_finished: Position | None  # in the group
    last_record: Position | None  # in any group; if it is not finished, the ranks are in it


class Records:
    """All records of all ranks as columns. A collective that was issued as a batch of records is one row."""

    def __init__(self, dumps: Mapping[int, Dump], catalog: Catalog) -> None:
        self.catalog = catalog
        self.dumps = dumps
        self.ranks = list(dumps)
        self.groups, columns = _resolve_groups(dumps, catalog)
        each = [dumps[rank] for rank in self.ranks]
        self.rank = np.repeat(np.array(self.ranks, dtype=np.int64), [len(dump) for dump in each])
        self.group = _joined(columns)
        self.sequence = _joined([dump.sequence for dump in each])
        self.is_p2p = _joined([dump.is_p2p for dump in each]).astype(bool)
        self.operation = _joined([dump.operation for dump in each])
        self.line = _joined([dump.line for dump in each])
        self.state = _joined([dump.state for dump in each])
        self._merge_batches()
        collectives = np.flatnonzero(~self.is_p2p)
        order = np.lexsort((self.rank[collectives], self.sequence[collectives], self.group[collectives]))
        self.collectives = collectives[order]
        self._borders = np.searchsorted(self.group[self.collectives], np.arange(len(self.groups) + 1))
        symmetric = np.array([one.kind in _SYMMETRIC for one in catalog.operations], dtype=bool)
        self.is_symmetric = symmetric[self.operation]
        self._end_what_others_finished()
        waiting = np.flatnonzero(self.state == State.PENDING)[::-1]
        self.first_waiting = dict(zip(self.rank[waiting].tolist(), waiting.tolist(), strict=True))
        # Where each rank is: in the first operation that does not finish, or behind its last record.
        self._now = dict(zip(self.rank.tolist(), range(len(self.rank)), strict=True)) | self.first_waiting

    def _merge_batches(self) -> None:
        count = len(self.rank)
        if not count:
            return
        order = np.lexsort((np.arange(count), self.group, self.rank))
        ends_batch = np.array([one.ends_coalescing for one in self.catalog.operations], dtype=bool)[self.operation]
        same = np.zeros(count, dtype=bool)
        before, after = order[:-1], order[1:]
        same[1:] = (self.rank[after] == self.rank[before]) & (self.group[after] == self.group[before])
        is_oldest = ~same
        # A batch of sends and receives may end with a record that has the number of a collective.
        closes = np.zeros(count, dtype=bool)
        closes[1:] = same[1:] & ends_batch[after] & ~self.is_p2p[after] & self.is_p2p[before]
        self.is_p2p[order[closes]] = True
        self.sequence[order[closes]] = self.sequence[order[np.flatnonzero(closes) - 1]]
        same[1:] &= (self.is_p2p[after] == self.is_p2p[before]) & (self.sequence[after] == self.sequence[before])
        starts = np.flatnonzero(~same)
        lengths = np.diff(starts, append=count)
        lasts = order[starts + lengths - 1]
        # Records inside a batch have no events; the one that ends it has the state of all.
        closed = ends_batch[lasts] & (lengths > 1)
        takes = np.repeat(closed, lengths) & (self.state[order] == State.PENDING)
        self.state[order[takes]] = np.repeat(self.state[lasts], lengths)[takes]
        keep = np.ones(count, dtype=bool)
        keep[lasts[closed]] = False
        # The oldest batch of a ring may have lost its first records.
        rings = [rank for rank, dump in self.dumps.items() if not dump.is_from_start]
        cut = ends_batch[lasts] & is_oldest[starts] & np.isin(self.rank[lasts], rings)
        for block in np.flatnonzero((lengths > 1) & ~self.is_p2p[lasts]).tolist():
            rows = order[starts[block] : starts[block] + lengths[block]]
            keep[rows[1:]] = False
            parts = self.operation[rows[: -1 if closed[block] else None]]
            if len(parts) > 1:
                self.operation[rows[0]] = self.catalog.number_of_batch(tuple(parts.tolist()))
            keep[rows[0]] = True
        keep[order[np.repeat(cut, lengths)]] = False
        for name in ("rank", "group", "sequence", "is_p2p", "operation", "line", "state"):
            setattr(self, name, getattr(self, name)[keep])

    def _end_what_others_finished(self) -> None:
        """A collective that all have entered, some have finished and some have gone on from holds nobody: its end was
        not noticed before the dump."""
        rows = self.collectives
        if not len(rows):
            return
        group, rank, finished = self.group[rows], self.rank[rows], self.state[rows] != State.PENDING
        is_first = np.append(True, (group[1:] != group[:-1]) | (self.sequence[rows][1:] != self.sequence[rows][:-1]))
        starts = np.flatnonzero(is_first)
        ranks = np.add.reduceat((is_first | np.append(True, rank[1:] != rank[:-1])).astype(np.int64), starts)
        present = np.array([sum(one in self.dumps for one in each.members or ()) for each in self.groups])
        is_passed = np.append(group[starts[1:]] == group[starts[:-1]], False)
        ended = (ranks >= present[group[starts]]) & np.logical_or.reduceat(finished, starts) & is_passed
        ended_rows = rows[np.repeat(ended, np.diff(starts, append=len(rows))) & ~finished]
        self.state[ended_rows] = State.ENDED

    def collectives_of(self, group: int) -> Ints:
        """By sequence number, then by rank."""
        return self.collectives[self._borders[group] : self._borders[group + 1]]

    def position(self, rows: Sequence[int]) -> Position:
        """Of rows with the same operation, sequence number and line."""
        first = rows[0]
        line = int(self.line[first])
        return Position(
            ranks=tuple(sorted(set(self.rank[list(rows)].tolist()))),
            group=self.groups[int(self.group[first])],
            sequence=int(self.sequence[first]),
            operation=self.catalog.operations[int(self.operation[first])],
            line=self.catalog.lines[line] if line >= 0 else None,
            state=State(int(self.state[first])),
        )

    def positions(self, rows: Ints) -> tuple[Position, ...]:
        """Rows that are the same become one position; the largest first."""
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        columns = (self.operation, self.line, self.state, self.sequence, self.group)
        keys = zip(*(column[rows].tolist() for column in columns), strict=True)
        for row, key in zip(rows.tolist(), keys, strict=True):
            alike[key].append(row)
        found = [self.position(each) for each in alike.values()]
        return tuple(sorted(found, key=lambda one: (-len(one.ranks), one.ranks)))

    def absences(self, ranks: Iterable[int], last_finished: Mapping[int, int]) -> tuple[Absence, ...]:
        """Ranks that finished the same last operation and are at the same place now, together."""
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in ranks:
            rows = (self._now.get(rank, -1), last_finished.get(rank, -1))
            columns = (self.group, self.sequence, self.operation, self.line)
            alike[tuple(int(column[row]) if row >= 0 else -1 for row in rows for column in columns)].append(rank)
        found = []
        for together in alike.values():
            finished = [last_finished[rank] for rank in together if rank in last_finished]
            now = [self._now[rank] for rank in together if rank in self._now]
            positions = [self.position(rows) if rows else None for rows in (finished, now)]
            found.append(Absence(tuple(sorted(together)), *positions))
        return tuple(sorted(found, key=lambda one: (-len(one.ranks), one.ranks)))


def _joined(columns: list[Ints] | list[Bools]) -> Ints:
    return np.concatenate([*columns, np.zeros(0, dtype=np.int64)]).astype(np.int64)


def _resolve_groups(dumps: Mapping[int, Dump], catalog: Catalog) -> tuple[list[Group], list[Ints]]:
    """The groups of the job with their members; and for each dump, the groups of its records by their numbers there.

    Groups of the same name are different groups if their members differ. A group whose members no dump states has
    those that used it; the default group has all ranks."""
    stated: dict[str, list[int]] = defaultdict(list)
    used = sorted({number for dump in dumps.values() for number in dump.groups})
    for number in used:
        if catalog.groups[number].members is not None:
            stated[catalog.groups[number].name].append(number)
    world = set(dumps).union(*(catalog.groups[number].members or () for number in used))
    world = world.union(*(dump.mentioned for dump in dumps.values()))
    users: dict[int, set[int]] = defaultdict(set)
    replaced: dict[tuple[int, int], int] = {}
    for rank, dump in dumps.items():
        for number in dump.groups:
            group = catalog.groups[number]
            if group.members is None:
                fitting = [one for one in stated[group.name] if rank in (catalog.groups[one].members or ())]
                if len(fitting) == 1:
                    replaced[rank, number] = fitting[0]
                    continue
            users[number].add(rank)
    replacements = set(replaced.values())
    groups: list[Group] = []
    places: dict[int, int] = {}
    for number in used:
        if number not in users and number not in replacements:
            continue
        group = catalog.groups[number]
        members = group.members
        if members is None:
            members = tuple(sorted(world if group.description == _DEFAULT_GROUP else users[number]))
        places[number] = len(groups)
        groups.append(Group(group.name, group.description, members))
    columns = []
    for rank, dump in dumps.items():
        used_here, rows = np.unique(dump.group, return_inverse=True)
        numbers = [places[replaced.get((rank, number), number)] for number in used_here.tolist()]
        columns.append(np.array(numbers, dtype=np.int64)[rows])
    return groups, columns
