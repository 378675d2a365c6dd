"""What is made of NVML's readings: seconds of throttling by reason, energy between the driver's own readings, the
processes of a GPU, and the figures of GPM, the performance monitoring of Hopper and later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope.daemon.gpu.nvml_calls import Asker
from rankscope.daemon.gpu.readings import GpuProcess

# Bits of the clocks event (throttle) reasons. hw_slowdown is set together with hw_thermal or hw_power_brake.
REASONS: Final[Mapping[str, int]] = {
    "idle": 0x1,
    "application_clocks": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
# Fields in which newer drivers count nanoseconds themselves: nothing between two polls is missed. Those for hw_thermal
# and hw_power_brake exist too (270, 271) but cost 0.3 ms each on an H200; their bits must do.
COUNTERS: Final[Mapping[int, str]] = {74: "power_cap", 76: "sync_boost", 269: "sw_thermal"}
# The driver counts in steps of 0.1 s.
COUNTER_STEP_SECONDS: Final = 0.2
# Power over a longer gap is not known; the driver's next figure includes it.
GAP_SECONDS: Final = 10.0

MEBIBYTE: Final = 1024 * 1024
# NVML's metric, the field of a GpuReading and, where that is a mapping, the key.
GPM_METRICS: Final = (
    (2, "sm_active_ratio", None),
    (3, "sm_occupancy_ratio", None),
    (5, "tensor_active_ratio", "any"),
    (7, "tensor_active_ratio", "hmma"),
    (9, "tensor_active_ratio", "imma"),
    (6, "tensor_active_ratio", "dfma"),
    (11, "pipe_active_ratio", "fp64"),
    (12, "pipe_active_ratio", "fp32"),
    (13, "pipe_active_ratio", "fp16"),
    (10, "dram_active_ratio", None),
    (20, "pcie_transmit_bytes_per_second", None),
    (21, "pcie_receive_bytes_per_second", None),
    (60, "nvlink_receive_bytes_per_second", None),
    (61, "nvlink_transmit_bytes_per_second", None),
)


class ThrottleClock:
    """Sums up over the daemon's life. Reasons without a counter are taken to have held since the reading before when
    both readings show them, and for half of that time when one does."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._mask: int | None = None
        self._counters: dict[str, int] = {}
        self._at_seconds: float | None = None

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    def forget_last(self) -> None:
        """After a gap: what happened in it is not known."""
        self._mask = self._at_seconds = None
        self._counters = {}

    def add(self, mask: int | None, counters_nanos: Mapping[str, int], at_seconds: float) -> None:
        if mask is None:
            self.forget_last()
            return
        elapsed = None if self._at_seconds is None else at_seconds - self._at_seconds
        for reason, bit in REASONS.items():
            held = 0.0
            if elapsed is not None and self._mask is not None:
                grown = self._growth_seconds(reason, counters_nanos)
                if grown is None:
                    held = elapsed * (bool(mask & bit) + bool(self._mask & bit)) / 2
                else:
                    held = min(grown, elapsed + COUNTER_STEP_SECONDS)
            self._seconds[reason] = self._seconds.get(reason, 0.0) + held
        self._mask, self._at_seconds, self._counters = mask, at_seconds, dict(counters_nanos)

    def _growth_seconds(self, reason: str, counters_nanos: Mapping[str, int]) -> float | None:
        """None where nothing is counted, or the counter was reset."""
        before, now = self._counters.get(reason), counters_nanos.get(reason)
        return None if before is None or now is None or now < before else (now - before) / 1e9


