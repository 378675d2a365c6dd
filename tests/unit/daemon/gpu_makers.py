"""GPUs and a source of them for tests: the figures are an H200's under a bf16 transformer (facts of a real machine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rankscope.daemon.export.gpu_metrics import ALL_REASONS
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.gpu.readings import GpuProcess, GpuReading, GpuSnapshot, SourceState
from tests.unit.daemon import window_makers as make


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


def gpu(index: int = 0, *pids: int, **fields: Any) -> GpuReading:
    processes = tuple(GpuProcess(pid, 8 << 30) for pid in pids)
    return replace(GpuReading(uuid(index), index, "NVIDIA H200", processes=processes), **fields)


def full_gpu(index: int = 0) -> GpuReading:
    """One of which everything is known."""
    return gpu(
        index,
        utilization_ratio=1.0,
        memory_used_bytes=60 << 30,
        memory_total_bytes=140 << 30,
        power_watts=695.0,
        power_limit_watts=700.0,
        energy_joules=1.5e6,
        temperature_celsius=64.0,
        sm_clock_hertz=1755e6,
        sm_clock_max_hertz=1980e6,
        memory_clock_hertz=3201e6,
        memory_clock_max_hertz=3201e6,
        throttled_seconds={reason: float(number) for number, reason in enumerate(ALL_REASONS)},
        pcie_transmit_bytes_per_second=1e9,
        pcie_receive_bytes_per_second=2e9,
        nvlink_transmit_bytes_per_second=3e9,
        nvlink_receive_bytes_per_second=4e9,
        ecc_errors={(c, k): 1 for c in ("volatile", "aggregate") for k in ("corrected", "uncorrected")},
        remapped_rows={"correctable": 2, "uncorrectable": 0},
        remapping_pending=False,
        remapping_failed=False,
        retired_pages={"single_bit": 0, "double_bit": 0},
        xid_errors={79: 1},
        sm_active_ratio=0.907,
        sm_occupancy_ratio=0.297,
        tensor_active_ratio={"any": 0.574, "hmma": 0.574, "imma": 0.0, "dfma": 0.0},
        pipe_active_ratio={"fp64": 0.0, "fp32": 0.05, "fp16": 0.01},
        dram_active_ratio=0.283,
    )


def status(*gpus: GpuReading, fresh: bool = True, shared: frozenset[str] = frozenset()) -> GpuStatus:
    return GpuStatus(
        (GpuSnapshot("nvml", SourceState.OK, polls_total=12, poll_seconds_total=0.25),), gpus, fresh, shared
    )


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
