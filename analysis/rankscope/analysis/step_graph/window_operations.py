"""Operations of whole steps as a window carries them: bytes of fixed width, which the daemon packs and the detector
joins over ranks. What is joined is hostile input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints, take_rows
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
        return len(self.rows) // ROW.itemsize

    @property
    def last_step(self) -> int:
        """Needs at least one operation."""
        return self.first_step + int(np.frombuffer(self.rows, ROW, 1, len(self.rows) - ROW.itemsize)["step"][0])


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


def join(parts: Sequence[RankOperations]) -> Operations:
    """The operations of all parts on one clock, as well as ranks know it. What cannot be right is left out."""
    parts = [part for part in parts if _is_plausible(part)]
    counts = np.array([part.size for part in parts], dtype=np.int64)
    table = np.frombuffer(b"".join(part.rows for part in parts), dtype=ROW)
    of_part = np.repeat(np.arange(len(parts)), counts)

    def per_row(values: Sequence[int]) -> Ints:
        return np.array(values, dtype=np.int64)[of_part]

    rank, tick = per_row([part.rank for part in parts]), per_row([part.tick_ns for part in parts])
    # A clock is read again in every window, a little differently: the last reading holds for all of them.
    latest = {part.rank: part.unix_less_gpu_ns for part in parts}
    start = per_row([part.start_ns + latest[part.rank] for part in parts]) + table["start"].astype(np.int64) * tick
    groups, group, seat_of, seats = _groups(parts, of_part, table["group"].astype(np.int64))
    kind = table["kind"].astype(np.int64)
    is_message = np.isin(kind, MESSAGES)
    peer = np.where(is_message, _rank_at(seats, group, table["peer"].astype(np.int64)), UNKNOWN)
    size = np.where(table["bytes"] >= 0, np.minimum(table["bytes"], 1e15), 0.0)
    operations = Operations(
        rank=rank,
        step=per_row([part.first_step for part in parts]) + table["step"],
        group=group,
        kind=kind,
        sequence=np.where(is_message, UNKNOWN, table["sequence"].astype(np.int64)),
        peer=peer,
        bytes=size.astype(np.int64),
        start_ns=start,
        # Every operation takes some time.
        stop_ns=start + np.maximum(table["length"].astype(np.int64) * tick, 1),
        queued_ns=table["queued"].astype(np.int64) * tick,
        groups=groups,
    )
    operations = take_rows(operations, (seat_of >= 0) & (kind <= max(CollectiveKind)) & (peer != rank))
    return replace(operations, queued_ns=since_issued(operations.rank, operations.queued_ns))


def _is_plausible(part: RankOperations) -> bool:
    return (
        0 < part.size <= MAX_ROWS
        and len(part.rows) % ROW.itemsize == 0
        and 0 <= part.rank < MAX_SIZE
        and 0 <= part.first_step < MAX_NUMBER
        and 0 <= part.start_ns < MAX_NS
        and abs(part.unix_less_gpu_ns) < MAX_NS
        and 0 < part.tick_ns <= MAX_TICK_NS
        and len(part.seats) <= MAX_GROUPS
        and all(0 <= seat.number < MAX_NUMBER and 0 <= seat.position < seat.size <= MAX_SIZE for seat in part.seats)
    )


def _groups(
    parts: Sequence[RankOperations], of_part: Ints, local: Ints
) -> tuple[tuple[Group, ...], Ints, Ints, tuple[Ints, Ints, Ints]]:
    """The groups of all parts; the group of each row; its seat or UNKNOWN; and the seats as group, position, rank."""
    begins = np.cumsum([0, *(len(part.seats) for part in parts)])
    rows = [(seat.number, seat.position, part.rank) for part in parts for seat in part.seats]
    number, position, rank = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    names, group_of_seat = np.unique(number, return_inverse=True)
    members: list[set[int]] = [set() for _ in names]
    for group, member in zip(group_of_seat.tolist(), rank.tolist(), strict=True):
        members[group].add(member)
    groups = tuple(Group(f"{name:x}", tuple(sorted(of))) for name, of in zip(names.tolist(), members, strict=True))
    is_known = local < np.diff(begins)[of_part]
    seat_of = np.where(is_known, begins[of_part] + local, UNKNOWN)
    group_of_row = np.where(is_known, np.append(group_of_seat, 0)[seat_of], 0)
    return groups, group_of_row, seat_of, (group_of_seat, position, rank)


def _rank_at(seats: tuple[Ints, Ints, Ints], group: Ints, position: Ints) -> Ints:
    """The rank in a position of a group; UNKNOWN where none is known."""
    if not len(seats[0]):
        return np.full(len(group), UNKNOWN, dtype=np.int64)
    keys = seats[0] * (MAX_SIZE + 1) + seats[1]
    order = np.argsort(keys, kind="stable")
    wanted = group * (MAX_SIZE + 1) + position
    place = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    is_there = (keys[order][place] == wanted) & (position >= 0) & (position <= MAX_SIZE)
    return np.where(is_there, seats[2][order][place], UNKNOWN)
