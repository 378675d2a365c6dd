"""Readings of a window in, the means of one GPU out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from rankscope.analysis.tensor_estimate import estimated_flops_per_second, pipe_peaks
from rankscope.daemon.collectors.gpu.readings import GpuReading
from rankscope.daemon.samples import GpuSample

ANY = "any"  # of the tensor pipes


def mean_of(readings: Sequence[GpuReading], before: GpuReading | None = None) -> GpuSample:
    """`readings` are of one GPU, oldest first; `before` is the last one of the window before, for what counts up."""
    last = readings[-1]
    return GpuSample(
        gpus=1,
        uuid=last.uuid,
        model=last.name,
        utilization_ratio=_mean(readings, lambda gpu: gpu.utilization_ratio),
        sm_active_ratio=_mean(readings, lambda gpu: gpu.sm_active_ratio),
        tensor_active_ratio=_mean(readings, lambda gpu: gpu.tensor_active_ratio.get(ANY)),
        dram_active_ratio=_mean(readings, lambda gpu: gpu.dram_active_ratio),
        power_watts=_mean(readings, lambda gpu: gpu.power_watts),
        sm_clock_hertz=_mean(readings, lambda gpu: gpu.sm_clock_hertz),
        sm_clock_ratio=_mean(readings, _clock_ratio),
        temperature_celsius=_mean(readings, lambda gpu: gpu.temperature_celsius),
        throttled_seconds=_grown(last.throttled_seconds, (before or readings[0]).throttled_seconds),
        memory_used_bytes=last.memory_used_bytes,
        memory_total_bytes=last.memory_total_bytes,
        estimated_flops_per_second=_mean(readings, estimate_of),
    )


def estimate_of(gpu: GpuReading) -> float | None:
    return estimated_flops_per_second(
        gpu.tensor_active_ratio, pipe_peaks(gpu.name), gpu.sm_clock_hertz, gpu.sm_clock_max_hertz
    )


def _clock_ratio(gpu: GpuReading) -> float | None:
    if gpu.sm_clock_hertz is None or not gpu.sm_clock_max_hertz:
        return None
    return gpu.sm_clock_hertz / gpu.sm_clock_max_hertz


def _mean(readings: Iterable[GpuReading], value: Callable[[GpuReading], float | None]) -> float | None:
    known = [number for number in map(value, readings) if number is not None]
    return fmean(known) if known else None


def _grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """A counter that went back began anew: what it has now is what it grew by."""
    return {
        reason: seconds - before[reason] if seconds >= before[reason] else seconds
        for reason, seconds in now.items()
        if reason in before
    }
