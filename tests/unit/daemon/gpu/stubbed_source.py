"""A source that reads the stub in this process: through pynvml and ctypes, as it reads a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from rankscope.daemon.gpu.nvml import NvmlSource
from rankscope.daemon.gpu.nvml_device import Cadence
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, GpuState, SourceState
from tests.support.waiting import wait_until
from tools.nvml_stub import Script

PATIENCE_SECONDS = 180.0
ALWAYS = Cadence(energy_seconds=0, maxima_seconds=0, health_seconds=0, processes_seconds=0, pcie_seconds=0)


@dataclass(frozen=True)
class Stubbed:
    source: NvmlSource
    script: Script
    library: ctypes.CDLL

    def until(self, condition: Callable[[GpuSnapshot], bool]) -> GpuSnapshot:
        def met() -> list[GpuSnapshot]:
            return [now for now in [self.source.latest()] if condition(now)]

        return wait_until(met, self.source.latest)[0]

    def until_ok(self, polls: int = 3) -> GpuSnapshot:
        """After so many more polls: GPM needs two, and what was scripted before is in all of them."""
        before = self.source.latest().polls_total

        def all_read(now: GpuSnapshot) -> bool:
            return (
                now.state is SourceState.OK and now.polls_total >= before + polls and not any(map(_is_late, now.gpus))
            )

        return self.until(all_read)

    def until_gpu(self, state: GpuState, index: int = 0) -> GpuReading:
        def is_so(now: GpuSnapshot) -> bool:
            return len(now.gpus) > index and now.gpus[index].state is state and not _is_late(now.gpus[index])

        return self.until(is_so).gpus[index]

    def calls(self, name: str) -> int:
        return int(self.library.stub_calls(name.encode()))


def _is_late(gpu: GpuReading) -> bool:
    """Its thread had not read it when the poll ended: this machine may be busy."""
    return gpu.state is GpuState.OK and gpu.memory_total_bytes is None


def make_source(**changed: object) -> NvmlSource:
    """Quick to retry, and slow to call something hanging: this machine may be busy."""
    settings: dict[str, object] = {
        "interval_seconds": 0.05,
        "hang_seconds": 30.0,
        "retry_seconds": (0.05, 0.2),
        "lost_retry_seconds": (0.3, 0.6),
        "cadence": ALWAYS,
    }
    return NvmlSource(**{**settings, **changed})  # type: ignore[arg-type]
