"""Operations of whole steps as a window carries them: bytes of fixed width, which the daemon packs and the detector
joins over ranks. What is joined is hostile input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, is_one_of, take_rows
from rankscope.analysis.step_graph.operations import MESSAGES, UNKNOWN, Group, Operations, since_issued

ROW = np.dtype(
    [
        *((name, "<u4") for name in ("start", "length", "queued")),  # ticks; `start` counts from the first
        ("bytes", "<f4"),
        ("sequence", "<u4"),
        ("peer", "<i4"),
        ("step", "<u2"),  # from the first
        ("group", "u1"),
        ("kind", "u1"),
    ]
)
ROW_BYTES = ROW.itemsize
STEP_OF_LAST = slice(-4, -2)  # the bytes of it in the last row
MAX_TICKS = (1 << 32) - 1
MAX_TICK_NS = 1 << 20
MAX_STEPS_APART = (1 << 16) - 1
MAX_GROUPS = 255
MAX_ROWS = 1 << 12  # of a rank in a window: 32 of them fit into a message of 4 MiB
MAX_NS = 1 << 61
MAX_SIZE = 10_000_000
MAX_NUMBER = 1 << 53


class Seat(NamedTuple):
    """A rank's place in a communicator, whose number is equal on all members."""

    number: int
    size: int
    position: int


class RankOperations(NamedTuple):
    """Rows are in the order in which the rank issued the operations. `peer` is a position in the group."""

    rank: int
    first_step: int
    start_ns: int  # of the first operation, on the GPU's clock
    tick_ns: int
    unix_less_gpu_ns: int
    seats: tuple[Seat, ...]
    rows: bytes

    @property
    def size(self) -> int:
        return len(self.rows) // ROW_BYTES

    @property
    def last_step(self) -> int:
        """Needs at least one operation."""
        return self.first_step + int.from_bytes(self.rows[STEP_OF_LAST], "little")

    @property
    def steps(self) -> Ints:
        return self.first_step + np.unique(np.frombuffer(self.rows, ROW)["step"]).astype(np.int64)


def pack(operations: Operations, seats: Sequence[Seat], unix_less_gpu_ns: int) -> RankOperations:
    """The operations of one rank. `group` is an index into `seats`."""
    start, steps = int(operations.start_ns.min()), int(operations.step.min())
    longest = max(int(operations.stop_ns.max()) - start, int(operations.queued_ns.max()))
    tick = 1 << max(0, longest.bit_length() - 32)
    rows = np.empty(len(operations), dtype=ROW)
    rows["start"] = (operations.start_ns - start) // tick
    rows["length"] = (operations.stop_ns - operations.start_ns) // tick
    rows["queued"] = operations.queued_ns // tick
    rows["bytes"], rows["peer"] = operations.bytes, operations.peer
    rows["sequence"] = operations.sequence & 0xFFFFFFFF
    rows["step"], rows["group"], rows["kind"] = operations.step - steps, operations.group, operations.kind
    return RankOperations(int(operations.rank[0]), steps, start, tick, unix_less_gpu_ns, tuple(seats), rows.tobytes())


@dataclass(frozen=True)
class SeatIndex:
    """Who sits where in the groups of a job. Columns are by seat; those that a part tells follow each other."""

    told: Mapping[int, Sequence[tuple[tuple[Seat, ...], int]]]  # by rank, what it tells and the first of these seats
    groups: tuple[Group, ...]
    numbers: Ints  # by group
    rank: Ints
    group: Ints
    position: Ints

    @classmethod
    def of(cls, parts: Iterable[RankOperations]) -> SeatIndex:
        """All parts are plausible."""
        told: dict[int, list[tuple[tuple[Seat, ...], int]]] = {}
        rows: list[tuple[int, int, int]] = []
        for part in parts:
            of_rank = told.setdefault(part.rank, [])
            if all(seats != part.seats for seats, _ in of_rank):
                of_rank.append((part.seats, len(rows)))
                rows += [(seat.number, seat.position, part.rank) for seat in part.seats]
        number, position, rank = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        numbers, group = np.unique(number, return_inverse=True)
        order = np.lexsort((rank, group))
        members = np.split(rank[order], np.searchsorted(group[order], np.arange(1, len(numbers))))
        groups = tuple(
            Group(f"{name:x}", tuple(dict.fromkeys(ranks.tolist())))
            for name, ranks in zip(numbers.tolist(), members, strict=False)
        )
        return cls(told, groups, numbers, rank, group, position)

    def first_seat(self, part: RankOperations) -> int:
        """UNKNOWN if the part tells what no part did before."""
        for seats, first in self.told.get(part.rank, ()):
            if seats is part.seats or seats == part.seats:
                return first
        return UNKNOWN

    def rank_at(self, group: Ints, position: Ints) -> Ints:
        """The rank in a position of a group; UNKNOWN where none is known."""
        if not len(self.rank):
            return np.full(len(group), UNKNOWN, dtype=np.int64)
        keys, order = self._by_position
        wanted = group * (MAX_SIZE + 1) + position
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        is_there = (keys[place] == wanted) & (position >= 0) & (position <= MAX_SIZE)
        return np.where(is_there, self.rank[order[place]], UNKNOWN)

    @cached_property
    def _by_position(self) -> tuple[Ints, Ints]:
        keys = self.group * (MAX_SIZE + 1) + self.position
        order = np.argsort(keys, kind="stable")
        return keys[order], order


