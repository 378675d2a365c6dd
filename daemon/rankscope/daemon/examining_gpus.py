"""Whether GPU counters can be had, and if not, why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.daemon.collectors.gpu.dcgm import DcgmError, fetch
from rankscope.daemon.collectors.gpu.dcgm_names import parse_readings
from rankscope.daemon.collectors.gpu.merging import has_profile
from rankscope.daemon.collectors.gpu.nvml import NvmlSource
from rankscope.daemon.collectors.gpu.readings import GpuSnapshot, GpuSource, GpuState, SourceState
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.examining import Finding, Level

OPENING_SECONDS = 20.0
# Two readings make the first profile.
PROFILE_SECONDS = 3.0
DRIVER_FOLDER = Path("/proc/driver/nvidia")


def gpus_are_readable(
    config: Config, source: Callable[[], GpuSource] = lambda: NvmlSource(0.5), driver_folder: Path = DRIVER_FOLDER
) -> Iterator[Finding]:
    if not config.gpu:
        yield Finding("gpu", Level.OK, "GPU counters are turned off (gpu = false)")
        return
    reading = source()
    reading.start()
    try:
        snapshot = _wait(reading, lambda seen: seen.state is not SourceState.STARTING, OPENING_SECONDS)
        if snapshot.state is SourceState.OK:
            snapshot = _wait(reading, lambda seen: any(map(has_profile, seen.gpus)), PROFILE_SECONDS)
    finally:
        reading.close()
    yield _driver_finding(snapshot, driver_folder)


def dcgm_answers(config: Config) -> Iterator[Finding]:
    if config.dcgm_url == NONE:
        return
    try:
        gpus = parse_readings(fetch(config.dcgm_url))
    except DcgmError as error:
        yield Finding("dcgm", Level.PROBLEM, str(error), "start dcgm-exporter on this node, or correct --dcgm-url")
        return
    if not gpus:
        step = "let it export DCGM_FI_* fields with UUID labels"
        yield Finding("dcgm", Level.PROBLEM, f"{config.dcgm_url}: no GPU in it", step)
    elif not any(map(has_profile, gpus)):
        text = f"{config.dcgm_url}: {len(gpus)} GPUs, but no profiling figures"
        yield Finding("dcgm", Level.WARNING, text, "add DCGM_FI_PROF_* fields to its counters")
    else:
        yield Finding("dcgm", Level.OK, f"{config.dcgm_url}: {len(gpus)} GPUs with profiling figures")


def _wait(source: GpuSource, enough: Callable[[GpuSnapshot], bool], seconds: float) -> GpuSnapshot:
    give_up_at = time.monotonic() + seconds
    while not enough(snapshot := source.latest()) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return snapshot


def _driver_finding(snapshot: GpuSnapshot, driver_folder: Path) -> Finding:
    lost = [gpu for gpu in snapshot.gpus if gpu.state is not GpuState.OK]
    if snapshot.state is SourceState.OK and lost:
        text = f"{len(lost)} of {len(snapshot.gpus)} GPUs do not answer: {lost[0].uuid} is {lost[0].state.value}"
        return Finding("gpu", Level.PROBLEM, text, "look for XID errors in dmesg; reset or drain the node")
    if snapshot.state is SourceState.OK:
        names = ", ".join(sorted({gpu.name for gpu in snapshot.gpus}))
        text = f"{len(snapshot.gpus)} × {names}, driver {snapshot.driver_version or 'unknown'}"
        if any(map(has_profile, snapshot.gpus)):
            return Finding("gpu", Level.OK, f"{text}, with GPM")
        step = "pass --dcgm-url for profiling figures, if dcgm-exporter runs here"
        return Finding("gpu", Level.WARNING, f"{text}, without GPM: no tensor and SM activity", step)
    if snapshot.state is SourceState.NO_DRIVER and not driver_folder.exists():
        return Finding("gpu", Level.OK, "no NVIDIA driver on this machine: no GPU counters")
    if snapshot.state is SourceState.NO_GPU:
        return Finding("gpu", Level.OK, "the NVIDIA driver has no GPU: no GPU counters")
    state = "does not answer" if snapshot.state is SourceState.STARTING else snapshot.state.value
    text = f"NVML: {state}: {' '.join(snapshot.reason.split())[:300]}"
    step = "see that nvidia-smi works where the daemon runs; a container needs the NVIDIA runtime"
    return Finding("gpu", Level.WARNING, text, step)
