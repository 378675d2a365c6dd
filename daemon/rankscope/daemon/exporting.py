"""Everything the daemon knows, as Prometheus metrics. What was not measured has no series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.daemon.assembling import bounded
from rankscope.daemon.captures.exporting import CaptureStatus, capture_metrics
from rankscope.daemon.phases import OTHER, PHASES
from rankscope.daemon.tallying import CAUSES, RankReport
from rankscope.v1.window_pb2 import RankWindow

LABEL_CHARACTERS = 128
PROBLEMS_PER_RANK = 6


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
    ranks: int = 0
    ranks_cut: int = 0
    rank_conflicts: int = 0
    discovery_problems: int = 0
    windows_total: int = 0
    windows_skipped_total: int = 0
    watch_readers: int = 0
    watch_dropped_total: int = 0
    captures: CaptureStatus | None = None


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
        yield from _rank_metrics(snapshot.ranks, snapshot.daemon.node)

    def describe(self) -> Iterable[Metric]:
        # Registering must not scrape: the daemon has no snapshot before its first tick.
        return ()


def label(text: str) -> str:
    return bounded(text, LABEL_CHARACTERS)


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
            "CPU use over the last seconds as a ratio of the budget; above 1, stacks are sampled less often.",
            status.budget_used_ratio,
        ),
        ("daemon_stack_rate_hertz", "Stack samples per second and rank at present.", status.stack_rate_hertz),
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


class _Families:
    """Metric families of ranks, made when the first sample comes."""

    def __init__(self) -> None:
        self.made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None:
            family = self.made.get(name) or GaugeMetricFamily(f"rankscope_{name}", text, labels=list(labels))
            self._add(name, family, labels, value)

    def counter(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None:
            family = self.made.get(name) or CounterMetricFamily(f"rankscope_{name}", text, labels=list(labels))
            self._add(name, family, labels, value)

    def _add(
        self, name: str, family: GaugeMetricFamily | CounterMetricFamily, labels: Mapping[str, str], value: float
    ) -> None:
        self.made[name] = family
        family.add_metric(list(labels.values()), value)


def _rank_metrics(ranks: Iterable[RankReport], node: str) -> Iterator[Metric]:
    families = _Families()
    shown: set[tuple[str, str]] = set()
    for report in ranks:
        identity = report.window.identity
        who = {"job": label(identity.job), "rank": str(identity.rank)}
        # One series twice makes Prometheus refuse the whole scrape, so the first claim of a rank wins.
        if (who["job"], who["rank"]) not in shown:
            shown.add((who["job"], who["rank"]))
            _add_rank(families, report, who, node)
    yield from families.made.values()


def _add_rank(families: _Families, report: RankReport, who: Mapping[str, str], node: str) -> None:
    window, totals = report.window, report.totals
    identity = window.identity
    info = {
        **who,
        "node": label(node),
        "namespace": label(identity.namespace),
        "pod": label(identity.pod),
        "gpu": label(identity.gpu_uuid),
        "world_size": str(identity.world_size),
        "pid": str(identity.pid),
    }
    for axis in ("pipeline", "tensor", "data"):
        info[axis] = str(getattr(identity.coordinates, axis)) if identity.coordinates.HasField(axis) else ""
    text = (
        "Identity of a rank, value 1; join on job and rank. pipeline, tensor and data are its place in the parallel "
        "layout. A label is empty where it is not known."
    )
    families.gauge("rank_info", text, info, 1)
    families.gauge("rank_up", "1 if any source could measure the rank.", who, float(bool(window.sources)))
    for problem in dict.fromkeys((label(p.source), label(p.kind)) for p in report.problems[:PROBLEMS_PER_RANK]):
        labels = {**who, "source": problem[0], "kind": problem[1]}
        families.gauge("rank_problem", "1 while a source has this kind of problem with the rank.", labels, 1)
    _add_steps(families, window, who)
    for cause in CAUSES:
        seconds = totals.cause_seconds.get(cause)
        text = "Time by cause. self + wait is the step; communication overlaps with backward, so not all causes add up."
        families.counter("rank_cause_seconds", text, {**who, "cause": cause}, seconds)
    text = "Steps overwritten in the ring before the daemon read them."
    families.counter("rank_steps_lost", text, who, totals.steps_lost)
    _add_process(families, report, who)
    _add_stacks(families, report, who)


def _add_steps(families: _Families, window: RankWindow, who: Mapping[str, str]) -> None:
    families.counter("rank_steps", "Steps since the process began.", who, _optional(window, "steps_total"))
    since = (window.end_unix_nanos - window.last_step_unix_nanos) / 1e9
    known = window.HasField("last_step_unix_nanos")
    text = "Time since the last step ended."
    families.gauge("rank_seconds_since_step", text, who, max(0.0, since) if known else None)
    stalled = float(window.HasField("stall")) if window.sources else None
    families.gauge("rank_stalled", "1 while the rank makes no progress.", who, stalled)
    for name, text, statistics in (
        (
            "step",
            "Step time in the last window. In synchronous training it is the same on every rank.",
            window.step,
        ),
        ("self", "Step time less waiting on others, in the last window. The one to compare.", window.self),
    ):
        if statistics.ListFields():
            for quantile, value in (("0.5", statistics.p50_seconds), ("0.9", statistics.p90_seconds)):
                families.gauge(f"rank_{name}_seconds", text, {**who, "quantile": quantile}, value)
    for name, text in (
        (
            "model_flops_per_step",
            "Model FLOPs of this rank per step: declared FLOPs of the job by world size, or counted.",
        ),
        ("peak_flops_per_second", "Peak of the rank's device: declared, or dense bf16 by the device's name."),
        (
            "mfu_ratio",
            "Model FLOPs utilisation in the last window. Absent unless the FLOPs and the peak are known.",
        ),
    ):
        families.gauge(f"rank_{name}", text, who, _optional(window, name))
    for kind in ("allocated", "reserved", "peak_allocated", "total"):
        amount = _optional(window.memory, f"{kind}_bytes")
        text = "Memory of the rank's device: its total, and what torch's allocator has of it. CUDA only."
        families.gauge("rank_device_memory_bytes", text, {**who, "kind": kind}, amount)


def _add_process(families: _Families, report: RankReport, who: Mapping[str, str]) -> None:
    for name, text in (
        ("cpu_seconds", "CPU time of the process."),
        ("run_delay_seconds", "Time the training thread was runnable but not running."),
        ("throttled_seconds", "Time the rank's cgroup was out of CPU quota."),
        ("stopped_seconds", "Time the process was seen stopped by a signal."),
        ("involuntary_switches", "Times the process was preempted."),
        ("voluntary_switches", "Times the process gave the CPU up."),
    ):
        families.counter(f"rank_{name}", text, who, report.totals.process.get(name))
    usage = report.window.process
    families.gauge("rank_resident_bytes", "Memory of the process.", who, _optional(usage, "resident_bytes"))
    families.gauge("rank_threads", "Threads of the process.", who, _optional(usage, "threads"))


def _add_stacks(families: _Families, report: RankReport, who: Mapping[str, str]) -> None:
    totals = report.totals
    families.counter("rank_stack_samples", "Stacks read of the training thread.", who, totals.stack_samples)
    families.counter("rank_stack_errors", "Stacks that could not be read.", who, totals.stack_errors)
    if not report.window.HasField("stacks"):
        return
    # Phases are labels, so the set is closed.
    shares = dict.fromkeys(PHASES, 0.0)
    for phase, share in report.window.stacks.phase_shares.items():
        shares[phase if phase in shares else OTHER] += share
    for phase, share in shares.items():
        text = "Share of stack samples by phase in the last window."
        families.gauge("rank_phase_ratio", text, {**who, "phase": phase}, share)


def _optional(message: Message, name: str) -> float | None:
    return float(getattr(message, name)) if message.HasField(name) else None
