"""A pipeline-parallel job played through, operation by operation, in plain Python: who waits for whom, and what a
recorder would have written. Shares nothing with the replay under test."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020
LINK_SECONDS, SCATTER_SECONDS, GATHER_SECONDS = 2e-4, 0.004, 0.003
HOST_DELAY_SECONDS = 2e-5

Place = tuple[int, int, int]  # stage, data, tensor


@dataclass(frozen=True)
class Shape:
    stages: int
    replicas: int
    tensors: int = 1
    micro_batches: int = 4
    chunks: int = 1

    def rank(self, place: Place) -> int:
        return (place[0] * self.replicas + place[1]) * self.tensors + place[2]

    @property
    def places(self) -> list[Place]:
        return [(s, d, t) for s in range(self.stages) for d in range(self.replicas) for t in range(self.tensors)]


@dataclass
class Fault:
    """Factors on what a rank computes and on how long a stage's gradient scatter takes."""

    compute: Callable[[int, Place], float] = lambda step, place: 1.0
    scatter: Callable[[int, int], float] = lambda step, stage: 1.0


def schedule(shape: Shape, stage: int) -> list[tuple[str, int, int]]:
    """1F1B, interleaved if there are several chunks: (direction, chunk, micro-batch) in the order of the stage."""
    total, period = shape.micro_batches * shape.chunks, shape.stages * shape.chunks
    if shape.chunks == 1:
        forwards = [("forward", 0, batch) for batch in range(total)]
        backwards = [("backward", 0, batch) for batch in range(total)]
        warm = min(shape.stages - stage - 1, total)
    else:
        assert shape.micro_batches % shape.stages == 0
        forwards, backwards = [], []
        for k in range(total):
            inside = k % period
            batch = k // period * shape.stages + inside % shape.stages
            forwards.append(("forward", inside // shape.stages, batch))
            backwards.append(("backward", shape.chunks - 1 - inside // shape.stages, batch))
        warm = min((shape.stages - stage - 1) * 2 + (shape.chunks - 1) * shape.stages, total)
    steady = [one for k in range(total - warm) for one in (forwards[warm + k], backwards[k])]
    return forwards[:warm] + steady + backwards[total - warm :]


def simulate(
    shape: Shape,
    steps: int,
    *,
    fault: Fault | None = None,
    noise: float = 0.01,
    seed: int = 0,
    tensors_walk_in_step: bool = False,
) -> dict[str, np.ndarray]:
    """The columns of a timeline, in no particular order."""
    chance = random.Random(seed)
    rows: list[tuple[object, ...]] = []
    for step in range(steps):
        weather = chance.lognormvariate(0.0, 0.03) * (2.0 if step == 0 else 1.0)  # the same for all ranks
        _Step(shape, step, fault or Fault(), noise, weather, chance, tensors_walk_in_step, rows).play()
    chance.shuffle(rows)
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "gmc", "mb_id")
    return {name: np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


class _Step:
    def __init__(
        self,
        shape: Shape,
        step: int,
        fault: Fault,
        noise: float,
        weather: float,
        chance: random.Random,
        in_step: bool,
        rows: list[tuple[object, ...]],
    ) -> None:
        self.shape, self.step, self.fault, self.noise, self.weather = shape, step, fault, noise, weather
        self.chance, self.in_step, self.rows = chance, in_step, rows
        self.counted: dict[tuple[Place, str], int] = {}
        self.clock: dict[Place, float] = {}

    def play(self) -> None:
        shape = self.shape
        for stage in range(shape.stages):
            for tensor in range(shape.tensors):
                self._collective(
                    "params-all-gather", [(stage, d, tensor) for d in range(shape.replicas)], GATHER_SECONDS
                )
        self._pipeline()
        for place in shape.places:
            self._write(place, "gc", self.clock[place], 0.0)
            self._local(place, "layernorm-grads-all-reduce", 4e-5)
        if shape.stages > 1:
            for d in range(shape.replicas):
                for t in range(shape.tensors):
                    self._collective("embedding-grads-all-reduce", [(0, d, t), (shape.stages - 1, d, t)], 0.001)
        for stage in range(shape.stages):
            for tensor in range(shape.tensors):
                members = [(stage, d, tensor) for d in range(shape.replicas)]
                took = SCATTER_SECONDS * self.fault.scatter(self.step, stage)
                self._collective("grads-reduce-scatter", members, took)
        self._collective("optimizer-clip-main-grad", shape.places, 0.0005)
        for place in shape.places:
            self._local(place, "optimizer", 0.003)

    def _pipeline(self) -> None:
        shape = self.shape
        todo = {place: schedule(shape, place[0])[::-1] for place in shape.places}
        posted: dict[tuple[object, ...], float] = {}  # sends: (to whom, what) → when
        last = shape.stages * shape.chunks - 1
        while any(todo.values()):
            moved = False
            for place, rest in todo.items():
                while rest and self._receive(place, rest[-1], posted):
                    moved = True
                    direction, chunk, batch = rest.pop()
                    self._compute(place, direction, chunk, batch)
                    whole = chunk * shape.stages + place[0]
                    target = whole + (1 if direction == "forward" else -1)
                    if 0 <= target <= last:
                        posted[(target, place[1:], direction, batch)] = self.clock[place]
            assert moved, "the schedule is stuck"

    def _receive(self, place: Place, what: tuple[str, int, int], posted: dict[tuple[object, ...], float]) -> bool:
        """Whether the next compute has its input; the send is written here, too: it ends when the receive does."""
        direction, chunk, batch = what
        whole = chunk * self.shape.stages + place[0]
        last = self.shape.stages * self.shape.chunks - 1
        if whole == (0 if direction == "forward" else last):
            return True
        sent = posted.get((whole, place[1:], direction, batch))
        if sent is None:
            return False
        source = (whole + (-1 if direction == "forward" else 1)) % self.shape.stages
        sender = (source, *place[1:])
        asked = self.clock[place] + self._delay()
        end = max(sent, asked) + LINK_SECONDS * self._jitter()
        self._write(sender, f"{direction}-send", sent, end - sent)
        self._write(place, f"{direction}-recv", asked, end - asked)
        self.clock[place] = end
        return True

    def _compute(self, place: Place, direction: str, chunk: int, batch: int) -> None:
        usual = (FORWARD_SECONDS if direction == "forward" else BACKWARD_SECONDS) / self.shape.chunks
        places = [(*place[:2], t) for t in range(self.shape.tensors)] if self.in_step else [place]
        slowest = max(self.fault.compute(self.step, one) for one in places)
        took = usual * slowest * self.weather * self._jitter()
        start = self.clock[place] + self._delay()
        self._write(place, f"{direction}-compute", start, took, chunk, batch)
        self.clock[place] = start + took

    def _collective(self, name: str, members: list[Place], seconds: float) -> None:
        starts = {place: self.clock.get(place, 0.0) + self._delay() for place in members}
        end = max(starts.values()) + seconds * self._jitter()
        for place, start in starts.items():
            self._write(place, name, start, end - start, 0 if "params" in name or "scatter" in name else -1)
            self.clock[place] = end

    def _local(self, place: Place, name: str, seconds: float) -> None:
        start = self.clock[place] + self._delay()
        took = seconds * self._jitter()
        self._write(place, name, start, took)
        self.clock[place] = start + took

    def _write(self, place: Place, name: str, start: float, took: float, chunk: int = -1, batch: int = -1) -> None:
        number = self.counted.get((place, name), 0)
        self.counted[place, name] = number + 1
        stage, data, _ = place
        whole = chunk * self.shape.stages + stage if "compute" in name else -1
        self.rows.append(
            (data, stage, self.shape.rank(place), self.step, name, start, took, number, chunk, whole, batch)
        )

    def _jitter(self) -> float:
        return self.chance.lognormvariate(0.0, self.noise)

    def _delay(self) -> float:
        return HOST_DELAY_SECONDS * self.chance.random()