class EnergyMeter:
    """The driver's counter, which is expensive and so read seldom, plus power × time since. Goes down only where the
    counter itself was reset: where the sum was too high it stands still until the counter has caught up. Kept when the
    library is opened again, since a counter that goes back by a few joules looks like one that was reset."""

    def __init__(self) -> None:
        self._counted: float | None = None
        self._added = 0.0
        self._total: float | None = None
        self._last: tuple[float, float] | None = None  # watts, and when

    def total_joules(self) -> float | None:
        """None where the driver has no counter."""
        if self._counted is not None:
            self._total = max(self._total or 0.0, self._counted + self._added)
        return self._total

    def count(self, joules: float | None) -> None:
        """Take a reading of the driver's counter."""
        if joules is None:
            return
        if self._counted is not None and joules < self._counted:
            self._total = None
        self._counted, self._added = joules, 0.0

    def draw(self, watts: float | None, at_seconds: float) -> None:
        """Take a reading of the power, at a monotonic time."""
        before, self._last = self._last, None if watts is None else (watts, at_seconds)
        if before is None or watts is None:
            return
        elapsed = at_seconds - before[1]
        if 0 < elapsed <= GAP_SECONDS:
            self._added += elapsed * (watts + before[0]) / 2


def running_processes(asker: Asker) -> tuple[GpuProcess, ...] | None:
    """Processes that compute on a GPU, with clients of MPS, which the driver lists apart. None if it lists neither."""
    plain = asker.ask("nvmlDeviceGetComputeRunningProcesses")
    shared = asker.ask("nvmlDeviceGetMPSComputeRunningProcesses")
    if plain is None and shared is None:
        return None
    by_pid = {
        process.pid: GpuProcess(process.pid, process.usedGpuMemory) for process in (*(plain or ()), *(shared or ()))
    }
    return tuple(by_pid[pid] for pid in sorted(by_pid))


class GpmWindow:
    """Figures of a GPU, or of one GPU instance of it (MIG), since the reading before. Holds two samples of the driver
    until `close`."""

    def __init__(self, asker: Asker, gpu_instance: int | None = None) -> None:
        self._asker = asker
        self._instance = gpu_instance
        self._samples: list[Any] = []
        self._has_last = False
        nvml = asker.nvml
        # 19 kB: made once, not every second.
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(GPM_METRICS)
        for position, (metric, _, _) in enumerate(GPM_METRICS):
            self._request.metrics[position].metricId = metric

    def read(self) -> dict[str, Any]:
        """Fields of a GpuReading: those that are known."""
        if len(self._samples) < 2 and not self._allocate():
            return {}
        last, fresh = self._samples
        if not self._take(fresh):
            self._has_last = False
            return {}
        self._samples = [fresh, last]
        had_last, self._has_last = self._has_last, True
        if not had_last:
            return {}
        self._request.sample1, self._request.sample2 = last, fresh
        if self._asker.call("nvmlGpmMetricsGet", self._request, key=("nvmlGpmMetricsGet",)) is None:
            return {}
        return _figures(self._request.metrics)

    def close(self) -> None:
        samples, self._samples, self._has_last = self._samples, [], False
        for sample in samples:
            self._asker.call("nvmlGpmSampleFree", sample, key=("nvmlGpmSampleFree",))

    def _allocate(self) -> bool:
        while len(self._samples) < 2:
            sample = self._asker.call("nvmlGpmSampleAlloc", key=("nvmlGpmSampleAlloc",))
            if sample is None:
                return False
            self._samples.append(sample)
        return True

    def _take(self, sample: Any) -> bool:
        asker, instance = self._asker, self._instance
        if instance is None:
            return asker.call("nvmlGpmSampleGet", asker.handle, sample, key=("nvmlGpmSampleGet",)) is not None
        key = ("nvmlGpmMigSampleGet", instance)
        return asker.call("nvmlGpmMigSampleGet", asker.handle, instance, sample, key=key) is not None


def _figures(metrics: Sequence[Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for (_, field, key), metric in zip(GPM_METRICS, metrics, strict=False):
        if metric.nvmlReturn != 0 or not math.isfinite(metric.value):
            continue
        # Ratios come in percent. Two samples of a chip that changes its clock in between may give a bit over 100.
        is_ratio = field.endswith("_ratio")
        value = min(1.0, max(0.0, metric.value / 100)) if is_ratio else max(0.0, metric.value) * MEBIBYTE
        if key is None:
            figures[field] = value
        else:
            figures.setdefault(field, {})[key] = value
    return figures
