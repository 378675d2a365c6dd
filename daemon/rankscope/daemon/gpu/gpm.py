"""GPU performance monitoring of Hopper and later: what the chip did between two samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankscope.daemon.gpu.nvml_calls import Asker

SM_ACTIVE: Final = 2
SM_OCCUPANCY: Final = 3
TENSOR: Final[Mapping[str, int]] = {"any": 5, "hmma": 7, "imma": 9, "dfma": 6}
PIPES: Final[Mapping[str, int]] = {"fp64": 11, "fp32": 12, "fp16": 13}
DRAM: Final = 10
PCIE_TRANSMIT, PCIE_RECEIVE = 20, 21
NVLINK_RECEIVE, NVLINK_TRANSMIT = 60, 61
METRICS: Final = (
    *(SM_ACTIVE, SM_OCCUPANCY, *TENSOR.values(), *PIPES.values(), DRAM),
    *(PCIE_TRANSMIT, PCIE_RECEIVE, NVLINK_RECEIVE, NVLINK_TRANSMIT),
)
MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True)
class GpmFigures:
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    tensor_active_ratio: Mapping[str, float] = field(default_factory=dict)
    pipe_active_ratio: Mapping[str, float] = field(default_factory=dict)
    dram_active_ratio: float | None = None
    pcie_transmit_bytes_per_second: float | None = None
    pcie_receive_bytes_per_second: float | None = None
    nvlink_transmit_bytes_per_second: float | None = None
    nvlink_receive_bytes_per_second: float | None = None


class GpmWindow:
    """Of a GPU, or of one GPU instance of it (MIG), since the reading before. Holds two samples of the driver until
    `close`."""

    def __init__(self, asker: Asker, gpu_instance: int | None = None) -> None:
        self._asker = asker
        self._instance = gpu_instance
        self._samples: list[Any] = []
        self._has_last = False
        nvml = asker.nvml
        # 19 kB: made once, not every second.
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(METRICS)
        for position, metric in enumerate(METRICS):
            self._request.metrics[position].metricId = metric

    def read(self) -> GpmFigures:
        if len(self._samples) < 2 and not self._allocate():
            return GpmFigures()
        last, fresh = self._samples
        if not self._take(fresh):
            self._has_last = False
            return GpmFigures()
        self._samples = [fresh, last]
        had_last, self._has_last = self._has_last, True
        if not had_last:
            return GpmFigures()
        self._request.sample1, self._request.sample2 = last, fresh
        if self._asker.call("nvmlGpmMetricsGet", self._request, key=("nvmlGpmMetricsGet",)) is None:
            return GpmFigures()
        metrics = self._request.metrics
        return _figures(
            {
                metric: metrics[position].value
                for position, metric in enumerate(METRICS)
                if metrics[position].nvmlReturn == 0 and math.isfinite(metrics[position].value)
            }
        )

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


def _figures(values: Mapping[int, float]) -> GpmFigures:
    def ratio(metric: int) -> float | None:
        # Two samples of a chip that changes its clock in between may come out a hair above the whole.
        return None if metric not in values else min(1.0, max(0.0, values[metric] / 100))

    def bytes_per_second(metric: int) -> float | None:
        return None if metric not in values else max(0.0, values[metric]) * MEBIBYTE

    def ratios(metrics: Mapping[str, int]) -> dict[str, float]:
        return {name: found for name, metric in metrics.items() if (found := ratio(metric)) is not None}

    return GpmFigures(
        sm_active_ratio=ratio(SM_ACTIVE),
        sm_occupancy_ratio=ratio(SM_OCCUPANCY),
        tensor_active_ratio=ratios(TENSOR),
        pipe_active_ratio=ratios(PIPES),
        dram_active_ratio=ratio(DRAM),
        pcie_transmit_bytes_per_second=bytes_per_second(PCIE_TRANSMIT),
        pcie_receive_bytes_per_second=bytes_per_second(PCIE_RECEIVE),
        nvlink_transmit_bytes_per_second=bytes_per_second(NVLINK_TRANSMIT),
        nvlink_receive_bytes_per_second=bytes_per_second(NVLINK_RECEIVE),
    )
