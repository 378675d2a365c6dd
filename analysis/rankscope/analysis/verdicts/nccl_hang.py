"""Who never arrived, from NCCL's counters of each communicator. They are read from outside of the processes, so they
are right for a rank that holds Python's lock, is in C++, or plays a CUDA graph.

A rank is in an operation that its GPU has started and not finished. It is missing in one that others are in if it is in
none of that communicator and has not passed that one. Only members of the same communicator are compared:

- By NCCL's sequence, if both are of the same function. NCCL counts each function of a communicator, also while the
  plugin does not listen.
- Else by the number of operations that were started. The plugin listens in the same steps on all ranks.

Operations that were only issued are no evidence: hosts run ahead. Messages have no sequence, and a communicator of
messages has members that take no part: a rank is missing there if it is in no operation at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankscope.analysis.profiles.phases import COMMUNICATION
from rankscope.analysis.quantities import count
from rankscope.analysis.verdicts.thresholds import FIXED
from rankscope.analysis.verdicts.verdict import ranks
from rankscope.analysis.verdicts.windows import Communicator, NcclOperation, Stall

MESSAGES = frozenset({"Send", "Recv", "SendRecv"})
# No member leaves one before all have entered it.
SYNCHRONIZING = frozenset({"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"})
COUNTED = SYNCHRONIZING | {"Broadcast", "Reduce", "Gather", "Scatter"}
MAX_PLACES = 4


@dataclass(frozen=True)
class NcclFinding:
    culprits: tuple[int, ...]  # none where no rank alone is to blame
    text: str
    is_mismatch: bool = False  # they entered another operation than the others, instead of none


@dataclass(frozen=True)
class _Group:
    """A communicator in which ranks wait. Ranks are those of the job."""

    rows: Mapping[int, Communicator]
    waiting: Mapping[int, NcclOperation]  # what they wait in
    operation: NcclOperation  # that most of them wait in
    missing: tuple[int, ...]

    @property
    def size(self) -> int:
        return next(iter(self.rows.values())).size

    @property
    def is_of_messages(self) -> bool:
        return self.operation.function in MESSAGES

    @property
    def text(self) -> str:
        return f"{_text(self.operation)} of a group of {self.size}"


def waits_in_nccl(stall: Stall) -> bool:
    return any(row.is_busy and row.unchanged_seconds >= FIXED.nccl_unchanged_seconds for row in stall.communicators)


def find_missing(standing: Mapping[int, Stall]) -> NcclFinding | None:
    """None where the counters do not tell."""
    rows = {rank: stall.communicators for rank, stall in standing.items() if _is_still(stall.communicators)}
    groups = sorted(_groups(rows), key=lambda group: -len(group.waiting))
    waiting = frozenset(rank for rank, own in rows.items() if any(row.is_busy for row in own))
    found = _awaited(groups, waiting, standing) or _mismatch(groups) or _cycle(groups)
    return found or _nobody(groups, len(standing))


def _is_still(rows: Sequence[Communicator]) -> bool:
    return bool(rows) and all(row.unchanged_seconds >= FIXED.nccl_unchanged_seconds for row in rows)


def _groups(rows: Mapping[int, Sequence[Communicator]]) -> Iterator[_Group]:
    """Those with two members that report, and one that waits."""
    busy = {(row.number, row.size) for own in rows.values() for row in own if row.is_busy}
    members: dict[tuple[int, int], list[tuple[int, Communicator]]] = {}
    for rank in sorted(rows):
        for row in rows[rank]:
            if (row.number, row.size) in busy:
                members.setdefault((row.number, row.size), []).append((rank, row))
    for known in members.values():
        by_rank = dict(known)
        positions = {row.position for row in by_rank.values()}
        if not 2 <= len(known) == len(by_rank) == len(positions):
            continue  # a single member, or two that cannot be told apart
        waiting = {rank: row.last_started for rank, row in known if row.is_busy and row.last_started is not None}
        if not waiting:
            continue
        furthest = _furthest([by_rank[rank] for rank in waiting])
        missing = (
            rank for rank, row in known if not row.is_busy and any(not _has_passed(row, other) for other in furthest)
        )
        yield _Group(by_rank, waiting, Counter(waiting.values()).most_common(1)[0][0], tuple(missing))


def _furthest(rows: Sequence[Communicator]) -> list[Communicator]:
    """A few that stand for all: who has passed these has passed all."""
    kinds: dict[tuple[str, bool], list[Communicator]] = {}
    for row in rows:
        function = "" if row.last_started is None else row.last_started.function
        kind = function if function in COUNTED | MESSAGES else ""
        kinds.setdefault((kind, _is_played(row)), []).append(row)
    return [
        max(alike, key=key)
        for alike in kinds.values()
        for key in (lambda row: row.started, lambda row: 0 if row.last_started is None else row.last_started.sequence)
    ]


def _is_played(row: Communicator) -> bool:
    """By a CUDA graph: its operations have the sequence of the capture."""
    return row.started > row.issued


def _has_passed(row: Communicator, other: Communicator) -> bool:
    """Whether a member that is in no operation has been in the one that the other is in."""
    last, awaited = row.last_started, other.last_started
    if awaited is None or awaited.function in MESSAGES:
        return False
    is_counted = awaited.function in COUNTED and not _is_played(row) and not _is_played(other)
    if is_counted and last is not None and last.function == awaited.function:
        return last.sequence >= awaited.sequence
    return row.started >= other.started


def _awaited(groups: Sequence[_Group], waiting: frozenset[int], standing: Mapping[int, Stall]) -> NcclFinding | None:
    """Ranks that are missing and wait for nobody. One that is missing because it waits elsewhere is a link of a chain:
    the rank that it waits for is missing there."""
    for of_messages in (False, True):
        alike = [group for group in groups if group.is_of_messages is of_messages]
        free = {rank for group in alike for rank in group.missing if rank not in waiting}
        # A rank may wait by other means than NCCL, such as gloo or a store.
        elsewhere = {rank for rank in free if standing[rank].phase == COMMUNICATION}
        free = free - elsewhere or free
        if free:
            group = next(group for group in alike if not free.isdisjoint(group.missing))
            is_odd = free == elsewhere and 2 * len(free) >= len(group.rows) > 2
            return (
                _alone(group, free) if is_odd else NcclFinding(tuple(sorted(free)), _awaited_text(group, free, waiting))
            )
    return None


def _alone(group: _Group, elsewhere: set[int]) -> NcclFinding:
    """The hosts of most members are in a collective, but not in this one. Where sizes differ, so may the algorithms:
    the host of a rank that needs another algorithm connects to its peers first, and waits for them there."""
    few = tuple(group.waiting)
    how = f"entered {group.text}, while {ranks(sorted(elsewhere.intersection(group.rows)))} wait in another collective"
    return NcclFinding(
        few if 2 * len(few) < len(group.rows) else (), f"{how}, or in one of another size", is_mismatch=True
    )


def _awaited_text(group: _Group, awaited: set[int], waiting: frozenset[int]) -> str:
    here = [rank for rank in group.missing if rank in awaited]
    first = group.rows[here[0]]
    if group.is_of_messages:
        how = f"in no operation of NCCL; it is missing in {group.text}"
    elif all(_has_issued(group.rows[rank], group.operation) for rank in here):
        how = f"issued {group.text}, which has not started on the GPU"
    else:
        last = f" (last there: {_text(first.last_issued)})" if len(here) == 1 and first.last_issued else ""
        how = f"never entered {group.text}{last}"
    behind = waiting.difference(group.waiting)
    elsewhere = sorted(awaited.difference(here))
    parts = [
        f"{ranks([*group.waiting])} {'waits' if len(group.waiting) == 1 else 'wait'} in it",
        f"{count(len(behind), 'more rank')} in other groups" if behind else "",
        f"{ranks(elsewhere)} missing in other groups" if elsewhere else "",
    ]
    return f"{how}; {', '.join(filter(None, parts))}"


def _has_issued(row: Communicator, operation: NcclOperation) -> bool:
    last = row.last_issued
    is_same = last is not None and last.function == operation.function and last.sequence >= operation.sequence
    return is_same and row.issued > row.started


def _mismatch(groups: Sequence[_Group]) -> NcclFinding | None:
    """Members of a group that entered different operations, where all must enter the same. The few are named."""
    for group in groups:
        at = _entered(group)
        operations = Counter(at.values())
        if group.missing or len(operations) < 2 or not {one.function for one in operations} <= SYNCHRONIZING:
            continue
        order = [one for one, _ in operations.most_common()]
        few = tuple(rank for rank, one in at.items() if one != order[0])
        places = [f"{ranks([rank for rank in at if at[rank] == one])} {_text(one)}" for one in order[:MAX_PLACES]]
        text = f"ranks entered different operations in a group of {group.size}: {', '.join(places)}"
        return NcclFinding(few if 2 * len(few) < len(at) else (), text, is_mismatch=True)
    return None


def _entered(group: _Group) -> dict[int, NcclOperation]:
    """By rank, what it is in; or has left, where that was another function and its number is that of the others."""
    others = [group.rows[rank] for rank in group.waiting]
    numbers = set() if any(map(_is_played, others)) else {one.started for one in others}
    entered = {}
    for rank, row in group.rows.items():
        last = row.last_started
        if last is None:
            continue
        has_left = not row.is_busy and {row.started} == numbers and last.function != group.operation.function
        if has_left or _is_in_one(row):
            entered[rank] = last
    return entered


def _is_in_one(row: Communicator) -> bool:
    """In one operation, and it is the last that was started: operations that were issued together may end out of
    order."""
    last, before = row.last_started, row.last_finished
    is_last = last is not None and (before is None or before.function != last.function or before < last)
    return is_last and row.started - row.finished == 1


def _cycle(groups: Sequence[_Group]) -> NcclFinding | None:
    """All who are missing somewhere wait elsewhere: ranks enter groups in different orders."""
    # Who takes part in the messages of a larger group is not known.
    known = [group for group in groups if group.size == 2 or not group.is_of_messages]
    where = {rank: place for place, group in enumerate(known) for rank in group.waiting}
    seen: set[int] = set()
    for place in range(len(known)):
        path: list[int] = []
        while place not in seen:
            seen.add(place)
            path.append(place)
            place = next((where[rank] for rank in known[place].missing if rank in where), place)
        if place in path and path[-1] != place:
            around = [known[one] for one in path[path.index(place) :]]
            places = [f"{ranks([*group.waiting])} in {group.text}" for group in around[:MAX_PLACES]]
            return NcclFinding((), f"ranks wait for each other in different groups: {', '.join(places)}")
    return None


def _nobody(groups: Sequence[_Group], standing: int) -> NcclFinding | None:
    for group in groups:
        is_whole = len(group.waiting) == group.size == standing and len(set(group.waiting.values())) == 1
        if is_whole and not group.is_of_messages:
            return NcclFinding((), f"all ranks are in {group.text}, nobody is missing; check the network and the GPUs")
    return None


def _text(operation: NcclOperation) -> str:
    is_counted = operation.function in COUNTED
    return f"{operation.function} {operation.sequence}" if is_counted else operation.function
