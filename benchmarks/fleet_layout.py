"""A made-up fleet: nodes, the pods on them, and who of the ranks is slow. The same on every side of the benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from benchmarks.fleets import SLOW_FACTOR, rank_window, response
from rankscope.operator.runs.pods import Owner, Pod
from rankscope.v1.window_pb2 import SOURCE_GPU, SOURCE_PROBE, SOURCE_PROCESS, SOURCE_STACKS, RankWindow

WINDOW_SECONDS = 2.0
NAMESPACE = "team"
# Of the nodes, a quarter each: one job over all of them, and jobs of so many nodes.
NODES_PER_JOB = (16, 4, 1)
# Every so manieth job has a slow rank.
SLOW_EVERY = 50


@dataclass(frozen=True)
class FleetJob:
    name: str
    nodes: range
    ranks_per_node: int
    is_slow: bool

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.ranks_per_node

    @property
    def slow_rank(self) -> int:
        return self.world_size // 2


@dataclass(frozen=True)
class FleetLayout:
    """`daemons` nodes with one pod each, `ranks_per_node` ranks in it."""

    daemons: int
    ranks_per_node: int = 8

    @cached_property
    def jobs(self) -> tuple[FleetJob, ...]:
        sizes = [max(1, self.daemons // 4)]
        for nodes in NODES_PER_JOB:
            sizes += [nodes] * (self.daemons // 4 // nodes)
        sizes += [1] * (self.daemons - sum(sizes))
        made, first = [], 0
        for number, nodes in enumerate(sizes):
            taken = range(first, first + nodes)
            made.append(FleetJob(f"job-{number}", taken, self.ranks_per_node, number % SLOW_EVERY == 0))
            first += nodes
        return tuple(made)

    @cached_property
    def jobs_by_node(self) -> tuple[FleetJob, ...]:
        return tuple(job for job in self.jobs for _ in job.nodes)

    def pods(self) -> Iterator[Pod]:
        for node, job in enumerate(self.jobs_by_node):
            yield Pod(
                uid=pod_uid(node),
                name=f"{job.name}-worker-{node - job.nodes.start}",
                namespace=NAMESPACE,
                node=node_name(node),
                address=f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}",
                phase="Running",
                labels={"training.kubeflow.org/job-name": job.name, "training.kubeflow.org/replica-index": str(node)},
                owner=Owner("kubeflow.org/v1", "PyTorchJob", job.name, f"uid-{job.name}"),
                created="2026-11-15T00:00:00Z",
            )


class ScriptedDaemon:
    """What a node's daemon says. Everything but the time is the same in every window, so the message is made once and
    the time is put into its bytes: simulating the fleet must not cost more than listening to it."""

    def __init__(self, layout: FleetLayout, node: int) -> None:
        job = layout.jobs_by_node[node]
        windows = []
        for local in range(layout.ranks_per_node):
            rank = (node - job.nodes.start) * layout.ranks_per_node + local
            window = rank_window(rank, job.world_size)
            identity = window.identity
            identity.job, identity.node = f"10.0.0.1:{29500 + job.nodes.start}/run", node_name(node)
            identity.pod, identity.pid = pod_uid(node), 4000 + local
            window.gpu.gpus, window.gpu.utilization_ratio, window.gpu.power_watts = 1, 0.98, 640.0
            window.gpu.sm_clock_hertz, window.gpu.temperature_celsius = 1.7e9, 61.0
            window.sources.update(_SOURCES)
            window.start_unix_nanos, window.end_unix_nanos, window.last_step_unix_nanos = _TIMES
            _pace(window, job, rank)
            windows.append(window)
        # What is between the times, and which time comes next.
        marks = [_varint(mark) for mark in _TIMES]
        pieces = re.split(
            b"(" + b"|".join(map(re.escape, marks)) + b")", response(node_name(node), windows).SerializeToString()
        )
        self._between = pieces[::2]
        self._which = [marks.index(piece) for piece in pieces[1::2]]

    def message(self, tick: int) -> bytes:
        """Serialized, of the window that ended at tick × WINDOW_SECONDS."""
        times = _times(tick)
        parts: list[bytes] = [*self._between, *self._between[1:]]
        parts[::2], parts[1::2] = self._between, [times[which] for which in self._which]
        return b"".join(parts)


_SOURCES = {
    "steps": SOURCE_PROBE,
    "self_seconds": SOURCE_PROBE,
    "process": SOURCE_PROCESS,
    "stacks": SOURCE_STACKS,
    "gpu": SOURCE_GPU,
}
# Stand for the times of a window; their bytes occur nowhere else in a message.
_TIMES = (1_711_111_111_111_111_101, 1_722_222_222_222_222_202, 1_733_333_333_333_333_303)


@lru_cache(maxsize=4)
def _times(tick: int) -> tuple[bytes, ...]:
    end_nanos = round(tick * WINDOW_SECONDS * 1e9)
    return tuple(_varint(end_nanos - nanos) for nanos in (round(WINDOW_SECONDS * 1e9), 0, 1_000_000))


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def _pace(window: RankWindow, job: FleetJob, rank: int) -> None:
    """A slow rank's own time is longer; the others wait for it, and every step takes as long as the longest."""
    is_slow = job.is_slow and rank == job.slow_rank
    own = 0.090 * (SLOW_FACTOR if is_slow else 1.0) + 1e-5 * (rank % 7)
    step = (0.090 * (SLOW_FACTOR if job.is_slow else 1.0)) + 0.010
    window.step_seconds.mean, window.wait_seconds.mean, window.wait_seconds.p10 = step, step - own, 0.010
    window.self_seconds.mean, window.self_seconds.p10, window.self_seconds.p90 = own, 0.98 * own, 1.02 * own
    window.figures["forward_seconds"] = 0.03 + own - 0.090


def node_name(node: int) -> str:
    return f"node-{node}"


def pod_uid(node: int) -> str:
    return f"00000000-0000-4000-8000-{node:012d}"
