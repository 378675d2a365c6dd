"""The capture service of the daemon: receives the current ranks and windows, and serves CaptureService over gRPC."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc

from rankscope.analysis.traces.joins.comparison import LiveSteps
from rankscope.daemon.captures.duty_cycle import DutyCaptures, DutyCycle, DutySettings
from rankscope.daemon.captures.kineto.backend import KinetoBackend
from rankscope.daemon.captures.kineto.endpoint import Endpoint
from rankscope.daemon.captures.kineto.sockets import network_namespace
from rankscope.daemon.captures.orders import Backend, BadRequestError, CaptureError, UnknownError, tenant_of
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.captures.processing.delivery import LocalArchive
from rankscope.daemon.captures.records import FINAL, CaptureAudit
from rankscope.daemon.captures.request import SuspectsOf, VerdictOf
from rankscope.daemon.captures.runner import CaptureRunner
from rankscope.daemon.captures.stack_backend import StacksBackend
from rankscope.daemon.captures.store import Quota, Store
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.daemon.server.grpc_server import MAX_DOWNLOADS, Service, abort
from rankscope.daemon.server.policies import PolicyDutyCycle
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import capture_service_pb2_grpc
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, RankWindow

CHUNK_BYTES = 256 * 1024
MAX_WINDOWS = 60
log = logging.getLogger(__name__)
# Between the last rank's poll and the start: libkineto refuses a start that is too near.
START_MARGIN_SECONDS = 1.5
# How often expired captures are removed.
SWEEP_SECONDS = 3600.0


# CaptureService: captures of the runner, and artifacts in chunks.


@dataclass(eq=False)
class _Download:
    end: Callable[[], object]
    started_seconds: float
    read_bytes: int = 0

    def bytes_per_second(self, now_seconds: float) -> float:
        return self.read_bytes / (now_seconds - self.started_seconds + 1.0)


class Downloads:
    """Each keeps a thread of the server for as long as its caller reads. If there are too many, the slowest gives way:
    its caller can resume it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[_Download] = []  # oldest first

    @contextmanager
    def started(self, end: Callable[[], object]) -> Iterator[_Download]:
        now = time.monotonic()
        download, slowest = _Download(end, now), None
        with self._lock:
            if len(self._running) >= MAX_DOWNLOADS:
                slowest = min(self._running, key=lambda running: running.bytes_per_second(now))
                self._running.remove(slowest)
            self._running.append(download)
        if slowest is not None:
            log.debug("%d downloads at once: the slowest gives way to a new one", MAX_DOWNLOADS)
            slowest.end()
        try:
            yield download
        finally:
            with self._lock:
                if download in self._running:
                    self._running.remove(download)


_CODES = {BadRequestError: grpc.StatusCode.INVALID_ARGUMENT, UnknownError: grpc.StatusCode.NOT_FOUND}


class CaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    def __init__(self, runner: CaptureRunner, store: Store) -> None:
        self._runner = runner
        self._store = store
        self._downloads = Downloads()

    def StartCapture(
        self, request: pb.StartCaptureRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StartCaptureResponse]:
        """The capture continues when the caller disconnects; GetCapture returns how it ended."""
        try:
            capture_id = self._runner.start(request, requested_by=context.peer())
        except CaptureError as error:
            self._runner.audit.refused(context.peer(), request, str(error))
            abort(context, _CODES.get(type(error), grpc.StatusCode.FAILED_PRECONDITION), str(error))
        for capture in self._runner.records.follow(capture_id, context.is_active):
            yield pb.StartCaptureResponse(capture=capture)

    def GetCapture(self, request: pb.GetCaptureRequest, context: grpc.ServicerContext) -> pb.GetCaptureResponse:
        capture = self._runner.records.get(request.id)
        if capture is None:
            abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.GetCaptureResponse(capture=capture)

    def ListCaptures(self, request: pb.ListCapturesRequest, context: grpc.ServicerContext) -> pb.ListCapturesResponse:
        return pb.ListCapturesResponse(captures=self._runner.records.all(request.job))

    def CancelCapture(
        self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext
    ) -> pb.CancelCaptureResponse:
        capture = self._runner.cancel(request.id)
        if capture is None:
            abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.CancelCaptureResponse(capture=capture)

    def DeleteCapture(
        self, request: pb.DeleteCaptureRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCaptureResponse:
        capture = self._runner.records.get(request.id)
        if capture is None:
            abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        if capture.state not in FINAL:
            abort(context, grpc.StatusCode.UNAVAILABLE, f"capture {request.id} is under way; cancel it first")
        self._runner.records.forget(request.id)
        self._store.remove(request.id)
        return pb.DeleteCaptureResponse()

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        """Resumable: `offset` is how much the caller already has."""
        try:
            artifact, size = self._store.open(request.id, request.rank, request.window)
        except CaptureError as error:
            abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        with artifact, self._downloads.started(context.cancel) as download:
            if request.offset > size:
                reason = f"offset {request.offset} lies behind the end of the artifact ({size} bytes)"
                abort(context, grpc.StatusCode.OUT_OF_RANGE, reason)
            artifact.seek(request.offset)
            chunk = artifact.read(CHUNK_BYTES)
            while True:
                yield pb.DownloadArtifactResponse(chunk=chunk, total_bytes=size)
                download.read_bytes += len(chunk)
                chunk = artifact.read(CHUNK_BYTES)
                if not chunk or not context.is_active():
                    return


def _unknown(capture_id: str) -> str:
    return f"no capture {capture_id[:64]!r} on this node; `rankscope captures ls` lists them"


# Recent step times of ranks, from closed windows: captures are planned and judged by them.


class RecentSteps:
    """Written by the daemon's thread, read by captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[RankKey, deque[tuple[float, float, int, float]]] = {}
        self._stalled_seconds: dict[RankKey, float] = {}
        self._latest: dict[RankKey, LiveSteps] = {}

    def add(self, windows: Mapping[RankKey, RankWindow]) -> None:
        with self._lock:
            for key in self._windows.keys() - windows.keys():
                del self._windows[key]
                self._latest.pop(key, None)
            self._stalled_seconds = {
                key: window.stall.seconds_since_step for key, window in windows.items() if window.HasField("stall")
            }
            for key, window in windows.items():
                if window.sources.get("steps") == SOURCE_CAPTURE:
                    continue  # steps slowed by recording, reported late
                if window.HasField("steps") and window.steps and window.HasField("step_seconds"):
                    start, end = window.start_unix_nanos / 1e9, window.end_unix_nanos / 1e9
                    kept = self._windows.setdefault(key, deque(maxlen=MAX_WINDOWS))
                    kept.append((start, end, window.steps, window.step_seconds.mean))
                    own = window.self_seconds if window.HasField("self_seconds") else None
                    figures = () if own is None else (own.mean, own.p10, own.p90)
                    self._latest[key] = LiveSteps(window.step_seconds.mean, *figures)

    def latest(self, rank: RankProcess) -> LiveSteps | None:
        """The steps of its latest window that has some; None if there is none."""
        with self._lock:
            return self._latest.get(rank.key)

    def stalled_seconds(self, rank: RankProcess) -> float | None:
        """Since the rank's last step; None while it makes steps, or may."""
        with self._lock:
            return self._stalled_seconds.get(rank.key)

    def __call__(self, rank: RankProcess, start_unix_seconds: float, end_unix_seconds: float) -> float | None:
        """Mean step time over the windows that lie mostly in an interval; None if the rank's steps were not seen in
        it."""
        with self._lock:
            windows = list(self._windows.get(rank.key, ()))
        found = [
            (steps, seconds)
            for start, end, steps, seconds in windows
            if start_unix_seconds <= (start + end) / 2 <= end_unix_seconds
        ]
        total = sum(steps for steps, _ in found)
        return sum(steps * seconds for steps, seconds in found) / total if total else None


@dataclass(frozen=True)
class CaptureStatus:
    """Counts for the exporter."""

    results: dict[str, int] = field(default_factory=dict)
    slowdowns: dict[str, float] = field(default_factory=dict)
    clients: int = 0
    malformed_total: int = 0
    unvouched_total: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)
    duty_results: dict[str, int] | None = None  # None while the duty cycle is off
    duty_skips: dict[str, int] | None = None


