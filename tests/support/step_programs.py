"""Jobs of tensor, pipeline and data parallel ranks, played in time: what NCCL would record of them.

Every rank has a program of work and operations. It starts an operation when the work before it is done, and goes on
when all that meet have arrived. As NCCL does, a message that is sent and one that is received in the same kernel are
both recorded as over when the first of them is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph.operations import UNKNOWN, Group, Operations
from rankscope.analysis.step_graph.window_operations import RankOperations, Seat, pack

LAYERS = 2  # of a chunk
TRANSFER_NS = {"tensor": 200_000, "pipeline": 150_000, "data": 4_000_000}
LAUNCH_NS = 20_000
BYTES = {"tensor": 1 << 20, "pipeline": 1 << 21, "data": 1 << 26}


@dataclass(frozen=True)
class Fault:
    rank: int
    work_ns: int  # in each layer
    every: int = 1  # step
    first_step: int = 1
    on_device: bool = False  # the host has issued the operation long before

    def is_on(self, step: int) -> bool:
        return step >= self.first_step and step % self.every == 0


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batches: int = 4
    layer_ns: int = 5_000_000
    last_stage_ns: int = 0  # more in each micro-batch: the loss
    noise: float = 0.03
    pairs: bool = False  # a communicator for each two neighbours in the pipeline
    uneven: float = 0.0  # what micro-batches vary by: each tensor group gets its own data
    faults: tuple[Fault, ...] = ()
    steps: int = 60
    seed: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def place(self, rank: int) -> tuple[int, int, int]:
        """Tensor rank, data rank, stage: as Megatron numbers them."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        return tensor, rest % self.data, rest // self.data

    def rank(self, tensor: int, data: int, stage: int) -> int:
        return (stage * self.data + data) * self.tensor + tensor


@dataclass
class _Rank:
    program: Iterator[tuple[int, tuple[Action, ...]]]
    now: float = 0.0
    queued: float = 0.0  # on the device, since the operation before
    waits: list[int] = field(default_factory=list)  # rows of what it is in
    missing: int = 0  # how many of these are not over


Action = tuple[
    str, int
]  # "work" or "device" and nanoseconds; or a kind of group, and the collective or the peer and whether it sends
Row = tuple[int, int, int, int, int, int, int, float, float]  # the columns of Operations up to its start; queued
Key = tuple[str, int, int, int]


