"""The daemon: closes windows one after the other, publishes and exports them, and keeps within its CPU budget."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from prometheus_client.registry import Collector

from rankscope.analysis.models.device_peaks import peak_flops_per_second
from rankscope.daemon.captures.flight_recorder import read_tails
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.service import NodeCaptures
from rankscope.daemon.collector import ProblemLog, describe
from rankscope.daemon.config import NONE, Config, parse_address
from rankscope.daemon.export.metrics import (
    DaemonStatus,
    Exporter,
    Snapshot,
    package_version,
    process_cpu_seconds,
    resident_bytes,
)
from rankscope.daemon.export.rank_metrics import RankReport, RankTotals, add_window
from rankscope.daemon.profiles.push import ProfilePusher, profile_pusher
from rankscope.daemon.profiles.service import ProfileServicer, profile_service
from rankscope.daemon.profiles.store import ProfileStore
from rankscope.daemon.recordings.service import RecordingServicer, recording_service
from rankscope.daemon.sampler import Clock, Collectors, Sampled, Sampler, Ticker, real_collectors
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span
from rankscope.daemon.server.certificates import metrics_tls
from rankscope.daemon.server.grpc_server import GrpcServer, Service, no_capture_service, rank_service
from rankscope.daemon.server.http_server import MetricsServer
from rankscope.daemon.server.policies import PolicyBoard, policy_service
from rankscope.daemon.server.sockets import SocketLock
from rankscope.daemon.stacks.sampling_budget import Budget
from rankscope.daemon.windows.broadcast import Publisher, Tick
from rankscope.daemon.windows.stalls import PaceWatch, StallWatch
from rankscope.daemon.windows.window import RankSamples, assemble, identity_of
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0
GRPC_GRACE_SECONDS = 0.3
CONFLICTS_LOGGED = 32
ARRIVALS_LOGGED = 64  # of a window


@dataclass(frozen=True)
class Addresses:
    """Where the daemon listens; what is turned off is None or missing."""

    metrics_url: str | None
    grpc_targets: tuple[str, ...]  # for grpc.insecure_channel, the Unix socket first

    def __str__(self) -> str:
        parts = [f"metrics {self.metrics_url or 'off'}", *(f"grpc {target}" for target in self.grpc_targets)]
        return ", ".join(parts)


@dataclass
class _Incarnation:
    rank: RankProcess
    sequence: int = 0
    totals: RankTotals = field(default_factory=RankTotals)


class Daemon:
    """`start` listens and starts the thread that watches; `stop` ends both within two seconds.

    To embed it: pass `services` for the same gRPC server and `metrics` for the same page, `subscribe` to every tick,
    and pass `own_cpu_seconds=time.thread_time` if the process also does work that is not charged to the budget."""

    def __init__(
        self,
        config: Config,
        *,
        collectors: Collectors | None = None,
        clock: Clock | None = None,
        services: Sequence[Service] = (),
        metrics: Sequence[Collector] = (),
        own_cpu_seconds: Callable[[], float] | None = None,
    ) -> None:
        self.config = config
        self.publisher = Publisher(config.watch_readers)
        self._clock = clock or Clock()
        self.policies = PolicyBoard(config.stack_rate_hertz, self._clock.monotonic_seconds)
        self._collectors = collectors or real_collectors(config, self.policies.run_of_pod)
        self._sampler = Sampler(self._collectors, self._clock)
        self._stalls = StallWatch(self._collectors.stacks.dump_all)
        self._paces = PaceWatch()
        self._budget = Budget(config.budget_ratio, config.stack_rate_hertz)
        self._ticker = Ticker(self._clock, config.window_seconds)
        self._own_cpu_seconds = own_cpu_seconds or self._process_cpu_seconds
        self._services = (rank_service(config.node, self.publisher), policy_service(self.policies), *services)
        self._more_metrics = tuple(metrics)
        self.captures: NodeCaptures | None = None  # once started, if captures are on and possible
        self.profiles: ProfileStore | None = None  # once started, if they are kept
        self._profile_push: ProfilePusher | None = None
        self._ranks: tuple[RankProcess, ...] = ()
        self._problems = ProblemLog(log, self._clock.monotonic_seconds)
        self._incarnations: dict[RankKey, _Incarnation] = {}
        self._status = DaemonStatus(
            package_version(),
            config.node,
            stack_rate_hertz=self._budget.recording_hertz,
            metrics_detail=config.metrics_detail,
        )
        self._reports: tuple[RankReport, ...] = ()
        self._windows_total = 0
        self._ticked_at = self._clock.monotonic_seconds()
        self._thread: threading.Thread | None = None
        self._socket_lock: SocketLock | None = None
        self._metrics: MetricsServer | None = None
        self._grpc: GrpcServer | None = None

    @property
    def addresses(self) -> Addresses:
        return Addresses(
            metrics_url=None if self._metrics is None else self._metrics.url,
            grpc_targets=() if self._grpc is None else self._grpc.targets,
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(self._status, self._reports)

    def start(self) -> None:
        """Raises ListenError, and then holds nothing, if an address is in use."""
        try:
            self._listen()
        except BaseException:
            self._close()
            raise
        if self.captures is not None:
            self.captures.start()
        for collector in self._collectors.registered:
            collector.start()
        self._collectors.stacks.set_rate(self._budget.rate_hertz)
        self._ticked_at = self._clock.monotonic_seconds()
        self._thread = threading.Thread(target=self._run, name="rankscope-daemon", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._clock.stop()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
            self._thread = None
        self._close()

    def tick(self, span: Span) -> Tick:
        """Close one window: sample, assemble, publish. Once started, only the daemon's own thread calls it."""
        sampled = self._sampler.sample(span)
        self._ranks = sampled.ranks
        departed = self._note_arrivals_and_departures(sampled)
        windows: dict[RankKey, RankWindow] = {}
        reports: list[RankReport] = []
        for rank in sampled.ranks:
            samples = sampled.samples[rank.key]
            window = self._assemble(self._incarnations[rank.key], samples, span)
            windows[rank.key] = window
            shown = window if self.captures is None else self.captures.shown(rank.key, window)
            reports.append(RankReport(shown, self._incarnations[rank.key].totals, samples.problems))
        self._stalls.fetch_stacks(self._clock.monotonic_seconds())
        self._stalls.keep_only(windows.keys())
        self._windows_total += len(windows)
        self._keep_within_budget(sampled.ranks, windows.values())
        for job in self._paces.slower_jobs(windows):
            self._collectors.stacks.hurry(job, self._clock.monotonic_seconds())
        if self.captures is not None:
            self.captures.observe(sampled.ranks, windows)
        step_seconds = {key: each.steps.step_seconds for key, each in sampled.samples.items() if each.steps is not None}
        tick = Tick(span, windows, departed, step_seconds)
        self._reports = tuple(reports)
        self._status = self._describe(sampled)
        self._log_problems(sampled)
        self.publisher.publish(tick)
        return tick

    def _listen(self) -> None:
        address = parse_address(self.config.metrics_listen, "metrics_listen")
        if self.config.socket != NONE:
            self._socket_lock = SocketLock(Path(self.config.socket))
        if address is not None:
            collectors = (Exporter(self.snapshot), *self._more_metrics)
            tls = metrics_tls(self.config)
            self._metrics = MetricsServer(*address, collectors, self._is_alive, tls, lambda: self._status)
        self.captures = _open_captures(self.config, self.policies)
        capturing = no_capture_service() if self.captures is None else self.captures.service
        if self.config.profile_dir != NONE:
            self._profile_push = profile_pusher(self.config)
            self.profiles = ProfileStore.from_config(self.config, self._profile_push)
            self._collectors.stacks.keep_recordings(self.profiles.record)
        if self._socket_lock is not None or self.config.grpc_listen != NONE:
            dump = self._collectors.stacks.dump_all
            tails = partial(read_tails, proc_root=Path(self.config.proc_root))
            profiling = ProfileServicer(self.config.node, self.profiles, lambda: self._ranks, dump, tails)
            recording = RecordingServicer(self.config.node, lambda: self._ranks, Path(self.config.proc_root))
            services = (*self._services, capturing, profile_service(profiling), recording_service(recording))
            self._grpc = GrpcServer(services, self._socket_lock, self.config)

    def _close(self) -> None:
        steps: list[Callable[[], None]] = [self.publisher.close]
        if self._grpc is not None:
            steps.append(partial(self._grpc.close, GRPC_GRACE_SECONDS))
        if self._metrics is not None:
            steps.append(self._metrics.close)
        if self.captures is not None:
            steps.append(self.captures.stop)
        steps.extend(collector.close for collector in self._collectors.registered)
        if self.profiles is not None:
            steps.append(self.profiles.close)
        if self._profile_push is not None:
            steps.append(self._profile_push.close)  # after the store, which hands it the last intervals
        if self._socket_lock is not None:
            steps.append(self._socket_lock.release)
        self._grpc = self._metrics = self._socket_lock = None
        for step in steps:
            try:
                step()
            except Exception:  # if one fails to close, the rest must still be closed, above all the sockets
                log.exception("could not close everything")

    def _run(self) -> None:
        while (span := self._ticker.next_span(self._sampler.poll)) is not None:
            try:
                self.tick(span)
            except Exception as error:
                self._problems.warn(("tick", type(error)), f"a window was lost: {describe(error)}; please report this")
                log.debug("the lost window", exc_info=True)
            self._ticked_at = self._clock.monotonic_seconds()

    def _process_cpu_seconds(self) -> float:
        """Without scrapes: a caller that scrapes too often must not lower the stack rate."""
        return process_cpu_seconds() - self._scrape_cpu_seconds()

    def _scrape_cpu_seconds(self) -> float:
        return 0.0 if self._metrics is None else self._metrics.cpu_seconds

    def _is_alive(self) -> bool:
        return self._clock.monotonic_seconds() - self._ticked_at < 5.0 + 3 * self.config.window_seconds

    def _note_arrivals_and_departures(self, sampled: Sampled) -> tuple[RankIdentity, ...]:
        present = {rank.key: rank for rank in sampled.ranks}
        gone = [self._incarnations.pop(key) for key in self._incarnations.keys() - present.keys()]
        arrived = {key: _Incarnation(rank) for key, rank in present.items() if key not in self._incarnations}
        self._incarnations |= arrived
        for key, rank in present.items():
            self._incarnations[key].rank = rank  # with another attempt, perhaps
        for what, incarnations in (("ended", gone), ("found", [*arrived.values()])):
            for rank in (each.rank for each in incarnations[:ARRIVALS_LOGGED]):
                log.info("rank %d of job %s (pid %d) %s", rank.rank, _quoted(rank), rank.pid, what)
            if len(incarnations) > ARRIVALS_LOGGED:
                log.info("%d more ranks %s", len(incarnations) - ARRIVALS_LOGGED, what)
        return tuple(identity_of(ended.rank, self.config.node) for ended in gone)

    def _assemble(self, incarnation: _Incarnation, samples: RankSamples, span: Span) -> RankWindow:
        rank, node = incarnation.rank, self.config.node
        incarnation.sequence += 1
        try:
            stall = self._stalls.observe(rank, samples, span)
            window = assemble(rank, node, span, incarnation.sequence, samples, peak_flops_per_second, stall)
        except Exception as error:  # noqa: BLE001 - a rank controls its numbers; only its window is lost
            problem = Problem("daemon", "assembly", f"{rank}: {describe(error)}")
            samples = RankSamples(problems=(problem, *samples.problems))
            window = assemble(rank, node, span, incarnation.sequence, samples, peak_flops_per_second)
        if self.captures is not None:
            self.captures.fill(rank.key, window)
        incarnation.totals = add_window(incarnation.totals, window)
        return window

    def _keep_within_budget(self, ranks: Sequence[RankProcess], windows: Iterable[RankWindow]) -> None:
        before, plan_before = self._budget.rate_hertz, self._budget.plan
        threads = [window.process.threads for window in windows if window.process.HasField("threads")]
        rate_hertz = self._budget.observe(
            self._clock.monotonic_seconds(),
            self._own_cpu_seconds(),
            self._collectors.stacks.charged_cpu_seconds,
            len(ranks),
            median(threads) if threads else 1.0,
        )
        if rate_hertz != before:
            used = 100 * (self._budget.used_ratio or 0.0)
            plans = [plan or "no stacks" for plan in (self._budget.plan, plan_before)]
            log.info("%.0f%% of the CPU budget used: %s instead of %s", used, *plans)
            self._collectors.stacks.set_rate(rate_hertz)
        self._collectors.stacks.set_rates_of(self.policies.stack_rates(ranks, rate_hertz))

    def _describe(self, sampled: Sampled) -> DaemonStatus:
        return DaemonStatus(
            version=self._status.version,
            node=self.config.node,
            collectors=sampled.collectors,
            own_cpu_seconds=self._own_cpu_seconds(),
            sampling_cpu_seconds=self._collectors.stacks.child_cpu_seconds,
            scrape_cpu_seconds=self._scrape_cpu_seconds(),
            stuck_samplers=self._collectors.stacks.stuck,
            resident_bytes=resident_bytes(),
            budget_used_ratio=self._budget.used_ratio,
            stack_rate_hertz=self._budget.recording_hertz,
            stack_recorded_ratio=self._collectors.stacks.recorded_ratio,
            ranks=len(sampled.ranks) + sum(sampled.ranks_cut.values()),
            ranks_cut=sampled.ranks_cut,
            rank_conflicts=len(sampled.conflicts),
            discovery_problems=len(sampled.discovery_problems),
            windows_total=self._windows_total,
            windows_skipped_total=self._ticker.skipped_total,
            watch_readers=self.publisher.readers,
            watch_dropped_total=self.publisher.dropped_total,
            captures=None if self.captures is None else self.captures.status,
            profiles=None if self.profiles is None else self.profiles.status(),
            profile_push=None if self._profile_push is None else self._profile_push.status(),
            gpu=None if self._collectors.gpu is None else self._collectors.gpu.status,
            network=None if self._collectors.network is None else self._collectors.network.status,
            metrics_detail=self.config.metrics_detail,
        )

    def _log_problems(self, sampled: Sampled) -> None:
        for name, failure in sampled.failures.items():
            self._problems.warn(("collector", name), f"{name} failed: {failure}")
        for conflict in sampled.conflicts[:CONFLICTS_LOGGED]:
            self._problems.warn(conflict, conflict.text, conflict.owner)
        for problem in sampled.discovery_problems:
            text = f"discovery: {problem.text}"
            self._problems.warn(("discovery", problem.kind, problem.text), text, f"discovery ({problem.kind})")
        for status in (self._status.profiles, self._status.profile_push):
            if status is not None and status.problem is not None:
                self._problems.warn((status.problem.source, status.problem.kind), status.problem.text)
        for rank in sampled.ranks:
            for problem in sampled.samples[rank.key].problems:
                if problem.source not in sampled.failures:
                    key = (rank.key, problem.source, problem.kind)
                    self._problems.warn(key, f"job {_quoted(rank)}: {problem.source}: {problem.text}", rank.owner)


def _open_captures(config: Config, policies: PolicyBoard) -> NodeCaptures | None:
    """None if captures are turned off or cannot be stored: the rest works without them."""
    try:
        is_on = config.captures and config.capture_dir != NONE
        return NodeCaptures(config, policies.duty_cycle_of_policy) if is_on else None
    except CaptureError as error:
        log.warning("no captures: %s", error)
        return None


def _quoted(rank: RankProcess) -> str:
    return repr(rank.job[:128])
