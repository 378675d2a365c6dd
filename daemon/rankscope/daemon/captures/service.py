"""The capture service of the daemon: receives the current ranks and windows, and serves CaptureService over gRPC."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

import grpc

from rankscope.daemon.captures.audit import CaptureAudit
from rankscope.daemon.captures.cupti import slowdown_objection
from rankscope.daemon.captures.duty_cycle import PROFILER, SLOWDOWN, UNABLE, DutyCycle, DutySettings
from rankscope.daemon.captures.kineto.backend import KinetoBackend
from rankscope.daemon.captures.kineto.endpoint import Endpoint
from rankscope.daemon.captures.kineto.sockets import network_namespace
from rankscope.daemon.captures.orders import Backend, CaptureError, Options
from rankscope.daemon.captures.probe.backend import ProbeBackend
from rankscope.daemon.captures.processing.delivery import LocalArchive
from rankscope.daemon.captures.records import DUTY_CYCLE, FINAL
from rankscope.daemon.captures.request import SuspectsOf
from rankscope.daemon.captures.runner import CaptureRunner
from rankscope.daemon.captures.stack_backend import StacksBackend
from rankscope.daemon.captures.store import Quota, Store
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.daemon.server.grpc_server import DOWNLOADS_LIMIT, Service
from rankscope.daemon.server.policies import DutyWish
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import capture_service_pb2_grpc
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, RankWindow

CHUNK_BYTES = 256 * 1024
WINDOWS_KEPT = 60
log = logging.getLogger(__name__)
# Between the last rank's poll and the start: libkineto refuses a start that is too near.
START_MARGIN_SECONDS = 1.5
# How often expired captures are removed.
SWEEP_SECONDS = 3600.0


# CaptureService: captures of the runner, and artifacts in chunks.


class Artifacts(Protocol):
    def open(self, capture_id: str, rank: int, window: int = 0) -> tuple[BinaryIO, int]:
        """The artifact and its size. Raises CaptureError if there is none."""
        ...

    def remove(self, capture_id: str) -> None: ...


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

    def __init__(self, limit: int = DOWNLOADS_LIMIT, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._running: list[_Download] = []  # oldest first

    @contextmanager
    def started(self, end: Callable[[], object]) -> Iterator[_Download]:
        now = self._monotonic()
        download, slowest = _Download(end, now), None
        with self._lock:
            if len(self._running) >= self._limit:
                slowest = min(self._running, key=lambda running: running.bytes_per_second(now))
                self._running.remove(slowest)
            self._running.append(download)
        if slowest is not None:
            log.debug("%d downloads at once: the slowest gives way to a new one", self._limit)
            slowest.end()
        try:
            yield download
        finally:
            with self._lock:
                if download in self._running:
                    self._running.remove(download)


class CaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    def __init__(self, runner: CaptureRunner, artifacts: Artifacts) -> None:
        self._runner = runner
        self._artifacts = artifacts
        self._downloads = Downloads()

    def StartCapture(
        self, request: pb.StartCaptureRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StartCaptureResponse]:
        """The capture continues when the caller disconnects; GetCapture returns how it ended."""
        try:
            capture_id = self._runner.start(request, requested_by=context.peer())
        except CaptureError as error:
            self._runner.audit.refused(context.peer(), request, str(error))
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        for capture in self._runner.records.follow(capture_id, context.is_active):
            yield pb.StartCaptureResponse(capture=capture)

    def GetCapture(self, request: pb.GetCaptureRequest, context: grpc.ServicerContext) -> pb.GetCaptureResponse:
        capture = self._runner.records.get(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.GetCaptureResponse(capture=capture)

    def ListCaptures(self, request: pb.ListCapturesRequest, context: grpc.ServicerContext) -> pb.ListCapturesResponse:
        return pb.ListCapturesResponse(captures=self._runner.records.all(request.job))

    def CancelCapture(
        self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext
    ) -> pb.CancelCaptureResponse:
        capture = self._runner.cancel(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.CancelCaptureResponse(capture=capture)

    def DeleteCapture(
        self, request: pb.DeleteCaptureRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCaptureResponse:
        capture = self._runner.records.get(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        if capture.state not in FINAL:
            _abort(context, grpc.StatusCode.UNAVAILABLE, f"capture {request.id} is under way; cancel it first")
        self._runner.records.forget(request.id)
        self._artifacts.remove(request.id)
        return pb.DeleteCaptureResponse()

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        """Resumable: `offset` is how much the caller already has."""
        try:
            artifact, size = self._artifacts.open(request.id, request.rank, request.window)
        except CaptureError as error:
            _abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        with artifact, self._downloads.started(context.cancel) as download:
            if request.offset > size:
                reason = f"offset {request.offset} lies behind the end of the artifact ({size} bytes)"
                _abort(context, grpc.StatusCode.OUT_OF_RANGE, reason)
            artifact.seek(request.offset)
            chunk = artifact.read(CHUNK_BYTES)
            while True:
                yield pb.DownloadArtifactResponse(chunk=chunk, total_bytes=size)
                download.read_bytes += len(chunk)
                chunk = artifact.read(CHUNK_BYTES)
                if not chunk or not context.is_active():
                    return


def capture_service(runner: CaptureRunner, artifacts: Artifacts) -> Service:
    name = pb.DESCRIPTOR.services_by_name["CaptureService"].full_name
    servicer = CaptureServicer(runner, artifacts)
    return Service(name, lambda to: capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(servicer, to))


def _unknown(capture_id: str) -> str:
    return f"no capture {capture_id[:64]!r} on this node; `rankscope captures ls` lists them"


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort returns never")


# Captures as the duty cycle uses them.


class DutyCaptures:
    """By libkineto, else by a probe that cannot measure what its steps wait for. Stacks have no breakdown."""

    def __init__(
        self,
        runner: CaptureRunner,
        store: Store,
        kineto: KinetoBackend,
        probe: ProbeBackend,
        endpoint: Endpoint,
        proc_root: Path,
    ) -> None:
        self._runner = runner
        self._store = store
        self._kineto = kineto
        self._probe = probe
        self._endpoint = endpoint
        self._proc_root = proc_root

    def start(self, request: pb.StartCaptureRequest, requested_by: str, step_seconds: float | None) -> str:
        return self._runner.start(request, requested_by, step_seconds)

    def find(self, capture_id: str) -> pb.Capture | None:
        return self._runner.records.get(capture_id)

    def is_busy(self, job: str) -> bool:
        return self._runner.is_busy(job)

    def is_able(self, rank: RankProcess) -> bool:
        return self._kineto.objection(rank) is None or self._probe.objection(rank) is None

    def objection(self, rank: RankProcess) -> str | None:
        if self._kineto.objection(rank) is None:
            client = self._endpoint.client(rank.pid)
            if client is None:
                return UNABLE
            if not client.is_ready:
                return PROFILER
        elif self._probe.objection(rank) is not None:
            return UNABLE
        return None if slowdown_objection(rank, Options(), self._proc_root) is None else SLOWDOWN

    def kept(self) -> Sequence[tuple[str, str]]:
        return self._runner.records.finished(DUTY_CYCLE)

    def forget(self, capture_id: str) -> None:
        self._runner.records.forget(capture_id)
        self._store.remove(capture_id)


# Recent step times of ranks, from closed windows: captures are planned and judged by them.


class RecentSteps:
    """Written by the daemon's thread, read by captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[RankKey, deque[tuple[float, float, int, float]]] = {}

    def add(self, windows: Mapping[RankKey, RankWindow]) -> None:
        with self._lock:
            for key in self._windows.keys() - windows.keys():
                del self._windows[key]
            for key, window in windows.items():
                if window.sources.get("steps") == SOURCE_CAPTURE:
                    continue  # steps slowed by recording, reported late
                if window.HasField("steps") and window.steps and window.HasField("step_seconds"):
                    start, end = window.start_unix_nanos / 1e9, window.end_unix_nanos / 1e9
                    kept = self._windows.setdefault(key, deque(maxlen=WINDOWS_KEPT))
                    kept.append((start, end, window.steps, window.step_seconds.mean))

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
    """Raises CaptureError if captures cannot be stored in the configured directory. `duty_wish` returns a policy's
    settings for the ranks of a job, or None."""

    def __init__(
        self, config: Config, duty_wish: Callable[[Sequence[RankProcess]], DutyWish | None] = lambda ranks: None
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
            audit=audit,
        )
        self._earlier = self._runner.records.all()
        settings = DutySettings(config.duty_cycle_steps, config.duty_cycle_seconds, config.duty_cycle_budget_ratio)
        captures = DutyCaptures(self._runner, self._store, kineto, probe, self._endpoint, proc_root)

        def duty_settings_of(ranks: Sequence[RankProcess]) -> DutySettings:
            wish = duty_wish(ranks)
            return settings if wish is None else replace(settings, steps=wish.steps, period_seconds=wish.period_seconds)

        self._duty = DutyCycle(settings, captures, config.window_seconds, settings_of=duty_settings_of)

    @property
    def service(self) -> Service:
        return capture_service(self._runner, self._store)

    def suspect(self, suspects_of: SuspectsOf) -> None:
        """Which ranks are slow: answered by the correlation."""
        self._runner.suspects_of = suspects_of

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
            self._kineto.remove_leftovers(self._earlier, strangers)
        self._steps.add(windows)
        namespaces: dict[int, int] = {}
        for rank in ranks:
            if "KINETO_USE_DAEMON" in rank.environment:
                try:
                    namespaces.setdefault(network_namespace(rank.pid, self._proc_root), rank.pid)
                except OSError:
                    continue  # it has just ended
        self._endpoint.watch(namespaces)
        self._duty.observe(ranks, windows)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
            self._store.sweep()

    @property
    def status(self) -> CaptureStatus:
        tallies = self._endpoint.tallies
        return CaptureStatus(
            results=self._runner.tally.results,
            slowdowns=self._runner.tally.slowdowns,
            clients=self._endpoint.client_count(),
            malformed_total=tallies.malformed,
            unvouched_total=tallies.unvouched,
            unanswered={"late": tallies.late, "hushed": tallies.hushed, "unsent": tallies.unsent},
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
