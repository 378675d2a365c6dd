"""Everything the daemon knows, as Prometheus metrics. What was not measured has no series."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.daemon.export.capture_metrics import CaptureStatus, capture_metrics
from rankscope.daemon.export.gpu_metrics import FULL, gpu_metrics
from rankscope.daemon.export.rank_metrics import label, rank_metrics
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.windows.totals import RankReport


@dataclass(frozen=True)
class CollectorStatus:
    duration_seconds: float
    success: bool


@dataclass(frozen=True)
class DaemonStatus:
    """The daemon's view of itself."""

    version: str
    node: str
    collectors: Mapping[str, CollectorStatus] = field(default_factory=dict)
    own_cpu_seconds: float = 0.0
    sampling_cpu_seconds: float = 0.0
    resident_bytes: int | None = None
    budget_used_ratio: float | None = None
    stack_rate_hertz: float = 0.0
    stack_recorded_ratio: float | None = None
    ranks: int = 0
    ranks_cut: int = 0
    rank_conflicts: int = 0
    discovery_problems: int = 0
    windows_total: int = 0
    windows_skipped_total: int = 0
    watch_readers: int = 0
    watch_dropped_total: int = 0
    captures: CaptureStatus | None = None
    gpu: GpuStatus | None = None
    metrics_detail: str = FULL


@dataclass(frozen=True)
class Snapshot:
    """What one scrape shows; replaced as a whole at each tick, so that a scrape never sees half a window."""

    daemon: DaemonStatus
    ranks: tuple[RankReport, ...] = ()


class Exporter(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot()
        yield from _daemon_metrics(snapshot.daemon)
        if snapshot.daemon.captures is not None:
            yield from capture_metrics(snapshot.daemon.captures)
        if snapshot.daemon.gpu is not None:
            yield from gpu_metrics(snapshot.daemon.gpu, snapshot.daemon.node, snapshot.daemon.metrics_detail)
        yield from rank_metrics(snapshot.ranks, snapshot.daemon.node, snapshot.daemon.metrics_detail == FULL)

    def describe(self) -> Iterable[Metric]:
        # Registering must not scrape: the daemon has no snapshot before its first tick.
        return ()


def _daemon_metrics(status: DaemonStatus) -> Iterator[Metric]:
    yield _gauge(
        "build_info", "The daemon's version and node, value 1.", {"version": status.version, "node": status.node}, 1
    )
    duration = GaugeMetricFamily(
        "rankscope_collector_duration_seconds", "Time a source took for the last window.", labels=["collector"]
    )
    success = GaugeMetricFamily(
        "rankscope_collector_success", "1 if a source did not fail in the last window.", labels=["collector"]
    )
    for name, collector in sorted(status.collectors.items()):
        duration.add_metric([label(name)], collector.duration_seconds)
        success.add_metric([label(name)], float(collector.success))
    yield from (duration, success)
    cpu = CounterMetricFamily(
        "rankscope_daemon_cpu_seconds", "CPU time of the daemon itself and of its stack samplers.", labels=["part"]
    )
    cpu.add_metric(["self"], status.own_cpu_seconds)
    cpu.add_metric(["sampling"], status.sampling_cpu_seconds)
    yield cpu
    gauges: list[tuple[str, str, float | None]] = [
        ("daemon_resident_bytes", "Memory of the daemon.", status.resident_bytes),
        (
            "daemon_budget_ratio",
            "CPU use over the last seconds as a ratio of the budget; above 1, stacks are recorded less.",
            status.budget_used_ratio,
        ),
        (
            "daemon_stack_rate_hertz",
            "Stack samples per second of a rank while it is recorded; 0: none is.",
            status.stack_rate_hertz,
        ),
        (
            "daemon_stack_recorded_ratio",
            "Share of the last minute in which a rank's stacks were recorded, mean of the ranks.",
            status.stack_recorded_ratio,
        ),
        ("daemon_ranks", "Ranks found on this node.", status.ranks),
        ("daemon_ranks_cut", "Ranks found but not watched: over max_ranks.", status.ranks_cut),
        (
            "daemon_rank_conflicts",
            "Ranks that more than one process claims to be; the oldest is watched.",
            status.rank_conflicts,
        ),
        (
            "daemon_discovery_problems",
            "Processes that may be ranks but could not be read.",
            status.discovery_problems,
        ),
        ("daemon_watch_readers", "gRPC clients that watch windows.", status.watch_readers),
    ]
    for name, text, value in gauges:
        if value is not None:
            yield _gauge(name, text, {}, value)
    counters: list[tuple[str, str, float]] = [
        ("daemon_windows", "Windows assembled.", status.windows_total),
        (
            "daemon_windows_skipped",
            "Window borders passed over because the daemon was late.",
            status.windows_skipped_total,
        ),
        ("daemon_watch_dropped", "Messages dropped because a reader was slow.", status.watch_dropped_total),
    ]
    for name, text, value in counters:
        yield CounterMetricFamily(f"rankscope_{name}", text, value=value)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"rankscope_{name}", text, labels=list(labels))
    family.add_metric([label(content) for content in labels.values()], value)
    return family


# What the daemon says about itself: its version, and what it uses.


def process_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def package_version() -> str:
    try:
        return version("rankscope")
    except PackageNotFoundError:
        return "unknown"


def resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
