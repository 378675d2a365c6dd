"""Readings of GPUs, as every source of GPU counters gives them. None: not known to this GPU, driver or source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

# The fields that GPM or dcgm-exporter measure, as shares of the time since the reading before.
PROFILE = ("sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "pipe_active_ratio", "dram_active_ratio")


class SourceState(str, Enum):
    """Of a whole source; a label's value."""

    STARTING = "starting"
    OK = "ok"
    NO_DRIVER = "no_driver"
    NO_GPU = "no_gpu"
    HANGING = "hanging"  # a call into the driver does not return
    FAILED = "failed"


class GpuState(str, Enum):
    OK = "ok"
    LOST = "lost"  # fell off the bus, or so the driver reports
    HANGING = "hanging"  # a call for this GPU does not return; the others go on
    FAILED = "failed"


@dataclass(frozen=True)
class GpuProcess:
    pid: int  # as the node sees it
    used_bytes: int | None


@dataclass(frozen=True)
class GpuReading:
    """One GPU, or one MIG instance of it, at one moment. Counters begin with the daemon unless noted otherwise. A GPU
    that is not OK keeps its identity and its counters; its measurements are None."""

    uuid: str
    index: int
    name: str
    parent_uuid: str | None = None  # of a MIG instance, whose index is its parent's
    state: GpuState = GpuState.OK

    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None  # since the driver was loaded; read every 30 s, since reading it is expensive
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    memory_clock_hertz: float | None = None
    memory_clock_max_hertz: float | None = None
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)  # by reason, see nvml_counters.py
    pcie_transmit_bytes_per_second: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None
    # (counter: volatile or aggregate, kind: corrected or uncorrected) to errors
    ecc_errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    remapped_rows: Mapping[str, int] = field(default_factory=dict)  # correctable, uncorrectable
    remapping_pending: bool | None = None
    remapping_failed: bool | None = None
    retired_pages: Mapping[str, int] = field(default_factory=dict)  # single_bit, double_bit: before Ampere
    xid_errors: Mapping[int, int] | None = None  # by number; None: not reported

    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: Mapping[str, float] = field(default_factory=dict)  # any, hmma, imma, dfma
    pipe_active_ratio: Mapping[str, float] = field(default_factory=dict)  # fp64, fp32, fp16
    dram_active_ratio: float | None = None

    # None for a GPU in MIG mode: its instances have them.
    processes: tuple[GpuProcess, ...] | None = None

    @property
    def has_profile(self) -> bool:
        return any(getattr(self, name) not in (None, {}) for name in PROFILE)


@dataclass(frozen=True)
class GpuSnapshot:
    """Everything a source saw at one moment."""

    source: str  # "nvml" or "dcgm"
    state: SourceState
    reason: str = ""  # why it is not OK, with the next step
    driver_version: str | None = None
    taken_unix_nanos: int = 0
    gpus: tuple[GpuReading, ...] = ()
    polls_total: int = 0
    poll_seconds_total: float = 0.0  # time spent reading
    problems: tuple[str, ...] = ()


class GpuSource(Protocol):
    """Reads in threads of its own from `start` to `close`; `latest` and `since` do not block."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def latest(self) -> GpuSnapshot: ...

    def since(self, unix_nanos: int) -> Sequence[GpuSnapshot]:
        """What was taken after that moment and is still kept (about a minute), oldest first."""
        ...
