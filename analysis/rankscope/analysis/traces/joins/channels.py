"""Channels: which ranks communicate with each other. Puts the operations of all traces into one table with the group or
pair of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, join_rows, number_groups, rows_of_groups, take_rows
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import UNKNOWN, Group, Operations
from rankscope.analysis.traces.communication.collectives import (
    POINT_TO_POINT,
    Collectives,
    number_peers_by_position,
    read_operations,
)
from rankscope.analysis.traces.steps import NO_STEP, find_steps
from rankscope.analysis.traces.trace import ABSENT, Trace

_DIRECTIONS = np.array([POINT_TO_POINT.index(kind) + 1 if kind in POINT_TO_POINT else 0 for kind in CollectiveKind])
# For these, all ranks pass the same number of bytes, so different sizes are different collectives. An all-to-all may be
# uneven, and a root may count differently from the others.
_EVEN = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True)
class Channel:
    """A process group, or one direction between two of its ranks, or both at once. Names repeat (each node may have a
    group "tp"), so the ranks are part of the identity, or the size if the ranks are unknown."""

    group: str
    ranks: tuple[int, ...] = ()  # empty if unknown
    size: int = -1
    stream: int = -1  # distinguishes groups without a name
    pair: tuple[int, int] | None = None  # sender, receiver
    both_ways: bool = False

    @property
    def label(self) -> str:
        name = f"group {self.group!r}" if self.group else "the unnamed group"
        if self.stream >= 0:
            name += f" on stream {self.stream}"
        if self.pair is None:
            return name
        first, second = self.pair
        return f"{name}, ranks {first} and {second}" if self.both_ways else f"{name}, rank {first} to {second}"


@dataclass(frozen=True)
class Calls(Operations):
    """The measured operations of traces, sorted by rank and start. Times are absolute, on the rank's own clock. Step
    and sequence are the profiler's: NO_STEP and UNKNOWN if it recorded none."""

    row: Ints  # of the rank's Collectives: the kernel of a message
    channel: Ints  # UNKNOWN for messages to several ranks at once, which have no counterpart
    token: Ints  # calls with different tokens cannot be the same collective
    channels: tuple[Channel, ...]


_NOTHING: dict[str, Any] = {field.name: np.zeros(0, dtype=np.int64) for field in fields(Calls)}
_NOTHING |= {"groups": (), "channels": ()}


def gather_calls(traces: Mapping[int, Trace], collectives: Mapping[int, Collectives]) -> Calls:
    """Return the measured operations of all ranks. Groups of one rank are ignored."""
    identities = identify_groups(traces, collectives)
    # The numbering of a group is the same on all of its ranks.
    local = {
        identities[rank, index]
        for rank, rows in collectives.items()
        for index, members in enumerate(rows_of_groups(rows.group, len(rows.groups)))
        if number_peers_by_position(rank, rows.groups[index].ranks, rows.peer[members])
    }
    members: dict[Channel, set[int]] = {}
    purposes: dict[Channel, str] = {}
    channels: dict[Channel, int] = {}
    parts = [Calls(**_NOTHING)]
    for rank in sorted(traces):
        trace, rows = traces[rank], collectives[rank]
        own = [identities[rank, index] for index in range(len(rows.groups))]
        for identity, group, purpose in zip(own, rows.groups, rows.group_kinds, strict=True):
            members.setdefault(identity, set(identity.ranks)).add(rank)
            purposes.setdefault(identity, group.description if purpose is GroupKind.UNKNOWN else purpose.value)
        row, part = read_operations(trace, rows, [identity in local for identity in own])
        wanted = np.flatnonzero(rows.measured[row] & (rows.group_size[row] != 1))
        row, part = row[wanted], take_rows(part, wanted)
        numbers = {identity: number for number, identity in enumerate(members)}
        of_group = np.array([numbers[identity] for identity in own], dtype=np.int64)
        noted = rows.sequence_noted[row] & (part.peer < 0)  # the two ends of a pair count their calls separately
        changed = {
            "rank": np.full(len(row), rank),
            "step": _steps_of_profiler(trace, called_ns(trace, rows, row)[0]),
            "group": of_group[part.group],
            "sequence": np.where(noted, part.sequence, UNKNOWN),
            "start_ns": part.start_ns + trace.base_ns,
            "stop_ns": np.maximum(part.stop_ns, part.start_ns + 1) + trace.base_ns,
        }
        channel = _channels(rank, rows, row, part, own, channels)
        parts.append(Calls(**{**vars(part), **changed}, row=row, channel=channel, token=row, channels=()))
    groups = tuple(
        Group(f"{identity.group} of {sorted(ranks)}", tuple(sorted(ranks)), purposes[identity])
        for identity, ranks in members.items()
    )
    calls = replace(join_rows(parts), groups=groups, channels=tuple(channels))
    calls = take_rows(calls, np.lexsort((calls.start_ns, calls.rank)))
    return replace(calls, token=_tokens(calls.channel, calls.kind, calls.bytes))