class Player:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.random = np.random.default_rng(layout.seed)
        self.groups: list[Group] = []
        self.group_of: dict[tuple[str, int], int] = {}
        for kind in ("tensor", "pipeline", "data"):
            self._add_groups(kind)
        self.rows: list[Row] = []
        self.stops: list[float] = []
        self.meetings: dict[Key, list[int]] = {}
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.ranks = [_Rank(self._program(rank)) for rank in range(layout.world)]

    def _add_groups(self, kind: str) -> None:
        layout = self.layout
        members: dict[tuple[int, int], list[int]] = {}
        for rank in range(layout.world):
            tensor, data, stage = layout.place(rank)
            key = {"tensor": (data, stage), "pipeline": (tensor, data), "data": (tensor, stage)}[kind]
            members.setdefault(key, []).append(rank)
        for ranks in members.values():
            if len(ranks) > 1:
                self.group_of |= {(kind, rank): len(self.groups) for rank in ranks}
                self.groups.append(Group(f"{kind}{len(self.groups)}", tuple(ranks)))

    def _group(self, kind: str, rank: int, peer: int) -> int:
        if kind != "pipeline" or not self.layout.pairs:
            return self.group_of[kind, rank]
        pair = Group(f"pair of {min(rank, peer)} and {max(rank, peer)}", (min(rank, peer), max(rank, peer)))
        if pair not in self.groups:
            self.groups.append(pair)
        return self.groups.index(pair)

    def play(self) -> Operations:
        running = list(range(self.layout.world))
        while running:
            running = [rank for rank in running if self._goes_on(rank)]
        return self._operations()

    def _goes_on(self, rank: int) -> bool:
        """Whether the rank's program has more, once it waits for others."""
        one = self.ranks[rank]
        while not one.missing:
            following = next(one.program, None)
            if following is None:
                return False
            step, actions = following
            if actions[0][0] in ("work", "device"):
                one.now += actions[0][1]
                one.queued += actions[0][1] if actions[0][0] == "device" else 0
                continue
            keys = [self._begin(rank, step, kind, what) for kind, what in actions]
            for key in keys:
                self._end(key)
        return True

    def _begin(self, rank: int, step: int, kind: str, what: int) -> Key:
        one, group = self.ranks[rank], self._group(kind, rank, what >> 1)
        if not one.missing:
            one.waits = []
        if kind == "pipeline":
            peer, sends = what >> 1, what & 1
            source, target = (rank, peer) if sends else (peer, rank)
            number, sequence = self.counts[source, target, sends], UNKNOWN
            self.counts[source, target, sends] += 1
            key = (kind, source, target, number)
            function = CollectiveKind.SEND if sends else CollectiveKind.RECV
        else:
            sequence, peer, function = self.counts[rank, group], UNKNOWN, CollectiveKind(what)
            self.counts[rank, group] += 1
            key = (kind, group, UNKNOWN, sequence)
        one.missing += 1
        one.waits.append(len(self.rows))
        self.meetings.setdefault(key, []).append(len(self.rows))
        self.rows.append((rank, step, group, int(function), sequence, peer, BYTES[kind], one.now, one.queued))
        self.stops.append(0.0)
        return key

    def _end(self, key: Key) -> None:
        rows = self.meetings[key]
        if len(rows) < (2 if key[0] == "pipeline" else len(self.groups[key[1]].ranks)):
            return
        end = max(self.rows[row][-2] for row in rows) + TRANSFER_NS[key[0]] * self._noise()
        for row in rows:
            self.stops[row] = end
            one = self.ranks[self.rows[row][0]]
            one.missing -= 1
            if not one.missing:
                ends = [self.stops[waits] for waits in one.waits]
                one.now, one.queued = max(ends) + LAUNCH_NS, 0.0
                for waits in one.waits:
                    self.stops[waits] = min(ends)

    def _noise(self) -> float:
        return float(np.exp(self.random.normal(0.0, self.layout.noise)))

    def _program(self, rank: int) -> Iterator[tuple[int, tuple[Action, ...]]]:
        for step in range(1, self.layout.steps + 1):
            for actions in self._step(rank, step):
                yield step, actions

    def _step(self, rank: int, step: int) -> Iterator[tuple[Action, ...]]:
        layout = self.layout
        tensor, data, stage = layout.place(rank)
        stages, batches = layout.pipeline, layout.micro_batches
        shared = np.random.default_rng((layout.seed, step, data))
        sizes = np.exp(shared.normal(0.0, layout.uneven, batches))
        up = layout.rank(tensor, data, stage + 1) if stage + 1 < stages else None
        down = layout.rank(tensor, data, stage - 1) if stage else None
        warm_up = min(stages - 1 - stage, batches)

        def message(*ends: tuple[int | None, bool]) -> Iterator[tuple[Action, ...]]:
            parts = tuple(("pipeline", peer << 1 | sends) for peer, sends in ends if peer is not None)
            if parts:
                yield parts

        for number in range(warm_up):
            yield from message((down, False))
            yield from self._compute(rank, step, sizes[number], 1)
            yield from message((up, True))
        if warm_up < batches:
            yield from message((down, False))
        for number in range(batches - warm_up):
            yield from self._compute(rank, step, sizes[warm_up + number], 1)
            yield from message((up, True), (up, False))
            yield from self._compute(rank, step, sizes[number], 2)
            is_last = number == batches - warm_up - 1
            yield from message((down, True)) if is_last else message((down, True), (down, False))
        for number in range(batches - warm_up, batches):
            yield from message((up, False))
            yield from self._compute(rank, step, sizes[number], 2)
            yield from message((down, True))
        if layout.data > 1:
            yield (("data", int(CollectiveKind.ALL_REDUCE)),)
        yield (("work", int(3_000_000 * self._noise())),)

    def _compute(self, rank: int, step: int, size: float, direction: int) -> Iterator[tuple[Action, ...]]:
        layout = self.layout
        stage = layout.place(rank)[2]
        for layer in range(LAYERS):
            work = layout.layer_ns * direction * size * self._noise()
            faults = [fault for fault in layout.faults if fault.rank == rank and fault.is_on(step)]
            work += sum(fault.work_ns for fault in faults if not fault.on_device)
            if stage == layout.pipeline - 1 and layer == LAYERS - 1:
                work += layout.last_stage_ns * self._noise()
            yield (("work", int(work)),)
            for fault in faults:
                if fault.on_device:
                    yield (("device", fault.work_ns),)
            if layout.tensor > 1:
                yield (("tensor", int(CollectiveKind.ALL_REDUCE)),)

    def _operations(self) -> Operations:
        rank, step, group, kind, sequence, peer, size, start, queued = (
            np.array(column, dtype=np.float64) for column in zip(*self.rows, strict=True)
        )
        order = np.lexsort((start, rank))
        columns = (rank, step, group, kind, sequence, peer, size, start, np.array(self.stops), queued)
        return Operations(*(np.rint(column[order]).astype(np.int64) for column in columns), tuple(self.groups))


@lru_cache(maxsize=32)
def play(layout: Layout) -> Operations:
    return Player(layout).play()


def packed(rows: Operations, rank: int, unix_ns: int = 0, gpu_ns: int = 0) -> RankOperations:
    """The rows of one rank as its daemon sends them. The clocks of its wall and its GPU are so far ahead."""
    own = [number for number, group in enumerate(rows.groups) if rank in group.ranks]
    seats = [Seat(number, len(rows.groups[number].ranks), rows.groups[number].ranks.index(rank)) for number in own]
    peer = np.full(len(rows), UNKNOWN)
    for number in own:
        members = np.array(rows.groups[number].ranks)
        sent = np.flatnonzero((rows.group == number) & (rows.peer >= 0))
        peer[sent] = np.argmax(members[None, :] == rows.peer[sent, None], axis=1)
    start, stop = rows.start_ns + gpu_ns, rows.stop_ns + gpu_ns
    moved = replace(rows, group=np.searchsorted(own, rows.group), peer=peer, start_ns=start, stop_ns=stop)
    return pack(moved, seats, unix_ns - gpu_ns)
