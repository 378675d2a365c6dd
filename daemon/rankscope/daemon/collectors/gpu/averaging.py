"""Readings of a window in, the means of one GPU out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rankscope.analysis.tensor_estimate import estimated_flops_per_second, pipe_peaks
from rankscope.daemon.collectors.gpu.readings import GpuReading
from rankscope.daemon.samples import GpuSample

ANY = "any"  # of the tensor pipes


def mean_of(readings: Sequence[GpuReading], before: GpuReading | None = None) -> GpuSample:
    """`readings` are of one GPU, oldest first; `before` is the last one of the window before, for what counts up."""
    last = readings[-1]
    seen = readings if before is None else [before, *readings]
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
        ecc_uncorrected_errors=_new_ecc_errors(seen, "uncorrected"),
        ecc_corrected_errors=_new_ecc_errors(seen, "corrected"),
        xids=_new_errors(seen, lambda gpu: None if gpu.xid_errors is None else sum(gpu.xid_errors.values())),
        row_remap_pending=_last(gpu.remapping_pending for gpu in readings),
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


def _last(values: Iterable[bool | None]) -> bool | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def _new_ecc_errors(seen: Sequence[GpuReading], kind: str) -> int | None:
    """By one counter: the two begin at different times."""
    volatile = _new_errors(seen, lambda gpu: gpu.ecc_errors.get(("volatile", kind)))
    return _new_errors(seen, lambda gpu: gpu.ecc_errors.get(("aggregate", kind))) if volatile is None else volatile


def _new_errors(seen: Iterable[GpuReading], count: Callable[[GpuReading], int | None]) -> int | None:
    """From the first reading that has the counter to the last; it begins at zero when the driver is loaded again."""
    known = [number for number in map(count, seen) if number is not None]
    return sum(now - then if now >= then else now for then, now in pairwise(known)) if known else None


def _grown(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """A counter that went back began anew: what it has now is what it grew by."""
    return {
        reason: seconds - before[reason] if seconds >= before[reason] else seconds
        for reason, seconds in now.items()
        if reason in before
    }
