"""GPUs and a source of them for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankscope.daemon.gpu.readings import GpuProcess, GpuReading, GpuSnapshot, SourceState
from tests.unit.daemon import window_makers as make
from tools.daemon_samples import gpu_uuid


def gpu(index: int = 0, *pids: int, **fields: Any) -> GpuReading:
    processes = tuple(GpuProcess(pid, 8 << 30) for pid in pids)
    return replace(GpuReading(gpu_uuid(index), index, "NVIDIA H200", processes=processes), **fields)


def snapshot(*gpus: GpuReading, seconds: float = 0.0, **fields: Any) -> GpuSnapshot:
    """`seconds` after the first window began."""
    taken = make.START + round(seconds * make.SECOND)
    return replace(GpuSnapshot("nvml", SourceState.OK, taken_unix_nanos=taken, gpus=gpus), **fields)


class FakeGpus:
    """A source that has seen what a test says."""

    def __init__(self, *snapshots: GpuSnapshot) -> None:
        self.snapshots = list(snapshots)
        self.started = self.closed = 0

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1

    def latest(self) -> GpuSnapshot:
        return self.snapshots[-1]

    def since(self, unix_nanos: int) -> Sequence[GpuSnapshot]:
        return [snapshot for snapshot in self.snapshots if snapshot.taken_unix_nanos > unix_nanos]
