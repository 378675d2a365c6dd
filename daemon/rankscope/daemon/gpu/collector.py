"""The GPUs of the node per window: what each rank's GPU did, and everything for the exporter. The sources read in
threads of their own, so that a driver that hangs costs GPU figures and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rankscope.analysis.models.mfu import estimated_flops_per_second, pipe_peaks
from rankscope.common.text import one_line
from rankscope.daemon.collector import Collector
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.gpu.attribution import NO_PODS, Attributed, Attribution, KubeletPods, Pod, attribute
from rankscope.daemon.gpu.dcgm import DcgmSource
from rankscope.daemon.gpu.nvml import NvmlSource
from rankscope.daemon.gpu.readings import PROFILE, GpuReading, GpuSnapshot, GpuSource, GpuState, SourceState
from rankscope.daemon.samples import GpuSample, Problem, RankKey, RankProcess, Span

log = logging.getLogger(__name__)

# An older reading is not of now: the source hangs, or reads less often than it should.
FRESH_SECONDS = 10.0
FRESH_INTERVALS = 3
ANY = "any"  # of the tensor pipes


@dataclass(frozen=True)
class GpuStatus:
    """The GPUs as the exporter shows them."""

    sources: tuple[GpuSnapshot, ...] = ()
    gpus: tuple[GpuReading, ...] = ()
    fresh: bool = False  # the gauges are of now; if not, only counters hold
    shared: frozenset[str] = frozenset()


class GpuCollector(Collector[GpuSample]):
    name = "gpu"

    def __init__(
        self,
        driver: GpuSource,
        dcgm: GpuSource | None = None,
        pods: KubeletPods | None = None,
        *,
        interval_seconds: float = 1.0,
        proc_root: Path = Path("/proc"),
    ) -> None:
        self._driver = driver
        self._dcgm = dcgm
        self._pods = pods
        self._fresh_nanos = round(max(FRESH_SECONDS, FRESH_INTERVALS * interval_seconds) * 1e9)
        self._proc_root = proc_root
        self._driver_answered = False
        self._seen_unix_nanos = 0
        self._before: Mapping[str, GpuReading] = {}
        self._missing: frozenset[int] = frozenset()
        self._logged: dict[str, SourceState] = {}
        self.status = GpuStatus()

    @classmethod
    def from_config(cls, config: Config) -> GpuCollector | None:
        if not config.gpu:
            return None
        return cls(
            NvmlSource(config.gpu_interval_seconds),
            None if config.dcgm_url == NONE else DcgmSource(config.dcgm_url, config.gpu_interval_seconds),
            None if config.kubelet_socket == NONE else KubeletPods(Path(config.kubelet_socket)),
            interval_seconds=config.gpu_interval_seconds,
            proc_root=Path(config.proc_root),
        )

    def start(self) -> None:
        for part in (self._driver, self._dcgm, self._pods):
            if part is not None:
                part.start()

    def close(self) -> None:
        for part in (self._pods, self._dcgm, self._driver):
            if part is not None:
                part.close()

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, GpuSample | Problem]:
        driver = self._driver.latest()
        dcgm = None if self._dcgm is None else self._dcgm.latest()
        self._driver_answered |= answers(driver)
        latest = merge(driver, dcgm, self._driver_answered)
        self._log_states(driver, dcgm)
        fresh = answers(latest) and span.end_unix_nanos - latest.taken_unix_nanos < self._fresh_nanos
        attributed = self._attribute(ranks, latest) if fresh else Attributed()
        readings = self._readings(latest, dcgm) if fresh else {}
        samples: dict[RankKey, GpuSample | Problem] = {}
        pods = NO_PODS if self._pods is None else self._pods.latest()
        for key, attribution in attributed.ranks.items():
            if attribution.gpus:
                samples[key] = self._sample(attribution, readings, attributed.shared, pods)
            elif attribution.problem is not None:
                samples[key] = attribution.problem
        if fresh:
            self._before = {gpu.uuid: gpu for gpu in latest.gpus}
            self._seen_unix_nanos = latest.taken_unix_nanos
        sources = (driver,) if dcgm is None else (driver, dcgm)
        self.status = GpuStatus(sources, latest.gpus, fresh, attributed.shared)
        return samples

    def _attribute(self, ranks: Sequence[RankProcess], latest: GpuSnapshot) -> Attributed:
        missing: set[int] = set()

        def exists(pid: int) -> bool:
            if (self._proc_root / str(pid)).exists():
                return True
            missing.add(pid)
            # A process may end between the two lookups; one that stays missing is of another namespace.
            return pid not in self._missing

        attributed = attribute(ranks, latest.gpus, exists)
        self._missing = frozenset(missing)
        return attributed

    def _readings(self, latest: GpuSnapshot, dcgm: GpuSnapshot | None) -> dict[str, list[GpuReading]]:
        """By GPU, since the last window; a window shorter than the interval gets the latest again."""
        source = self._dcgm if self._dcgm is not None and latest.source == "dcgm" else self._driver
        taken = [snapshot for snapshot in source.since(self._seen_unix_nanos) if answers(snapshot)]
        merged = [merge(snapshot, dcgm, True) for snapshot in taken if snapshot.source == latest.source]
        by_gpu: dict[str, list[GpuReading]] = {}
        for snapshot in merged or [latest]:
            for gpu in snapshot.gpus:
                if gpu.state is GpuState.OK:
                    by_gpu.setdefault(gpu.uuid, []).append(gpu)
        return by_gpu

    def _sample(
        self,
        attribution: Attribution,
        readings: Mapping[str, list[GpuReading]],
        shared: frozenset[str],
        pods: Mapping[str, Pod],
    ) -> GpuSample:
        is_shared = any(gpu.uuid in shared for gpu in attribution.gpus)
        owners = {pods.get(gpu.uuid) for gpu in attribution.gpus}
        pod = owners.pop() if len(owners) == 1 else None
        only = attribution.only
        sample = GpuSample(gpus=len(attribution.gpus))
        if only is not None:
            sample = mean_of(readings.get(only.uuid) or [only], self._before.get(only.uuid))
        return replace(
            sample,
            shared=is_shared,
            pod_name=None if pod is None else pod.name,
            namespace=None if pod is None else pod.namespace,
            problem=attribution.problem,
        )

    def _log_states(self, driver: GpuSnapshot, dcgm: GpuSnapshot | None) -> None:
        """One line when a state changes; a node without GPUs is no warning."""
        for snapshot in (driver, dcgm):
            if snapshot is None or snapshot.state is self._logged.get(snapshot.source, SourceState.STARTING):
                continue
            self._logged[snapshot.source] = snapshot.state
            if snapshot.state is SourceState.OK:
                log.info("%s: reading %d GPUs", snapshot.source, len(snapshot.gpus))
            else:
                usual = snapshot.state in (SourceState.NO_DRIVER, SourceState.NO_GPU, SourceState.STARTING)
                level = logging.INFO if usual else logging.WARNING
                log.log(level, "%s: %s: %s", snapshot.source, snapshot.state.value, one_line(snapshot.reason, 300))


def merge(driver: GpuSnapshot, dcgm: GpuSnapshot | None, driver_answered: bool) -> GpuSnapshot:
    """One view from the driver and a dcgm-exporter, which adds only profiling figures that the driver lacks.

    `driver_answered`: it answered at some time since the daemon began. From then on all counters are the driver's: a
    counter that changes its source jumps."""
    if dcgm is None or dcgm.state is not SourceState.OK:
        return driver
    if not answers(driver):
        return driver if driver_answered else dcgm
    profiled = {gpu.uuid: gpu for gpu in dcgm.gpus}
    return replace(driver, gpus=tuple(_with_profile(gpu, profiled.get(gpu.uuid)) for gpu in driver.gpus))


def answers(snapshot: GpuSnapshot) -> bool:
    """Whether it has current readings. One GPU may hang alone."""
    if snapshot.state is SourceState.HANGING:
        return any(gpu.state is GpuState.OK for gpu in snapshot.gpus)
    return snapshot.state is SourceState.OK


def _with_profile(gpu: GpuReading, profiled: GpuReading | None) -> GpuReading:
    """All of the profile comes from one source: the shares are of the same stretch of time."""
    if profiled is None or gpu.has_profile:
        return gpu
    return replace(gpu, **{name: getattr(profiled, name) for name in PROFILE})


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
    """A counter that went back was reset: its value is its growth."""
    return {
        reason: seconds - before[reason] if seconds >= before[reason] else seconds
        for reason, seconds in now.items()
        if reason in before
    }
