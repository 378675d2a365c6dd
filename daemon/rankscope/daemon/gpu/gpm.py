"""GPM, the GPU performance monitoring of Hopper and later: what the chip did between two samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from rankscope.daemon.gpu.nvml_calls import Asker

MEBIBYTE: Final = 1024 * 1024
# NVML's metric, the field of a GpuReading and, where that is a mapping, the key.
METRICS: Final = (
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
        self._request.numMetrics = len(METRICS)
        for position, (metric, _, _) in enumerate(METRICS):
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
    for (_, field, key), metric in zip(METRICS, metrics, strict=False):
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
