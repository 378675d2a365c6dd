"""Jobs of tensor, pipeline and data parallel ranks, of any size: what the daemons of thousands of ranks would send.

All ranks of a stage run the same program, so that each operation is computed for all of them at once. Work and
transfers vary as in recorded steps of Megatron-LM (tests/data/nccl). Every rank has a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Floats, Ints, grouped_median, number_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.roles import Parts, find_stages
from rankscope.analysis.step_graph.window_operations import RankOperations, Seat, pack
from rankscope.analysis.verdicts.windows import JobWindow, RankColumns, columns_of

RECORDING = Path(__file__).parents[1] / "tests" / "data" / "nccl" / "pp2_dp2_healthy.npz"
# Ranks of a recording share a GPU: its rare extremes come from that.
USUAL_PERCENTILES = (5, 95)
BORDER_NS = 500_000  # shorter work is the host between two operations
LAUNCH_NS = 90_000
CLOCK_SPREAD_NS = 1_000_000_000
CLOCK_ERROR_NS = 100_000  # of what a daemon knows of it
DRIFT_RATIO = 2e-5
RANKS_PER_NODE = 8
WINDOW_SECONDS = 2.0
TENSOR, PIPELINE, DATA, EMBEDDING, MODEL, WORLD = "tensor", "pipeline", "data", "embedding", "model", "world"
BYTES = {TENSOR: 1 << 21, PIPELINE: 1 << 21, DATA: 1 << 26, EMBEDDING: 1 << 23, MODEL: 4, WORLD: 4}
TRANSFER_NS = {
    TENSOR: 250_000,
    PIPELINE: 100_000,
    DATA: 12_000_000,
    EMBEDDING: 3_000_000,
    MODEL: 30_000,
    WORLD: 60_000,
}


class SlowRank(NamedTuple):
    rank: int
    layer_ns: int  # in each layer, forward and backward
    on_device: bool = False  # the host has issued the operation long before
    first_step: int = 1
    every: int = 1


class SlowStage(NamedTuple):
    stage: int
    factor: float
    first_step: int = 1


class SlowLink(NamedTuple):
    """A group of a rank whose transfers are slow; of a pipeline, those to the next stage."""

    kind: str
    rank: int
    factor: float
    first_step: int = 1


@dataclass(frozen=True)
class MadeLayout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batches: int = 8
    layers: int = 4
    layer_ns: int = 8_000_000
    uneven: float = 0.0  # what micro-batches vary by; each replica gets its own data
    faults: tuple[SlowRank | SlowStage | SlowLink, ...] = ()
    meets_world: bool = True  # once a step, as where a loss is logged
    seed: int = 0

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def place(self, rank: int) -> tuple[int, int, int]:
        """Stage, data rank, tensor rank: as Megatron numbers them."""
        tensor, rest = rank % self.tensor, rank // self.tensor
        return rest // self.data, rest % self.data, tensor

    def members(self, kind: str, rank: int) -> Sequence[int]:
        """The group of a kind that the rank is in."""
        stage, data, tensor = self.place(rank)
        stages = {PIPELINE: range(self.pipeline), MODEL: range(self.pipeline), EMBEDDING: (0, self.pipeline - 1)}
        if kind == WORLD:
            return range(self.world)
        return [
            (s * self.data + d) * self.tensor + t
            for s in sorted({*stages.get(kind, (stage,))})
            for d in (range(self.data) if kind == DATA else (data,))
            for t in (range(self.tensor) if kind in (TENSOR, MODEL) else (tensor,))
        ]

    def replica(self, rank: int) -> int:
        return self.place(rank)[1]


@dataclass(eq=False)
class _Stage:
    """What the ranks of a stage run. Times have a row for each data rank and a column for each tensor rank."""

    number: int
    now: Floats
    queued: Floats
    counts: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[str, int, int, int]] = field(default_factory=list)  # kind of group, function, sequence, peer
    starts: list[Floats] = field(default_factory=list)
    stops: list[Floats] = field(default_factory=list)
    queues: list[Floats] = field(default_factory=list)

    def start(self, kind: str, function: CollectiveKind, peer: int = UNKNOWN) -> int:
        sequence = self.counts.get(kind, 0)
        self.counts[kind] = sequence + 1
        self.rows.append((kind, int(function), sequence, peer))
        self.starts.append(self.now)
        self.stops.append(self.now)
        self.queues.append(self.queued)
        return len(self.rows) - 1

    def end(self, row: int, stop: Floats, free: Floats | None = None) -> None:
        self.stops[row] = np.broadcast_to(stop, self.now.shape)
        self.now = np.broadcast_to(stop if free is None else free, self.now.shape) + LAUNCH_NS
        self.queued = np.full(self.now.shape, float(LAUNCH_NS))


class _Step(NamedTuple):
    """One step of a stage: columns by operation, times by operation, data rank and tensor rank."""

    rows: list[tuple[str, int, int, int]]
    start: Floats
    stop: Floats
    queued: Floats


class _Columns(NamedTuple):
    """Several steps of a stage."""

    step: Ints
    kind: Ints
    sequence: Ints
    peer: Ints
    bytes: Ints
    kind_of_group: Ints
    start: Floats
    stop: Floats
    queued: Floats


Message = tuple[int, bool]  # the other stage, and whether it is sent to
Link = tuple[int, int, int]  # the stages from which and to which a message is sent, and its number


class MadeJob:
    """Plays the steps one after the other, so that a job of thousands of ranks needs the memory of a few."""

    def __init__(self, layout: MadeLayout) -> None:
        self.layout = layout
        self._random = np.random.default_rng(layout.seed)
        shape = (layout.data, layout.tensor)
        self._stages = [
            _Stage(number, np.zeros(shape), np.full(shape, float(LAUNCH_NS))) for number in range(layout.pipeline)
        ]
        self._work_ratios, self._transfer_ratios = recorded_ratios()
        world = layout.world
        nodes = np.repeat(np.arange(-(-world // RANKS_PER_NODE)), RANKS_PER_NODE)[:world]
        self._gpu_ns = self._random.integers(0, CLOCK_SPREAD_NS, world)
        self._error_ns = self._random.normal(0, CLOCK_ERROR_NS, nodes.max() + 1).astype(np.int64)[nodes]
        self._drift = self._random.uniform(-DRIFT_RATIO, DRIFT_RATIO, world)
        self._seats = [self._seats_of(rank) for rank in range(world)]
        self.now_ns = 0.0
        self.step = 0

    def play(self) -> list[_Step]:
        """The next step, by stage."""
        self.step += 1
        self._arrivals: dict[tuple[int, Link], Floats] = {}
        self._transfers: dict[Link, Floats] = {}
        shape = (self.layout.micro_batches, self.layout.data)
        self._sizes = np.exp(self._random.normal(0.0, self.layout.uneven, shape))
        running = dict(enumerate(self._program(number) for number in range(self.layout.pipeline)))
        while running:
            running = {number: program for number, program in running.items() if next(program, None) is not None}
        self._meet(EMBEDDING, [0, -1], CollectiveKind.ALL_REDUCE)
        for _ in range(2):
            self._meet(MODEL, range(self.layout.pipeline), CollectiveKind.ALL_REDUCE)
        if self.layout.meets_world:
            self._meet(WORLD, range(self.layout.pipeline), CollectiveKind.ALL_REDUCE)
        if self.layout.data > 1:
            for stage in self._stages:
                self._collective(stage, DATA, CollectiveKind.ALL_GATHER)
        steps = []
        for stage in self._stages:
            steps.append(_Step(stage.rows, *(np.stack(column) for column in (stage.starts, stage.stops, stage.queues))))
            stage.rows, stage.starts, stage.stops, stage.queues = [], [], [], []
        self.now_ns = float(max(stage.now.max() for stage in self._stages))
        return steps

    def windows(self, count: int, window_seconds: float = WINDOW_SECONDS) -> Iterator[list[RankOperations]]:
        """What the daemons send in so many windows that have steps; of some blocks of steps only, if steps are
        short."""
        due_ns, held = window_seconds * 1e9, list[tuple[int, list[_Step]]]()
        while count:
            played = self.play()
            if self.now_ns > due_ns and held:
                yield self.packed(held)
                held, count = [], count - 1
            due_ns = max(due_ns, -(-self.now_ns // (window_seconds * 1e9)) * window_seconds * 1e9)
            held.append((self.step, played))

    def packed(self, steps: Sequence[tuple[int, list[_Step]]]) -> list[RankOperations]:
        layout, parts = self.layout, []
        columns = [self._columns(steps, stage) for stage in range(layout.pipeline)]
        for rank in range(layout.world):
            stage, data, tensor = layout.place(rank)
            of_stage = columns[stage]
            seats, places = self._seats[rank]
            drift, origin = 1 + self._drift[rank], int(self._gpu_ns[rank])
            start, stop = (
                np.rint(times[:, data, tensor] * drift).astype(np.int64) + origin
                for times in (of_stage.start, of_stage.stop)
            )
            own = Operations(
                rank=np.full(len(start), rank),
                step=of_stage.step,
                group=np.array([places[kind] for kind in BYTES], dtype=np.int64)[of_stage.kind_of_group],
                kind=of_stage.kind,
                sequence=of_stage.sequence,
                peer=of_stage.peer,
                bytes=of_stage.bytes,
                start_ns=start,
                stop_ns=stop,
                queued_ns=of_stage.queued[:, data, tensor].astype(np.int64),
                groups=(),
            )
            parts.append(pack(own, seats, int(self._error_ns[rank]) - origin))
        return parts

    def _columns(self, steps: Sequence[tuple[int, list[_Step]]], stage: int) -> _Columns:
        names = list(BYTES)
        rows = [(step, *row) for step, stages in steps for row in stages[stage].rows]
        step, of_group, kind, sequence, peer = zip(*rows, strict=True)
        times = [[getattr(stages[stage], name) for _, stages in steps] for name in ("start", "stop", "queued")]
        return _Columns(
            *(np.array(column, dtype=np.int64) for column in (step, kind, sequence, peer)),
            np.array([BYTES[name] for name in of_group], dtype=np.int64),
            np.array([names.index(name) for name in of_group], dtype=np.int64),
            *(np.concatenate(each) for each in times),
        )

    def _seats_of(self, rank: int) -> tuple[list[Seat], dict[str, int]]:
        """In the order of their numbers, and the place of each kind there. A peer is its stage."""
        seats: dict[str, Seat] = {}
        for place, kind in enumerate(BYTES):
            members = self.layout.members(kind, rank)
            if rank in members:
                number = (place * self.layout.world + members[0] + 1) * 2654435761 % (1 << 32)
                seats[kind] = Seat(number, len(members), members.index(rank))
        kinds = sorted(seats, key=lambda kind: seats[kind].number)
        return [seats[kind] for kind in kinds], {kind: kinds.index(kind) if kind in kinds else 255 for kind in BYTES}

    def _program(self, number: int) -> Iterator[bool]:
        """One forward and one backward pass in turn, as soon as the stages behind have work."""
        stages, batches, stage = self.layout.pipeline, self.layout.micro_batches, self._stages[number]
        warm_up = min(stages - 1 - number, batches)

        def message(*ends: Message) -> Iterator[bool]:
            ends = tuple(end for end in ends if 0 <= end[0] < stages)
            if ends:
                yield from self._exchange(number, ends)

        down, up = number - 1, number + 1
        for batch in range(warm_up):
            yield from message((down, False))
            self._compute(number, batch, 1)
            yield from message((up, True))
        if warm_up < batches:
            yield from message((down, False))
        for batch in range(batches - warm_up):
            self._compute(number, warm_up + batch, 1)
            yield from message((up, True), (up, False))
            self._compute(number, batch, 2)
            is_last = batch == batches - warm_up - 1
            yield from message((down, True)) if is_last else message((down, True), (down, False))
        for batch in range(batches - warm_up, batches):
            yield from message((up, False))
            self._compute(number, batch, 2)
            yield from message((down, True))
        if self.layout.data > 1:
            self._collective(stage, DATA, CollectiveKind.REDUCE_SCATTER)
        self._work(number, stage, 3_000_000 * np.ones(self.layout.data))

    def _exchange(self, number: int, ends: tuple[Message, ...]) -> Iterator[bool]:
        """A message that is sent and one that is received in the same kernel are both recorded as over when the first
        of them is."""
        stage, links = self._stages[number], list[Link]()
        rows = [
            stage.start(PIPELINE, CollectiveKind.SEND if sends else CollectiveKind.RECV, other) for other, sends in ends
        ]
        for other, sends in ends:
            source, target = (number, other) if sends else (other, number)
            name = f"{source} to {target}"
            stage.counts[name] = stage.counts.get(name, 0) + 1
            links.append((source, target, stage.counts[name]))
            self._arrivals[number, links[-1]] = stage.now
        stops = []
        for (other, _), link in zip(ends, links, strict=True):
            while (other, link) not in self._arrivals:
                yield True
            if link not in self._transfers:
                self._transfers[link] = self._transfer(PIPELINE, min(link[:2]), stage.now.shape)
            stops.append(np.maximum(stage.now, self._arrivals[other, link]) + self._transfers[link])
        first, last = np.minimum.reduce(stops), np.maximum.reduce(stops)
        for row in rows:
            stage.end(row, first, last)

    def _compute(self, number: int, batch: int, direction: int) -> None:
        stage = self._stages[number]
        for _ in range(self.layout.layers):
            for _ in range(2):  # attention and feed-forward
                self._work(number, stage, self.layout.layer_ns / 2 * direction * self._sizes[batch], in_layer=True)
                if self.layout.tensor > 1:
                    self._collective(stage, TENSOR, CollectiveKind.ALL_REDUCE)

    def _work(self, number: int, stage: _Stage, nanoseconds: Floats, in_layer: bool = False) -> None:
        work = nanoseconds[:, None] * self._random.choice(self._work_ratios, stage.now.shape)
        issued_late = np.zeros(stage.now.shape, dtype=bool)
        for fault in self.layout.faults if in_layer else ():
            if self.step < fault.first_step:
                continue
            if isinstance(fault, SlowStage) and fault.stage == number:
                work = work * fault.factor
            if isinstance(fault, SlowRank) and self.step % fault.every == 0:
                at, data, tensor = self.layout.place(fault.rank)
                if at == number:
                    work[data, tensor] += fault.layer_ns / 2
                    issued_late[data, tensor] = not fault.on_device
        stage.now = stage.now + work
        stage.queued = np.where(issued_late, LAUNCH_NS, stage.queued + work)

    def _transfer(self, kind: str, stage: int, shape: tuple[int, ...]) -> Floats:
        transfer = TRANSFER_NS[kind] * self._random.choice(self._transfer_ratios, shape)
        for fault in self.layout.faults:
            if isinstance(fault, SlowLink) and fault.kind == kind and self.step >= fault.first_step:
                at, data, tensor = self.layout.place(fault.rank)
                if at == stage or kind in (EMBEDDING, MODEL, WORLD):
                    transfer[min(data, shape[0] - 1), min(tensor, shape[1] - 1)] *= fault.factor
        return transfer

    def _collective(self, stage: _Stage, kind: str, function: CollectiveKind) -> None:
        row, axis = stage.start(kind, function), 0 if kind == DATA else 1
        shape = (1, stage.now.shape[1]) if kind == DATA else (stage.now.shape[0], 1)
        transfer = self._transfer(kind, stage.number, shape)
        stage.end(row, stage.now.max(axis=axis, keepdims=True) + transfer)

    def _meet(self, kind: str, numbers: Sequence[int], function: CollectiveKind) -> None:
        """A collective of several stages."""
        places = range(self.layout.pipeline)
        stages = [self._stages[number] for number in sorted({places[number] for number in numbers})]
        if len(self.layout.members(kind, 0)) < 2 or (kind == EMBEDDING and len(stages) < 2):
            return
        rows = [stage.start(kind, function) for stage in stages]
        arrived = np.maximum.reduce([stage.now for stage in stages])
        if kind != EMBEDDING:
            arrived = arrived.max(axis=1, keepdims=True)
        if kind == WORLD:
            arrived = arrived.max(axis=0, keepdims=True)
        stop = arrived + self._transfer(kind, 0, arrived.shape)
        for stage, row in zip(stages, rows, strict=True):
            stage.end(row, stop)


@cache
def recorded_ratios() -> tuple[Floats, Floats]:
    """How work and transfers of a recorded job vary about the median of the same part of the program."""
    graph = StepGraph.build(read_recording(RECORDING).operations)
    parts = Parts.of(graph, find_stages(graph))
    number, count = number_groups(graph.operations.rank[parts.rows], parts.number, parts.before)
    ratios = []
    for column in (graph.own_ns, graph.transfer_ns):
        values = column[parts.rows].astype(np.float64)
        usual = grouped_median(values, number, count)[number]
        ratio = values[usual >= BORDER_NS] / usual[usual >= BORDER_NS]
        low, high = np.percentile(ratio, USUAL_PERCENTILES)
        ratios.append(ratio[(ratio >= low) & (ratio <= high)])
    return ratios[0], ratios[1]


def rank_columns(world: int, steps: int, step_seconds: float) -> RankColumns:
    """Sums over the windows of ranks that all wait alike: they name nobody."""
    row = {
        "steps": steps,
        "self_steps": steps,
        "step_seconds": step_seconds,
        "wait_seconds": 0.3 * step_seconds,
        "self_seconds": 0.7 * step_seconds,
        "host_seconds": 0.9 * step_seconds,
        "transfer_seconds": 0.001,
        "self_spread_ratio": 1.5,
    }
    return columns_of([{"rank": rank, **row} for rank in range(world)])


def job_window(
    number: int, columns: RankColumns, parts: Sequence[RankOperations], window_seconds: float = WINDOW_SECONDS
) -> JobWindow:
    return JobWindow(
        window_seconds * (number + 1),
        window_seconds,
        len(columns),
        columns,
        operations=lambda is_sample: parts[: 1 if is_sample else None],
    )
