"""The part of a window that tells of the rank's GPU. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from rankscope.daemon.samples import GpuSample
from rankscope.v1.window_pb2 import SOURCE_GPU, GpuUsage, RankWindow

NAME_CHARACTERS = 128
MEASURED = (
    "utilization_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "power_watts",
    "sm_clock_hertz",
    "sm_clock_ratio",
    "temperature_celsius",
    "estimated_flops_per_second",
)
COUNTED = ("memory_used_bytes", "memory_total_bytes", "ecc_uncorrected_errors", "ecc_corrected_errors", "xids")


def add_gpu(window: RankWindow, sample: GpuSample, peak_of_device: Callable[[str], float | None]) -> None:
    """Identity, usage, and the device's peak where the probe did not tell it."""
    identity = window.identity
    for name, text in (
        ("gpu_uuid", sample.uuid),
        ("gpu_model", sample.model),
        ("pod_name", sample.pod_name),
        ("namespace", sample.namespace),
    ):
        if text:
            setattr(identity, name, "".join(c if c.isprintable() else " " for c in text[:NAME_CHARACTERS]))
    usage = GpuUsage(gpus=sample.gpus, shared=sample.shared)
    for name in MEASURED:
        value = getattr(sample, name)
        if value is not None and math.isfinite(value):
            setattr(usage, name, value)
    for name in COUNTED:
        amount = getattr(sample, name)
        if amount is not None and 0 <= amount < 2**63:
            setattr(usage, name, amount)
    if sample.row_remap_pending is not None:
        usage.row_remap_pending = sample.row_remap_pending
    for reason, seconds in sample.throttled_seconds.items():
        if math.isfinite(seconds) and seconds >= 0:
            usage.throttled_seconds[reason] = seconds
    window.gpu.CopyFrom(usage)
    window.sources["gpu"] = SOURCE_GPU
    if not window.HasField("peak_flops_per_second") and sample.model:
        peak = peak_of_device(sample.model)
        if peak is not None and math.isfinite(peak) and peak > 0:
            window.peak_flops_per_second = peak
            window.sources["peak_flops_per_second"] = SOURCE_GPU