class NodeCaptures:
    """Raises CaptureError if captures cannot be stored in the configured directory. `policy_of` returns the duty
    cycle that a policy sets for the ranks of a job, or None."""

    def __init__(
        self,
        config: Config,
        policy_of: Callable[[Sequence[RankProcess]], PolicyDutyCycle | None] = lambda ranks: None,
    ) -> None:
        proc_root = Path(config.proc_root)
        self._proc_root = proc_root
        self._ranks: Sequence[RankProcess] = ()
        self._steps = RecentSteps()
        self._sweep_at = time.monotonic() + SWEEP_SECONDS
        audit = CaptureAudit(config.node, has_tls=config.tls_certificate != NONE)
        quota = Quota(config.capture_quota_bytes, config.capture_quota_seconds)
        self._store = Store(Path(config.capture_dir), quota, on_lost=audit.ended)
        socket_dir = None if config.kineto_socket_dir == NONE else config.kineto_socket_dir
        self._endpoint = Endpoint(socket_directory=socket_dir, proc_root=proc_root)
        self._kineto = kineto = KinetoBackend(self._endpoint, proc_root)
        self._tenants: dict[RankKey, str] = {}
        self._met: set[RankKey] = set()  # ranks already searched for leftovers of an earlier daemon
        # In order of preference.
        probe = ProbeBackend(proc_root)
        backends: list[Backend] = [kineto, probe, StacksBackend(config.py_spy or None, proc_root)]
        upload_url = "" if config.capture_upload_url == NONE else config.capture_upload_url
        self._runner = CaptureRunner(
            config.node,
            backends,
            LocalArchive(self._store, config.node, upload_url, proc_root),
            lambda: self._ranks,
            earliest_start=partial(_earliest_start, kineto),
            step_seconds=self._steps,
            stalled_seconds=self._steps.stalled_seconds,
            live_steps=self._steps.latest,
            audit=audit,
            tenant_of=partial(tenant_of, proc_root=proc_root),
        )
        self._earlier = self._runner.records.all()
        settings = DutySettings(config.duty_cycle_steps, config.duty_cycle_seconds, config.duty_cycle_budget_ratio)
        captures = DutyCaptures(self._runner, self._store, kineto, probe, self._endpoint, proc_root)

        def duty_settings_of(ranks: Sequence[RankProcess]) -> DutySettings:
            policy = policy_of(ranks)
            return (
                settings
                if policy is None
                else replace(settings, steps=policy.steps, period_seconds=policy.period_seconds)
            )

        self._duty = DutyCycle(settings, captures, config.window_seconds, settings_of=duty_settings_of)

    @property
    def service(self) -> Service:
        servicer = CaptureServicer(self._runner, self._store)
        return Service.of("CaptureService", capture_service_pb2_grpc.add_CaptureServiceServicer_to_server, servicer)

    def correlate(self, suspects_of: SuspectsOf, verdict_of: VerdictOf) -> None:
        """Which ranks are slow, and the verdict: answered by the correlation."""
        self._runner.suspects_of, self._runner.verdict_of = suspects_of, verdict_of

    def start(self) -> None:
        self._endpoint.start()

    def stop(self) -> None:
        self._runner.close()
        self._endpoint.stop()
        self._store.close()

    def fill(self, key: RankKey, window: RankWindow) -> None:
        """Add the duty cycle's results to a window before it is counted and published."""
        self._duty.fill(key, window)

    def shown(self, key: RankKey, window: RankWindow) -> RankWindow:
        """The window as /metrics shows it."""
        return self._duty.shown(key, window)

    def observe(self, ranks: Sequence[RankProcess], windows: Mapping[RankKey, RankWindow]) -> None:
        """Called after every tick, in the daemon's thread: must be quick."""
        self._ranks = ranks
        strangers = [rank for rank in ranks if rank.key not in self._met]
        if strangers:
            self._met = {rank.key for rank in ranks}
            self._tenants = {key: tenant for key, tenant in self._tenants.items() if key in self._met}
            self._kineto.remove_leftovers(self._earlier, strangers)
        self._steps.add(windows)
        self._watch([rank for rank in ranks if "KINETO_USE_DAEMON" in rank.environment])
        self._duty.observe(ranks, windows)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
            self._store.sweep()

    def _watch(self, ranks: Sequence[RankProcess]) -> None:
        pids: dict[int, int] = {}
        tenants: dict[int, set[str]] = {}
        for rank in ranks:
            try:
                namespace = network_namespace(rank.pid, self._proc_root)
            except OSError:
                continue  # it has just ended
            pids.setdefault(namespace, rank.pid)
            tenants.setdefault(namespace, set()).add(self._tenant_of(rank))
        # A namespace that several share counts for the one that has the fewest.
        counts = Counter(tenant for several in tenants.values() for tenant in several)
        self._endpoint.watch(
            pids, {key: min(several, key=lambda one: (counts[one], one)) for key, several in tenants.items()}
        )

    def _tenant_of(self, rank: RankProcess) -> str:
        if rank.key not in self._tenants:
            self._tenants[rank.key] = tenant_of(rank, self._proc_root)
        return self._tenants[rank.key]

    @property
    def status(self) -> CaptureStatus:
        tallies = self._endpoint.tallies
        return CaptureStatus(
            results=self._runner.tally.results,
            slowdowns=self._runner.tally.slowdowns,
            clients=self._endpoint.client_count(),
            malformed_total=tallies["malformed"],
            unvouched_total=tallies["unvouched"],
            unanswered={reason: tallies[reason] for reason in ("late", "skipped", "unsent")},
            duty_results=self._duty.results if self._duty.was_ever_on else None,
            duty_skips=self._duty.skips if self._duty.was_ever_on else None,
        )


def _earliest_start(kineto: KinetoBackend, ranks: Sequence[RankProcess], now_unix_seconds: float) -> float:
    """The earliest time at which all ranks can start: libkineto's after their next poll."""
    polling = [rank for rank in ranks if kineto.objection(rank) is None]
    earliest = now_unix_seconds + START_MARGIN_SECONDS
    if not polling:
        return earliest
    return kineto.common_start(polling, earliest + max(map(kineto.poll_seconds, polling)))
