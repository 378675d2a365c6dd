"""The GPUs of the node per window: what each rank's GPU did, and everything for the exporter. Asks sources that read in
threads or processes of their own, so that a driver that hangs costs GPU figures and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope.daemon.collectors.gpu.attributing import Attributed, Attribution, attribute
from rankscope.daemon.collectors.gpu.averaging import mean_of
from rankscope.daemon.collectors.gpu.merging import answers, merge
from rankscope.daemon.collectors.gpu.pod_resources import NO_PODS, Pod, PodSource
from rankscope.daemon.collectors.gpu.readings import GpuReading, GpuSnapshot, GpuSource, GpuState, SourceState
from rankscope.daemon.samples import GpuSample, Problem, RankKey, RankProcess, Span

log = logging.getLogger(__name__)

# A reading that is older says nothing of now: the source hangs or reads less often than it should.
FRESH_SECONDS = 10.0
FRESH_INTERVALS = 3


@dataclass(frozen=True)
class SourceStatus:
    source: str
    state: SourceState
    polls_total: int
    poll_seconds_total: float


@dataclass(frozen=True)
class GpuStatus:
    """The GPUs as the exporter shows them."""

    sources: tuple[SourceStatus, ...] = ()
    gpus: tuple[GpuReading, ...] = ()
    fresh: bool = False  # the gauges are of now; if not, only counters hold
    shared: frozenset[str] = frozenset()


class GpuCollector:
    name = "gpu"

    def __init__(
        self,
        driver: GpuSource,
        dcgm: GpuSource | None = None,
        pods: PodSource | None = None,
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
        self._told: dict[str, SourceState] = {}
        self.status = GpuStatus()

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
        self._tell(driver, dcgm)
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
        known = tuple(_status(snapshot) for snapshot in (driver, dcgm) if snapshot is not None)
        self.status = GpuStatus(known, latest.gpus, fresh, attributed.shared)
        return samples

    def _attribute(self, ranks: Sequence[RankProcess], latest: GpuSnapshot) -> Attributed:
        missing: set[int] = set()

        def exists(pid: int) -> bool:
            if (self._proc_root / str(pid)).exists():
                return True
            missing.add(pid)
            # A process may end between the driver's look and this one; one that stays missing is another namespace's.
            return pid not in self._missing

        attributed = attribute(ranks, latest.gpus, exists)
        self._missing = frozenset(missing)
        return attributed

    def _readings(self, latest: GpuSnapshot, dcgm: GpuSnapshot | None) -> dict[str, list[GpuReading]]:
        """By GPU, since the last window; a window shorter than the interval has the latest once more."""
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

    def _tell(self, driver: GpuSnapshot, dcgm: GpuSnapshot | None) -> None:
        """One line when a state changes; a node without GPUs is no news."""
        for snapshot in (driver, dcgm):
            if snapshot is None or snapshot.state is self._told.get(snapshot.source, SourceState.STARTING):
                continue
            self._told[snapshot.source] = snapshot.state
            if snapshot.state is SourceState.OK:
                log.info("%s: reading %d GPUs", snapshot.source, len(snapshot.gpus))
            else:
                usual = snapshot.state in (SourceState.NO_DRIVER, SourceState.NO_GPU, SourceState.STARTING)
                tell: Callable[..., None] = log.info if usual else log.warning
                tell("%s: %s: %s", snapshot.source, snapshot.state.value, " ".join(snapshot.reason.split())[:300])


def _status(snapshot: GpuSnapshot) -> SourceStatus:
    return SourceStatus(snapshot.source, snapshot.state, snapshot.polls_total, snapshot.poll_seconds_total)
