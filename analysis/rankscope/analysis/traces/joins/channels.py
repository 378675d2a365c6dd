"""Channels: which ranks communicate with each other. Puts the communication of all ranks into one table with the
group or pair of each call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.communication.collectives import POINT_TO_POINT, Collectives
from rankscope.analysis.traces.trace import Trace

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
class Calls:
    """One row per measured call, sorted by rank and start. Times are absolute, on the rank's own clock."""

    rank: Ints
    row: Ints  # row of the rank's Collectives
    channel: Ints
    kind: Ints  # a CollectiveKind; a send and its receive both have SEND_RECV
    token: Ints  # calls with different tokens cannot be the same collective
    sequence: Ints  # -1 if the profiler recorded none
    start_ns: Ints
    end_ns: Ints
    channels: tuple[Channel, ...]

    def __len__(self) -> int:
        return len(self.rank)


def gather_calls(traces: Mapping[int, Trace], collectives: Mapping[int, Collectives]) -> Calls:
    """The measured calls of all ranks. Groups of one rank are ignored."""
    identities = identify_groups(traces, collectives)
    local_peers = peers_are_local(collectives, identities)
    numbers: dict[Channel, int] = {}
    parts: list[Calls] = []
    for rank in sorted(traces):
        rows = collectives[rank]
        channel = np.full(len(rows), -1, dtype=np.int64)
        kind = rows.kind.copy()
        paired = _paired(rows)
        kind[paired] = CollectiveKind.SEND_RECV
        # Batches of messages to several stages have no counterpart.
        single = ~rows.between_stages | paired | (rows.group_size == 2)
        measured = np.flatnonzero(rows.measured & single & (rows.group_size != 1) & (rows.group >= 0))
        # Whole groups, then sends, then receives, then both at once.
        direction = np.where(paired, _DIRECTIONS[np.maximum(rows.kind, 0)], 0)
        keys = (rows.group, direction, np.where(paired, rows.peer, -1))
        for members in rows_of_groups(*number_groups(*(key[measured] for key in keys))):
            calls = measured[members]
            group, towards, peer = (int(key[calls[0]]) for key in keys)
            identity = identities[rank, group]
            if towards:
                other = _global_rank(peer, identity, local_peers[identity])
                ends = (rank, other) if towards == 1 or (towards == 3 and rank < other) else (other, rank)
                identity = Channel(identity.group, identity.ranks, 2, identity.stream, ends, towards == 3)
            channel[calls] = numbers.setdefault(identity, len(numbers))
        used = np.flatnonzero(channel >= 0)
        parts.append(_columns(rank, traces[rank].base_ns, rows, used, channel[used], kind[used]))
    return _concatenate(parts, tuple(numbers))


def _paired(rows: Collectives) -> Bools:
    return np.isin(rows.kind, POINT_TO_POINT) & (rows.peer >= 0)


def _columns(rank: int, base_ns: int, rows: Collectives, used: Ints, channel: Ints, kind: Ints) -> Calls:
    start = rows.start_ns[used] + base_ns
    noted = rows.sequence_noted[used] & (rows.peer[used] < 0)  # the two ends of a pair count their calls separately
    return Calls(
        rank=np.full(len(used), rank, dtype=np.int64),
        row=used,
        channel=channel,
        kind=kind,
        token=rows.bytes[used],
        sequence=np.where(noted, rows.sequence[used], -1),
        start_ns=start,
        end_ns=start + rows.duration_ns[used],
        channels=(),
    )


def _concatenate(parts: list[Calls], channels: tuple[Channel, ...]) -> Calls:
    nothing = np.zeros(0, dtype=np.int64)
    names = [f.name for f in fields(Calls) if f.name != "channels"]
    columns = {name: np.concatenate([nothing, *(getattr(part, name) for part in parts)]) for name in names}
    columns["token"] = _tokens(columns["channel"], columns["kind"], columns["token"])
    return Calls(**columns, channels=channels)


def _tokens(channel: Ints, kind: Ints, size_bytes: Ints) -> Ints:
    # All-to-all is a kernel of sends and receives; its name depends on what else was traced.
    alike = np.where(kind == CollectiveKind.ALL_TO_ALL, int(CollectiveKind.SEND_RECV), kind)
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


def _global_rank(peer: int, group: Channel, local: bool) -> int:
    return group.ranks[peer] if local and peer < len(group.ranks) else peer


def peers_are_local(
    collectives: Mapping[int, Collectives], identities: Mapping[tuple[int, int], Channel]
) -> dict[Channel, bool]:
    """Whether a group numbers its peers from 0 or by their rank in the job: the numbering that matches more sends
    with a receive."""
    sends: dict[Channel, set[tuple[int, int]]] = {group: set() for group in identities.values()}
    receives: dict[Channel, set[tuple[int, int]]] = {group: set() for group in identities.values()}
    for rank, rows in collectives.items():
        paired = _paired(rows)
        for index, members in enumerate(rows_of_groups(rows.group, len(rows.groups))):
            members = members[paired[members]]
            for kind, found in ((CollectiveKind.SEND, sends), (CollectiveKind.RECV, receives)):
                peers = rows.peer[members[rows.kind[members] == kind]]
                found[identities[rank, index]].update((rank, peer) for peer in np.unique(peers).tolist())
    decided = {}
    for group in sends:
        met = []
        for local in (True, False):
            sent = {(rank, _global_rank(peer, group, local)) for rank, peer in sends[group]}
            received = {(_global_rank(peer, group, local), rank) for rank, peer in receives[group]}
            met.append(len(sent & received))
        decided[group] = met[0] >= met[1]
    return decided