def _channels(
    rank: int, rows: Collectives, row: Ints, part: Operations, own: Sequence[Channel], numbers: dict[Channel, int]
) -> Ints:
    """Return the number of each operation's channel, and add new ones to `numbers`."""
    is_message = np.isin(part.kind, POINT_TO_POINT) & (part.peer >= 0)
    is_single = ~rows.between_stages[row] | is_message | (rows.group_size[row] == 2)
    # Whole groups, then sends, then receives, then both at once.
    direction = np.where(is_message, _DIRECTIONS[np.maximum(part.kind, 0)], 0)
    keys = (part.group, direction, np.where(is_message, part.peer, UNKNOWN))
    channel, chosen = np.full(len(row), UNKNOWN), np.flatnonzero(is_single)
    for members in rows_of_groups(*number_groups(*(key[chosen] for key in keys))):
        group, towards, peer = (int(key[chosen[members[0]]]) for key in keys)
        identity = own[group]
        if towards:
            ends = (rank, peer) if towards == 1 or (towards == 3 and rank < peer) else (peer, rank)
            identity = Channel(identity.group, identity.ranks, 2, identity.stream, ends, towards == 3)
        channel[chosen[members]] = numbers.setdefault(identity, len(numbers))
    return channel


def alike_kind(kind: Ints) -> Ints:
    """Return one kind for the ends of a message. All-to-all is a kernel of sends and receives, too; its name depends on
    what else was traced."""
    return np.where(np.isin(kind, (*POINT_TO_POINT, CollectiveKind.ALL_TO_ALL)), int(CollectiveKind.SEND_RECV), kind)


def called_ns(trace: Trace, collectives: Collectives, rows: Ints) -> tuple[Ints, Bools]:
    """Return when the host called each, and whether it is known: otherwise there is only its start on the device, which
    may be a step late."""
    call = collectives.call_row[rows]
    return np.where(call != ABSENT, trace.start_ns[call], collectives.start_ns[rows]), call != ABSENT


def _steps_of_profiler(trace: Trace, called: Ints) -> Ints:
    found = find_steps(trace)
    if found.source != "ProfilerStep":
        return np.full(len(called), NO_STEP)
    position = found.at(called)
    return np.where(position >= 0, found.number[position], NO_STEP)


def _tokens(channel: Ints, kind: Ints, size_bytes: Ints) -> Ints:
    alike = alike_kind(kind)
    stretch, count = number_groups(channel, alike)
    # Sizes distinguish calls only if all are known.
    known = np.ones(count, dtype=bool)
    known[stretch[(size_bytes < 0) | ~np.isin(kind, _EVEN)]] = False
    return np.where(known[stretch], size_bytes, 0) * len(CollectiveKind) + alike


def identify_groups(
    traces: Mapping[int, Trace], collectives: Mapping[int, Collectives]
) -> dict[tuple[int, int], Channel]:
    """Return the process group of each rank's groups, by rank and index."""
    world = max((trace.world_size or 0 for trace in traces.values()), default=0)
    known: dict[str, set[tuple[int, ...]]] = {}  # rank sets by name, from all traces that list them
    for rank, rows in collectives.items():
        for group in rows.groups:
            if group.name and rank in group.ranks:
                known.setdefault(group.name, set()).add(tuple(sorted(group.ranks)))
    identities = {}
    for rank, rows in collectives.items():
        members_of = rows_of_groups(rows.group, len(rows.groups))
        for index, (group, members) in enumerate(zip(rows.groups, members_of, strict=True)):
            size = int(rows.group_size[members].max(initial=-1))
            stream = -1 if group.name else int(rows.stream[members].max(initial=-1))
            # A list that is shortened, or that uses its own numbering, identifies nothing.
            sets: Iterable[tuple[int, ...]] = known.get(group.name, set())
            if group.ranks:
                sets = [tuple(sorted(group.ranks))]
            fitting = [ranks for ranks in sets if rank in ranks and size in (-1, len(ranks))]
            ranks = fitting[0] if len(fitting) == 1 else tuple(range(world)) if size == world > 1 else ()
            identities[rank, index] = Channel(group.name, ranks, len(ranks) or size, stream)
    return identities
