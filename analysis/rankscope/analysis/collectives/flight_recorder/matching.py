"""Where the ranks of a job are in their collectives, from the dumps of their flight recorders.

Collectives are matched across ranks by group and sequence number. Of each group, the first collective that some rank
waits in tells who is missing: later ones are queued behind it. A rank is said not to have entered it only if its dump
shows so: a ring that has dropped older records, or a dump of some records only, leaves it open.

Point-to-point operations are matched in the order in which they were issued from one rank to another: each rank numbers
them for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, Group, Operation
from rankscope.analysis.collectives.flight_recorder.dump import Dump, State
from rankscope.analysis.collectives.flight_recorder.records import Absence, Position, Records
from rankscope.analysis.stats.robust import Ints


class Difference(str, Enum):
    OPERATION = "operation"
    TYPE = "dtype"
    SIZE = "size"

    @property
    def words(self) -> str:
        return f"{self.value}s"


@dataclass(frozen=True)
class Mismatch:
    difference: Difference
    sequence: int
    positions: tuple[Position, ...]  # the largest first
    sequences: int  # how many sequence numbers of the group have one; this is the first


@dataclass(frozen=True)
class Stall:
    """The first operation of a group that ranks wait in; of several groups if it is the same in all of them."""

    group: Group
    others: tuple[Group, ...]
    sequence: int
    is_p2p: bool
    waiting: tuple[Position, ...]  # the largest first
    finished: tuple[int, ...]
    never_entered: tuple[Absence, ...]
    no_dump: tuple[int, ...]
    unknown: tuple[int, ...]  # records of that time are not in their dumps
    is_root: bool  # a missing rank is not itself waiting elsewhere

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.group, *self.others)

    @property
    def is_in_flight(self) -> bool:
        """Nobody is missing: it runs, or the transfer itself does not get on."""
        return not (self.never_entered or self.no_dump or self.unknown)


@dataclass(frozen=True)
class GroupStatus:
    group: Group
    ranks: tuple[int, ...]
    no_dump: tuple[int, ...]
    last_entered: int | None  # the highest sequence number of a collective that any rank has entered
    last_entered_by_all: int | None
    status: str  # of its collectives: complete, waiting, mismatched, in_flight


@dataclass(frozen=True)
class Analysis:
    ranks: tuple[int, ...]  # with a dump
    no_dump: tuple[int, ...]
    without_records: tuple[int, ...]
    stalls: tuple[Stall, ...]  # the most telling first
    mismatches: tuple[tuple[Group, Mismatch], ...]
    groups: tuple[GroupStatus, ...]
    records: int


def analyze_dumps(dumps: Mapping[int, Dump], catalog: Catalog) -> Analysis:
    """Dumps of one job, by rank."""
    records = Records(dict(sorted(dumps.items())), catalog)
    found = [_examine(records, number) for number in range(len(records.groups))]
    stalls, mismatches = _examine_p2p(records)
    stalls += [stall for _, stall, _ in found if stall is not None]
    mismatches += [(status.group, mismatch) for status, _, mismatch in found if mismatch is not None]
    known = set(dumps)
    named = {rank for status, _, _ in found for rank in status.ranks}
    return Analysis(
        ranks=tuple(records.ranks),
        no_dump=tuple(sorted(named - known)),
        without_records=tuple(rank for rank, dump in records.dumps.items() if not dump.has_records),
        stalls=tuple(sorted(_merge_alike(stalls), key=_importance)),
        mismatches=tuple(mismatches),
        groups=tuple(status for status, _, _ in found),
        records=sum(map(len, dumps.values())),
    )


def _merge_alike(stalls: Sequence[Stall]) -> list[Stall]:
    """A rank or node that is missing stalls many groups at the same place: the groups of a parallel layout."""
    alike: dict[Any, list[Stall]] = defaultdict(list)
    for stall in stalls:
        waiting = frozenset(_key(at) for at in stall.waiting)
        absent = frozenset(_absence_key(one) for one in stall.never_entered)
        kinds = (stall.is_p2p, bool(stall.no_dump), bool(stall.unknown), bool(stall.finished), stall.is_root)
        # Two ranks of a point-to-point operation say more than their number.
        alike[(waiting, absent, kinds, stall.group if stall.is_p2p else None)].append(stall)
    return [_merged(each) if len(each) > 1 else each[0] for each in alike.values()]


def _merged(stalls: Sequence[Stall]) -> Stall:
    waiting: dict[Any, list[Position]] = defaultdict(list)
    absent: dict[Any, list[Absence]] = defaultdict(list)
    for stall in stalls:
        for at in stall.waiting:
            waiting[_key(at)].append(at)
        for one in stall.never_entered:
            absent[_absence_key(one)].append(one)
    return replace(
        stalls[0],
        others=tuple(stall.group for stall in stalls[1:]),
        waiting=tuple(replace(each[0], ranks=_union(at.ranks for at in each)) for each in waiting.values()),
        never_entered=tuple(replace(each[0], ranks=_union(one.ranks for one in each)) for each in absent.values()),
        finished=_union(stall.finished for stall in stalls),
        no_dump=_union(stall.no_dump for stall in stalls),
        unknown=_union(stall.unknown for stall in stalls),
    )


def _key(position: Position | None) -> Any:
    """Positions in different groups are the same if operation, sequence number, line and state agree."""
    if position is None:
        return None
    return (position.operation, position.sequence, position.line, position.state)


def _absence_key(absence: Absence) -> Any:
    now = absence.last_record
    group = now.group if now is not None and now.state is State.PENDING else None
    return (_key(absence.last_finished), now and (now.operation.name, now.line, now.state), group)


def _union(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*ranks)))


def _importance(stall: Stall) -> tuple[bool, bool, int]:
    return (stall.is_in_flight, not stall.is_root, -sum(len(one.ranks) for one in stall.waiting))


def _examine(records: Records, number: int) -> tuple[GroupStatus, Stall | None, Mismatch | None]:
    group = records.groups[number]
    members = group.members or ()
    rows = records.collectives_of(number)
    present = [rank for rank in members if rank in records.dumps]
    no_dump = tuple(rank for rank in members if rank not in records.dumps)
    entered = _last_entered(records, rows)
    mismatch = _first_mismatch(records, rows)
    stall = _first_stall(records, group, rows, entered, no_dump)
    status = "complete"
    if stall is not None:
        status = "in_flight" if stall.is_in_flight else "waiting"
    if mismatch is not None:
        status = "mismatched"
    by_all = None if no_dump or any(rank not in entered for rank in present) else min(entered.values(), default=None)
    return (
        GroupStatus(group, tuple(members), no_dump, max(entered.values(), default=None), by_all, status),
        stall,
        mismatch,
    )


def _last_entered(records: Records, rows: Ints) -> dict[int, int]:
    """The highest sequence number of each rank. Rows are in the order of sequence numbers."""
    return dict(zip(records.rank[rows].tolist(), records.sequence[rows].tolist(), strict=True))


def _first_stall(
    records: Records, group: Group, rows: Ints, entered: Mapping[int, int], no_dump: tuple[int, ...]
) -> Stall | None:
    sequence, state = records.sequence[rows], records.state[rows]
    waits = state == State.PENDING
    # A backend without events says that an operation ended, not that it succeeded: it failed if a member never came.
    absent = [rank for rank in group.members or () if _tells(records, rank, entered)]
    if absent:
        least = min(entered.get(rank, -1) for rank in absent)
        waits |= (state == State.ENDED) & (sequence > least) & records.is_symmetric[rows]
    if not waits.any():
        return None
    at = int(sequence[waits].min())
    here = (sequence == at) & waits
    ranks_here = set(records.rank[rows[sequence == at]].tolist())
    missing = [rank for rank in group.members or () if rank in records.dumps and rank not in ranks_here]
    never = [rank for rank in missing if _tells(records, rank, entered) and entered.get(rank, -1) < at]
    finished = sorted(ranks_here - set(records.rank[rows[here]].tolist()))
    before = rows[(sequence < at) & (state != State.PENDING)]
    last_finished = dict(zip(records.rank[before].tolist(), before.tolist(), strict=True))
    return Stall(
        group=group,
        others=(),
        sequence=at,
        is_p2p=False,
        waiting=records.positions(rows[here]),
        finished=tuple(finished),
        never_entered=records.absences(never, last_finished),
        no_dump=no_dump,
        unknown=tuple(sorted(set(missing) - set(never))),
        is_root=bool(no_dump) or any(rank not in records.first_waiting for rank in never),
    )


def _tells(records: Records, rank: int, entered: Mapping[int, int]) -> bool:
    """Whether the rank's dump shows what it has not entered: a ring keeps the newest records of a rank, so what is
    newer than its last record of the group did not happen."""
    dump = records.dumps.get(rank)
    if dump is None or not dump.is_gapless:
        return False
    return rank in entered or dump.is_from_start


def _first_mismatch(records: Records, rows: Ints) -> Mismatch | None:
    if not len(rows):
        return None
    sequence, operation = records.sequence[rows], records.operation[rows]
    starts = np.flatnonzero(np.append(True, sequence[1:] != sequence[:-1]))
    ends = np.append(starts[1:], len(rows))
    differing = np.flatnonzero(np.minimum.reduceat(operation, starts) != np.maximum.reduceat(operation, starts))
    first: tuple[Difference, int] | None = None
    count = 0
    for block in differing.tolist():
        numbers = np.unique(operation[starts[block] : ends[block]]).tolist()
        difference = _difference([records.catalog.operations[number] for number in numbers])
        if difference is not None:
            count += 1
            first = first or (difference, block)
    if first is None:
        return None
    difference, block = first
    positions = records.positions(rows[starts[block] : ends[block]])
    return Mismatch(difference, int(sequence[starts[block]]), positions, count)


def _difference(operations: Sequence[Operation]) -> Difference | None:
    """The worst difference among the operations that ranks issued under one sequence number."""
    if len({one.name for one in operations}) > 1:
        return Difference.OPERATION
    kind = operations[0].kind
    inputs = [one for one in operations if one.inputs]
    outputs = [one for one in operations if one.outputs]
    # Only the root has the parts that are scattered, or that were gathered.
    if len({one.input_types for one in inputs}) > 1 or len({one.output_types for one in outputs}) > 1:
        return Difference.TYPE
    # Shapes may differ, numbers of elements may not; parts of an all-to-all may have any size.
    if kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.BARRIER, CollectiveKind.OTHER, CollectiveKind.COALESCED):
        return None
    name = operations[0].name
    if "_v" in name or name.endswith("_oop"):
        return None
    if kind is not CollectiveKind.SCATTER and len({one.inputs for one in inputs}) > 1:
        return Difference.SIZE
    if kind is not CollectiveKind.GATHER and len({one.outputs for one in outputs}) > 1:
        return Difference.SIZE
    return None


@dataclass(frozen=True)
class _Channel:
    """Unfinished operations from one rank of a group to another, in the order of their issue, as rows."""

    sends: list[int]
    receives: list[int]


def _examine_p2p(records: Records) -> tuple[list[Stall], list[tuple[Group, Mismatch]]]:
    """Sends and receives whose other side was not issued, or has another size. Of a channel, the first without a
    partner is reported: the others are behind it."""
    channels: dict[tuple[int, int, int], _Channel] = defaultdict(lambda: _Channel([], []))
    for row in np.flatnonzero(records.is_p2p & (records.state == State.PENDING)).tolist():
        operation = records.catalog.operations[int(records.operation[row])]
        if operation.source >= 0:
            channel = channels[int(records.group[row]), operation.source, operation.destination]
            (channel.receives if operation.kind is CollectiveKind.RECV else channel.sends).append(row)
    stalls: list[Stall] = []
    mismatches: list[tuple[Group, Mismatch]] = []
    for (number, source, destination), channel in sorted(channels.items(), key=lambda item: item[0]):
        group = records.groups[number]
        members = group.members or ()
        pairs = list(zip(channel.sends, channel.receives, strict=False))
        differing = [(pair, found) for pair in pairs if (found := _p2p_difference(records, *pair)) is not None]
        if differing:
            rows, difference = differing[0]
            positions = tuple(records.position([row]) for row in rows)
            mismatches.append((group, Mismatch(difference, positions[0].sequence, positions, len(differing))))
        surplus = channel.sends[len(pairs) :] or channel.receives[len(pairs) :]
        if surplus and max(source, destination) < len(members):
            peer = members[destination if surplus[0] in channel.sends else source]
            stalls.append(_p2p_stall(records, group, surplus[0], peer))
    return stalls, mismatches


def _p2p_difference(records: Records, send: int, receive: int) -> Difference | None:
    sent = records.catalog.operations[int(records.operation[send])]
    received = records.catalog.operations[int(records.operation[receive])]
    if (sent.input_types or sent.output_types) != (received.output_types or received.input_types):
        return Difference.TYPE
    return Difference.SIZE if (sent.inputs or sent.outputs) != (received.outputs or received.inputs) else None


def _p2p_stall(records: Records, group: Group, row: int, peer: int) -> Stall:
    dump = records.dumps.get(peer)
    never = (peer,) if dump is not None and dump.is_gapless else ()
    return Stall(
        group=group,
        others=(),
        sequence=int(records.sequence[row]),
        is_p2p=True,
        waiting=(records.position([row]),),
        finished=(),
        never_entered=records.absences(never, {}),
        no_dump=(peer,) if dump is None else (),
        unknown=(peer,) if dump is not None and not never else (),
        is_root=dump is None or (bool(never) and peer not in records.first_waiting),
    )