@dataclass(frozen=True)
class PackedRows:
    """The rows of several parts one after the other, not decoded."""

    parts: Sequence[RankOperations]
    index: SeatIndex
    table: npt.NDArray[np.void]
    begins: Ints  # by part
    first_seat: Ints  # by part, of the index; UNKNOWN if the index does not have its seats
    of_part: Ints

    @classmethod
    def of(cls, parts: Sequence[RankOperations], index: SeatIndex) -> PackedRows:
        """All parts are plausible."""
        table = np.frombuffer(b"".join([part.rows for part in parts]), dtype=ROW)
        sizes = np.array([part.size for part in parts], dtype=np.int64)
        first_seat = np.array([index.first_seat(part) for part in parts], dtype=np.int64)
        return cls(parts, index, table, np.cumsum(sizes) - sizes, first_seat, np.repeat(np.arange(len(parts)), sizes))

    def of_parts(self, name: str) -> Ints:
        return np.array([getattr(part, name) for part in self.parts], dtype=np.int64)

    def groups(self, rows: Ints | slice = slice(None)) -> tuple[Ints, Bools]:
        """The group of each row, and whether the rank has a seat in one."""
        part, local = self.of_part[rows], self.table["group"][rows]
        has_seat = local < self._seats[part]
        return np.append(self.index.group, 0)[np.where(has_seat, self.first_seat[part] + local, -1)], has_seat

    def rows_in(self, wanted: Bools) -> Ints:
        """The rows of the wanted groups."""
        seats = self._seats
        table = np.zeros((len(self.parts), 1 << 8), dtype=bool)
        part = np.repeat(np.arange(len(self.parts)), seats)
        local = np.arange(len(part)) - np.repeat(np.cumsum(seats) - seats, seats)
        table[part, local] = wanted[self.index.group[self.first_seat[part] + local]]
        return np.flatnonzero(table.ravel()[(self.of_part << 8) + self.table["group"]])

    @cached_property
    def _seats(self) -> Ints:
        """How many each part has."""
        return np.array([len(part.seats) for part in self.parts], dtype=np.int64)

    def stretches(self) -> tuple[Ints, Ints, Ints]:
        """Rows of one part and step that follow each other: the first row of each such stretch, its part and its
        step."""
        step = np.ascontiguousarray(self.table["step"])
        is_first = np.zeros(len(step), dtype=bool)
        is_first[1:] = step[1:] != step[:-1]
        is_first[self.begins] = True
        first = np.flatnonzero(is_first)
        part = self.of_part[first]
        return first, part, self.of_parts("first_step")[part] + step[first]


def join(parts: Sequence[RankOperations], index: SeatIndex | None = None) -> Operations:
    """The operations of all parts on one clock, as well as ranks know it. What cannot be right is left out. `index`:
    of more ranks than these. Only groups that these ranks use are kept."""
    parts = [part for part in parts if is_plausible(part)]
    index = SeatIndex.of(parts) if index is None else index
    packed = PackedRows.of(parts, index)
    table, of_part = packed.table, packed.of_part
    group, has_seat = packed.groups()
    rank, tick = packed.of_parts("rank")[of_part], packed.of_parts("tick_ns")[of_part]
    # A clock is read again in every window, a little differently: the last reading holds for all of them.
    latest = {part.rank: part.unix_less_gpu_ns for part in parts}
    begin = np.array([part.start_ns + latest[part.rank] for part in parts], dtype=np.int64)
    start = begin[of_part] + table["start"].astype(np.int64) * tick
    kind = table["kind"].astype(np.int64)
    is_message = is_one_of(kind, MESSAGES)
    peer = np.full(len(table), UNKNOWN, dtype=np.int64)
    peer[is_message] = index.rank_at(group[is_message], table["peer"][is_message].astype(np.int64))
    size = np.where(table["bytes"] >= 0, np.minimum(table["bytes"], 1e15), 0.0)
    used = np.zeros(len(index.groups), dtype=bool)
    used[index.group[np.isin(index.rank, np.array(list(latest), dtype=np.int64))]] = True
    operations = Operations(
        rank=rank,
        step=packed.of_parts("first_step")[of_part] + table["step"],
        group=np.append(np.cumsum(used) - 1, 0)[group],
        kind=kind,
        sequence=np.where(is_message, UNKNOWN, table["sequence"].astype(np.int64)),
        peer=peer,
        bytes=size.astype(np.int64),
        start_ns=start,
        # Every operation takes some time.
        stop_ns=start + np.maximum(table["length"].astype(np.int64) * tick, 1),
        queued_ns=table["queued"].astype(np.int64) * tick,
        groups=tuple(group for group, is_used in zip(index.groups, used.tolist(), strict=True) if is_used),
    )
    operations = take_rows(operations, has_seat & (kind <= max(CollectiveKind)) & (peer != rank))
    return replace(operations, queued_ns=since_issued(operations.rank, operations.queued_ns))


def is_plausible(part: RankOperations) -> bool:
    return (
        has_plausible_rows(part)
        and len(part.seats) <= MAX_GROUPS
        and all(0 <= seat.number < MAX_NUMBER and 0 <= seat.position < seat.size <= MAX_SIZE for seat in part.seats)
    )


def has_plausible_rows(part: RankOperations) -> bool:
    """Without a look at the seats."""
    return (
        0 < (size := len(part.rows)) <= MAX_ROWS * ROW_BYTES
        and size % ROW_BYTES == 0
        and 0 <= part.rank < MAX_SIZE
        and 0 <= part.first_step < MAX_NUMBER
        and 0 <= part.start_ns < MAX_NS
        and abs(part.unix_less_gpu_ns) < MAX_NS
        and 0 < part.tick_ns <= MAX_TICK_NS
    )
