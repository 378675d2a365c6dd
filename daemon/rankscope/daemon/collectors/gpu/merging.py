"""One view of the GPUs from the driver and from a dcgm-exporter. They never both give one counter: plain counters
are the driver's wherever it could be asked even once, and dcgm adds only the profiling figures the driver lacks."""

from __future__ import annotations

from dataclasses import replace

from rankscope.daemon.collectors.gpu.readings import GpuReading, GpuSnapshot, GpuState, SourceState


def merge(driver: GpuSnapshot, dcgm: GpuSnapshot | None, driver_answered: bool) -> GpuSnapshot:
    """`driver_answered`: it answered at some time since the daemon began. From then on the counters stay its own, for a
    counter that changes hands jumps."""
    if dcgm is None or dcgm.state is not SourceState.OK:
        return driver
    if not answers(driver):
        return driver if driver_answered else dcgm
    profiled = {gpu.uuid: gpu for gpu in dcgm.gpus}
    return replace(driver, gpus=tuple(_with_profile(gpu, profiled.get(gpu.uuid)) for gpu in driver.gpus))


def answers(snapshot: GpuSnapshot) -> bool:
    """Something in it is of now. One GPU may hang alone."""
    if snapshot.state is SourceState.HANGING:
        return any(gpu.state is GpuState.OK for gpu in snapshot.gpus)
    return snapshot.state is SourceState.OK


def has_profile(gpu: GpuReading) -> bool:
    figures = (gpu.sm_active_ratio, gpu.sm_occupancy_ratio, gpu.dram_active_ratio)
    return any(figure is not None for figure in figures) or bool(gpu.tensor_active_ratio or gpu.pipe_active_ratio)


def _with_profile(gpu: GpuReading, profiled: GpuReading | None) -> GpuReading:
    """All of the profile from one source: shares of two different stretches of time do not go together."""
    if profiled is None or has_profile(gpu):
        return gpu
    return replace(
        gpu,
        sm_active_ratio=profiled.sm_active_ratio,
        sm_occupancy_ratio=profiled.sm_occupancy_ratio,
        tensor_active_ratio=profiled.tensor_active_ratio,
        pipe_active_ratio=profiled.pipe_active_ratio,
        dram_active_ratio=profiled.dram_active_ratio,
    )
