"""The daemon's metrics: the table of those about itself and its captures, and the exporter that walks all tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankscope.common.metric_table import ANY, Counter, Gauge, Section
from rankscope.daemon.captures.duty_cycle import DONE, FAILED, REASONS, SKIPPED
from rankscope.daemon.captures.runner import RESULTS
from rankscope.daemon.captures.service import CaptureStatus
from rankscope.daemon.export.gpu_metrics import GPU_SOURCES, GPUS, LIVE_GPUS, gpu_metrics
from rankscope.daemon.export.rank_metrics import RANKS, rank_metrics
from rankscope.daemon.export.status import FULL, DaemonStatus, Snapshot

# fmt: off
DAEMON: Section[DaemonStatus] = Section((), (
    Gauge("rankscope_build_info", "The daemon's version and node, value 1.", lambda d: {(d.version, d.node): 1},
        {"version": ANY, "node": ANY}),
    Gauge("rankscope_collector_duration_seconds", "Time a source took for the last window.",
        lambda d: {name: status.duration_seconds for name, status in sorted(d.collectors.items())}, {"collector": ANY}),
    Gauge("rankscope_collector_success", "1 if a source did not fail in the last window.",
        lambda d: {name: status.success for name, status in sorted(d.collectors.items())}, {"collector": ANY}),
    Counter("rankscope_daemon_cpu_seconds_total",
        "CPU time of the daemon itself, of its stack samplers, and of its HTTP server, which the budget leaves out.",
        lambda d: {"self": d.own_cpu_seconds, "sampling": d.sampling_cpu_seconds, "scrapes": d.scrape_cpu_seconds},
        {"part": ("self", "sampling", "scrapes")}),
    Gauge("rankscope_daemon_resident_bytes", "Memory of the daemon.", lambda d: d.resident_bytes),
    Gauge("rankscope_daemon_budget_ratio",
        "CPU use over the last seconds as a ratio of the budget; above 1, stacks are recorded less.",
        lambda d: d.budget_used_ratio),
    Gauge("rankscope_daemon_stack_rate_hertz", "Stack samples per second of a rank while it is recorded; 0: none is.",
        lambda d: d.stack_rate_hertz),
    Gauge("rankscope_daemon_stack_recorded_ratio",
        "Share of the last minute in which a rank's stacks were recorded, mean of the ranks.",
        lambda d: d.stack_recorded_ratio),
    Gauge("rankscope_daemon_stuck_samplers",
        "py-spy processes that were killed and do not end: a file system of their rank does not answer.",
        lambda d: d.stuck_samplers),
    Gauge("rankscope_daemon_ranks", "Ranks found on this node.", lambda d: d.ranks),
    Gauge("rankscope_daemon_ranks_cut", "Ranks found but not watched: over max_ranks, by the pod or user they are of.",
        lambda d: d.ranks_cut or {"": 0}, {"owner": ANY}),
    Gauge("rankscope_daemon_rank_conflicts", "Ranks that more than one process claims to be; the first is watched.",
        lambda d: d.rank_conflicts),
    Gauge("rankscope_daemon_discovery_problems", "Processes that may be ranks but could not be read.",
        lambda d: d.discovery_problems),
    Gauge("rankscope_daemon_watch_readers", "gRPC clients that watch windows.", lambda d: d.watch_readers),
    Counter("rankscope_daemon_windows_total", "Windows assembled.", lambda d: d.windows_total),
    Counter("rankscope_daemon_windows_skipped_total", "Window borders passed over because the daemon was late.",
        lambda d: d.windows_skipped_total),
    Counter("rankscope_daemon_watch_dropped_total", "Messages dropped because a reader was slow.",
        lambda d: d.watch_dropped_total),
))

CAPTURES: Section[CaptureStatus] = Section((), (
    Counter("rankscope_captured_ranks_total", "Captured ranks, by result.",
        lambda c: c.results, {"result": tuple(RESULTS.values())}),
    Gauge("rankscope_capture_step_ratio",
        "Step time after the job's last capture divided by that before it, of the rank it slowed most.",
        lambda c: c.slowdowns, {"job": ANY}),
    Gauge("rankscope_capture_clients", "Processes whose libkineto polls this daemon.", lambda c: c.clients),
    Counter("rankscope_capture_datagrams_refused_total", "Datagrams that were not answered, by reason.",
        lambda c: {"malformed": c.malformed_total, "unvouched": c.unvouched_total},
        {"reason": ("malformed", "unvouched")}),
    Counter("rankscope_capture_datagrams_unanswered_total",
        "Polls in order that got no answer, and are made again: late (it would have come too late), hushed (the first "
        "on a new socket, or to set a client right), unsent (the client was gone, or its queue full).",
        lambda c: c.unanswered, {"reason": ("late", "hushed", "unsent")}),
    Counter("rankscope_duty_cycle_captures_total", "Captures of the duty cycle, by result.",
        lambda c: c.duty_results, {"result": (DONE, FAILED, SKIPPED)}),
    Counter("rankscope_duty_cycle_skipped_total", "Captures of the duty cycle that were skipped, by reason.",
        lambda c: c.duty_skips, {"reason": REASONS}),
))
# fmt: on

TABLE = (DAEMON, CAPTURES, GPU_SOURCES, GPUS, LIVE_GPUS, RANKS)


class Exporter(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        snapshot = self._snapshot()
        daemon = snapshot.daemon
        full = daemon.metrics_detail == FULL
        yield from DAEMON.of(daemon)
        yield from CAPTURES.of(daemon.captures)
        if daemon.gpu is not None:
            yield from gpu_metrics(daemon.gpu, daemon.node, full)
        yield from rank_metrics(snapshot.ranks, full)

    def describe(self) -> Iterable[Family]:
        # Registering must not scrape: the daemon has no snapshot before its first tick.
        return ()
