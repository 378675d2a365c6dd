"""The daemon's metrics: what it knows about itself, the tables of that, of its captures and of its network ports, and
the exporter that walks all tables."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankscope.common.metric_table import ANY, FULL_ONLY, Counter, Gauge, Section
from rankscope.common.run_names import run_labels
from rankscope.daemon.captures.duty_cycle import DONE, FAILED, REASONS, SKIPPED
from rankscope.daemon.captures.runner import RESULTS
from rankscope.daemon.captures.service import CaptureStatus
from rankscope.daemon.collector import CollectorStatus
from rankscope.daemon.export.gpu_metrics import GPU_SOURCES, GPUS, LIVE_GPUS, gpu_metrics
from rankscope.daemon.export.rank_metrics import RANKS, RankReport, rank_metrics
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.network.collector import NetworkStatus
from rankscope.daemon.network.ports import CONGESTION, ERRORS, LINKS, RETRANSMITS, PortReading, TcpReading
from rankscope.daemon.profiles.push import LOSSES, PushStatus
from rankscope.daemon.profiles.pyroscope import FAILURES
from rankscope.daemon.profiles.store import StoreStatus

FULL: Final = "full"  # metrics_detail
# Errors, and retransmits after packet loss. The other counters explain these.
STANDARD_ERRORS = ("symbol", "link_down", "receive", "discard")
STANDARD_RETRANSMITS = ("packet_sequence", "ack_timeout")


@dataclass(frozen=True)
class DaemonStatus:
    version: str
    node: str
    collectors: Mapping[str, CollectorStatus] = field(default_factory=dict)
    own_cpu_seconds: float = 0.0
    sampling_cpu_seconds: float = 0.0
    scrape_cpu_seconds: float = 0.0
    stuck_samplers: int = 0
    resident_bytes: int | None = None
    budget_used_ratio: float | None = None
    stack_rate_hertz: float = 0.0
    stack_recorded_ratio: float | None = None
    ranks: int = 0
    ranks_cut: Mapping[str, int] = field(default_factory=dict)
    rank_conflicts: int = 0
    discovery_problems: int = 0
    windows_total: int = 0
    windows_skipped_total: int = 0
    watch_readers: int = 0
    watch_dropped_total: int = 0
    captures: CaptureStatus | None = None
    profiles: StoreStatus | None = None  # None while they are off
    gpu: GpuStatus | None = None
    network: NetworkStatus | None = None
    profile_push: PushStatus | None = None  # None: profiles are not pushed
    metrics_detail: str = FULL


@dataclass(frozen=True)
class Snapshot:
    """What one scrape shows. Replaced as a whole at each tick, so that a scrape never sees half a window."""

    daemon: DaemonStatus
    ranks: tuple[RankReport, ...] = ()


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


def _rate_text(port: PortReading) -> str:
    return "" if port.rate_bits_per_second is None else f"{port.rate_bits_per_second / 1e9:g} Gb/s"


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
        "CPU use over the last seconds as a ratio of the budget; above 1, stacks are recorded less. What a recording "
        "costs above 0.25 s is spread over five minutes.",
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
        lambda c: {tuple(run_labels(job).values()): ratio for job, ratio in c.slowdowns.items()},
        {"run_namespace": ANY, "run": ANY}),
    Gauge("rankscope_capture_clients", "Processes whose libkineto polls this daemon.", lambda c: c.clients),
    Counter("rankscope_capture_datagrams_refused_total", "Datagrams that were not answered, by reason.",
        lambda c: {"malformed": c.malformed_total, "unvouched": c.unvouched_total},
        {"reason": ("malformed", "unvouched")}),
    Counter("rankscope_capture_datagrams_unanswered_total",
        "Polls in order that got no answer, and are made again: late (it would have come too late), skipped (the first "
        "on a new socket, or to set a client right), unsent (the client was gone, or its queue full).",
        lambda c: c.unanswered, {"reason": ("late", "skipped", "unsent")}),
    Counter("rankscope_duty_cycle_captures_total", "Captures of the duty cycle, by result.",
        lambda c: c.duty_results, {"result": (DONE, FAILED, SKIPPED)}),
    Counter("rankscope_duty_cycle_skipped_total", "Captures of the duty cycle that were skipped, by reason.",
        lambda c: c.duty_skips, {"reason": REASONS}),
))

PROFILES: Section[StoreStatus] = Section((), (
    Counter("rankscope_profile_samples_total",
        "Stack samples: stored in profiles, or lost (a full or slow disk, a damaged file, too many distinct stacks).",
        lambda p: {"stored": p.samples_stored, "lost": p.samples_lost}, {"result": ("stored", "lost")}),
    Gauge("rankscope_profile_store_bytes", "Disk space in use by profiles.", lambda p: p.size_bytes),
))

PROFILE_PUSH: Section[PushStatus] = Section((), (
    Counter("rankscope_profile_push_profiles_total",
        "Profiles (a rank's minute each) that the server of profiles accepted.", lambda p: p.pushed_total),
    Counter("rankscope_profile_push_lost_total",
        "Profiles that were not delivered: refused by the server, expired in the queue, no room in it, or invalid.",
        lambda p: dict.fromkeys(LOSSES, 0) | dict(p.lost), {"reason": LOSSES}),
    Counter("rankscope_profile_push_failures_total",
        "Requests that failed: connection (with TLS), throttled (429), server (5xx), refused (3xx, 4xx), files (the "
        "token or the authority cannot be read). All but refused ones are made again.",
        lambda p: dict.fromkeys(FAILURES, 0) | dict(p.failures), {"reason": FAILURES}),
    Gauge("rankscope_profile_push_queued_bytes", "Profiles that wait to be sent.", lambda p: p.queued_bytes),
))
PORTS: Section[PortReading] = Section(("device", "port", "node"), (
    Gauge("rankscope_network_info", "A network port of the node, with the kind and the rate of its link; value 1.",
        lambda port: {(port.link, _rate_text(port)): 1}, {"link": LINKS, "rate": ANY}),
    Gauge("rankscope_network_link_up", "1 if the link is up.", lambda port: port.is_up),
    Gauge("rankscope_network_rate_bytes_per_second", "Rate of the link at present, in each direction.",
        lambda port: None if port.rate_bits_per_second is None else port.rate_bits_per_second / 8),
    Counter("rankscope_network_bytes_total", "Bytes since the driver was loaded.",
        lambda port: {"transmit": port.transmitted_bytes, "receive": port.received_bytes},
        {"direction": ("transmit", "receive")}),
    Counter("rankscope_network_errors_total", "Errors of the port and its link since the driver was loaded, by kind.",
        lambda port: {kind: port.events.get(kind) for kind in ERRORS}, {"kind": tuple(ERRORS)},
        standard=STANDARD_ERRORS),
    Counter("rankscope_network_retransmits_total",
        "RDMA packets that were lost, late or sent again, since the driver was loaded, by kind.",
        lambda port: {kind: port.events.get(kind) for kind in RETRANSMITS}, {"kind": tuple(RETRANSMITS)},
        standard=STANDARD_RETRANSMITS),
    Counter("rankscope_network_congestion_notices_total",
        "Congestion notices (CNP) of RoCE, sent and handled, since the driver was loaded.",
        lambda port: {kind: port.events.get(kind) for kind in CONGESTION}, {"kind": tuple(CONGESTION)},
        standard=FULL_ONLY),
))

TCP: Section[TcpReading] = Section(("node",), (
    Counter("rankscope_network_tcp_segments_total", "TCP segments that the node sent, in its own network namespace.",
        lambda tcp: tcp.segments),
    Counter("rankscope_network_tcp_retransmits_total", "TCP segments that the node has sent again, in the same.",
        lambda tcp: tcp.retransmits),
))
# fmt: on

TABLE = (DAEMON, CAPTURES, PROFILES, PROFILE_PUSH, GPU_SOURCES, GPUS, LIVE_GPUS, PORTS, TCP, RANKS)


class Exporter(Collector):
    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        snapshot = self._snapshot()
        daemon = snapshot.daemon
        full = daemon.metrics_detail == FULL
        yield from DAEMON.of(daemon)
        yield from CAPTURES.of(daemon.captures)
        yield from PROFILES.of(daemon.profiles)
        yield from PROFILE_PUSH.of(daemon.profile_push)
        if daemon.gpu is not None:
            yield from gpu_metrics(daemon.gpu, daemon.node, full)
        if daemon.network is not None:
            yield from _network_metrics(daemon.network, daemon.node, full)
        yield from rank_metrics(snapshot.ranks, full)

    def describe(self) -> Iterable[Family]:
        # Registering must not scrape: the daemon has no snapshot before its first tick.
        return ()


def _network_metrics(status: NetworkStatus, node: str, full: bool) -> Iterator[Family]:
    ports = (((port.device, str(port.port), node), port) for port in status.ports)
    yield from PORTS.families(ports, full=full)
    yield from TCP.families([] if status.tcp is None else [((node,), status.tcp)], full=full)
