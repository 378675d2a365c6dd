"""A daemon that says what a test wants, over real gRPC: for what takes a daemon's words and not its eyes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.fleets import response
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import (
    capture_service_pb2_grpc,
    profile_service_pb2,
    profile_service_pb2_grpc,
    rank_service_pb2_grpc,
)
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksRequest, WatchRanksResponse
from rankscope.v1.window_pb2 import RankWindow, StepStatistics
from tests.free_ports import free_port
from tests.kube.api_server import ApiServer
from tests.kube.fleet import DAEMON_LABELS, OPERATOR_NAMESPACE, delete_pod, make_pod

STEP_SECONDS = 0.05
STEPS = 20
# A rank's own work in a step of the above: all alike in a healthy job; beside a slow rank the others wait.
BUSY_SECONDS = 0.045
WAITING_SECONDS = 0.022
NANOS = 1_000_000_000
TRACE_BYTES = 4096
_STARTED = int(time.time())


# Ten minutes of a rank, at 10 Hz.
PROFILE_SAMPLES = 6000
TRAIN = Frame("train", "/app/train.py", 10)

ProfileAnswers = Callable[
    [profile_service_pb2.QueryProfileRequest, grpc.ServicerContext],
    Iterator[profile_service_pb2.QueryProfileResponse],
]
StackAnswers = Callable[[profile_service_pb2.DumpStacksRequest], profile_service_pb2.DumpStacksResponse]


def sampled(rank: int, **shares: float) -> list[SampledStack]:
    """Ten minutes of a rank: the functions with their shares, called by `train`, and the rest in `train` itself."""
    shares["train"] = 1.0 - sum(shares.values())
    return [
        SampledStack(
            (TRAIN,) if name == "train" else (Frame(name, "/app/data.py", 88), TRAIN),
            samples := round(PROFILE_SAMPLES * share),
            samples * NANOS // 10,
            rank,
            "MainThread",
            "forward",
        )
        for name, share in shares.items()
    ]


def trace_of(rank: int) -> bytes:
    """What is downloaded, of the size that captures tell."""
    return bytes([rank]) * TRACE_BYTES


@dataclass
class Spoken:
    """A rank as the daemon tells it; `pod` is the uid."""

    pod: str
    rank: int
    world_size: int
    job: str = "10.0.0.1:29500"
    self_seconds: float = BUSY_SECONDS
    incarnation: int = _STARTED

    def identity(self, node: str) -> RankIdentity:
        return RankIdentity(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            node=node,
            pod=self.pod,
            pid=1000 + self.rank,
            incarnation=self.incarnation,
        )

    def window(self, node: str, end_unix_nanos: int) -> RankWindow:
        step, own = STEP_SECONDS, self.self_seconds
        return RankWindow(
            identity=self.identity(node),
            sequence=end_unix_nanos // NANOS,
            start_unix_nanos=end_unix_nanos - NANOS,
            end_unix_nanos=end_unix_nanos,
            steps=STEPS,
            step_seconds=StepStatistics(mean=step, p10=step, p50=step, p90=step, max=step),
            self_seconds=StepStatistics(mean=own),
            wait_seconds=StepStatistics(mean=step - own),
        )


@dataclass
class _Held:
    request: pb.StartCaptureRequest
    ranks: list[int]
    cancelled: bool = False


@dataclass
class ScriptedDaemon:
    """`ranks` may change at any time. A capture is over `recording_seconds` after its start, and when `release` is set.
    While `answers` is not set, calls about captures are carried out and never answered."""

    server: ApiServer
    node: str
    ranks: list[Spoken] = field(default_factory=list)
    says_node: str = ""  # the name it gives itself
    recording_seconds: float = 1.0
    windows_per_second: int = 1
    starts: list[pb.StartCaptureRequest] = field(default_factory=list)  # every call, also of a known id
    deleted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    # What its store has: ranks by run. None: its ranks, whatever the run.
    stored: dict[str, list[int]] | None = None
    # `profile_answers` and `stack_answers` take the place of its answers.
    shares: dict[int, dict[str, float]] = field(default_factory=dict)  # by rank, as `sampled` takes them
    profile_answers: ProfileAnswers | None = None
    stack_answers: StackAnswers | None = None
    selections: list[profile_service_pb2.ProfileSelection] = field(default_factory=list)
    dumps: list[profile_service_pb2.DumpStacksRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.release = threading.Event()
        self.release.set()
        self.answers = threading.Event()
        self.answers.set()
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self._grpc: Any = None
        self.port = 0
        self.pod_name = f"rankscope-daemon-{self.node}"

    @property
    def captures(self) -> dict[str, list[int]]:
        """What was really begun: id to ranks."""
        with self._lock:
            return {name: list(held.ranks) for name, held in self._held.items()}

    def start(self) -> None:
        self.serve()
        ports = [{"name": "grpc", "containerPort": self.port}]
        make_pod(
            self.server, OPERATOR_NAMESPACE, self.pod_name, self.node, DAEMON_LABELS, ports=ports, address="127.0.0.1"
        )

    def serve(self) -> None:
        """Also after `silence`, on the port it had."""
        self._grpc = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        rank_service_pb2_grpc.add_RankServiceServicer_to_server(_Ranks(self), self._grpc)
        capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(_Captures(self), self._grpc)
        profile_service_pb2_grpc.add_ProfileServiceServicer_to_server(_Profiles(self), self._grpc)
        self.port = self.port or free_port()  # which no other process takes while it is silent
        self._grpc.add_insecure_port(f"127.0.0.1:{self.port}")
        self._grpc.start()

    def silence(self) -> None:
        self._grpc.stop(None).wait()

    def stop(self) -> None:
        self.silence()
        delete_pod(self.server, OPERATOR_NAMESPACE, self.pod_name)

    def message(self, end_unix_nanos: int) -> WatchRanksResponse:
        name = self.says_node or self.node
        windows = [rank.window(name, end_unix_nanos) for rank in list(self.ranks)]
        return response(name, windows) if windows else WatchRanksResponse(node=name)

    def asked_for(self, ranks: Collection[int], pods: Collection[str] = ()) -> list[int]:
        """Those of its ranks; none: all."""
        own = [spoken.rank for spoken in self.ranks if not pods or spoken.pod in pods]
        return [rank for rank in own if not ranks or rank in ranks]

    def begin(self, request: pb.StartCaptureRequest) -> None:
        with self._lock:
            self.starts.append(request)
            if request.id not in self._held:
                self._held[request.id] = _Held(request, [int(text) for text in request.ranks.split(",")])

    def capture(self, name: str) -> pb.Capture | None:
        with self._lock:
            held = self._held.get(name)
        if held is None:
            return None
        begins_at = held.request.start_unix_millis / 1000
        now = time.time()
        state = pb.CAPTURE_STATE_ARMED
        if held.cancelled:
            state = pb.CAPTURE_STATE_CANCELLED
        elif now > begins_at + self.recording_seconds and self.release.is_set():
            state = pb.CAPTURE_STATE_ANALYSED
        elif now > begins_at:
            state = pb.CAPTURE_STATE_RUNNING
        capture = pb.Capture(id=name, job=held.request.job, state=state)
        for number in held.ranks:
            capture.ranks.append(self._captured(number, state, held.request.start_unix_millis))
        return capture

    def cancel(self, name: str) -> bool:
        with self._lock:
            if name not in self._held:
                return False
            self._held[name].cancelled = True
            self.cancelled.append(name)
            return True

    def delete(self, name: str) -> bool:
        with self._lock:
            self.deleted.append(name)
            return self._held.pop(name, None) is not None

    def _captured(self, number: int, state: pb.CaptureState.ValueType, start_unix_millis: int) -> pb.RankCapture:
        rank = pb.RankCapture(rank=number, node=self.node, backend="kineto", state=state)
        if state == pb.CAPTURE_STATE_ANALYSED:
            own = next((spoken.self_seconds for spoken in self.ranks if spoken.rank == number), BUSY_SECONDS)
            rank.artifact, rank.bytes, rank.steps = f"/captures/rank{number}.json.gz", TRACE_BYTES, 3
            rank.start_unix_millis = start_unix_millis + number
            rank.summary.each_step_seconds.extend([STEP_SECONDS] * 3)
            rank.summary.each_exposed_communication_seconds.extend([STEP_SECONDS - own] * 3)
        return rank


class _Ranks(rank_service_pb2_grpc.RankServiceServicer):
    def __init__(self, daemon: ScriptedDaemon) -> None:
        self._daemon = daemon

    def WatchRanks(self, request: WatchRanksRequest, context: grpc.ServicerContext) -> Iterator[WatchRanksResponse]:
        while context.is_active():
            period = NANOS // self._daemon.windows_per_second
            end = time.time_ns() // period * period
            yield self._daemon.message(end)
            left = end + period - time.time_ns()
            time.sleep(min(max(0, left), period) / NANOS)  # a clock that is set back must not silence it


class _Captures(capture_service_pb2_grpc.CaptureServiceServicer):
    def __init__(self, daemon: ScriptedDaemon) -> None:
        self._daemon = daemon

    def StartCapture(
        self, request: pb.StartCaptureRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StartCaptureResponse]:
        self._daemon.begin(request)
        yield pb.StartCaptureResponse(capture=self._known(request.id, context))

    def GetCapture(self, request: pb.GetCaptureRequest, context: grpc.ServicerContext) -> pb.GetCaptureResponse:
        if self._daemon.capture(request.id) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such capture")
        return pb.GetCaptureResponse(capture=self._known(request.id, context))

    def CancelCapture(
        self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext
    ) -> pb.CancelCaptureResponse:
        self._daemon.cancel(request.id)
        return pb.CancelCaptureResponse(capture=self._known(request.id, context))

    def DeleteCapture(
        self, request: pb.DeleteCaptureRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCaptureResponse:
        if not self._daemon.delete(request.id):
            context.abort(grpc.StatusCode.NOT_FOUND, "no such capture")
        return pb.DeleteCaptureResponse()

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        if request.rank not in self._daemon.captures.get(request.id, ()):
            context.abort(grpc.StatusCode.NOT_FOUND, "no such artifact")
        content = trace_of(request.rank)
        for place in range(request.offset, len(content), 1000):
            yield pb.DownloadArtifactResponse(chunk=content[place : place + 1000], total_bytes=len(content))

    def _known(self, name: str, context: grpc.ServicerContext) -> pb.Capture:
        while context.is_active() and not self._daemon.answers.wait(0.2):
            pass
        capture = self._daemon.capture(name)
        if capture is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such capture")
            raise AssertionError
        return capture


class _Profiles(profile_service_pb2_grpc.ProfileServiceServicer):
    def __init__(self, daemon: ScriptedDaemon) -> None:
        self._daemon = daemon

    def QueryProfile(
        self, request: profile_service_pb2.QueryProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[profile_service_pb2.QueryProfileResponse]:
        selection = request.selection
        self._daemon.selections.append(selection)
        if self._daemon.profile_answers is not None:
            yield from self._daemon.profile_answers(request, context)
            return
        ranks = self._daemon.asked_for(selection.ranks)
        if self._daemon.stored is not None:
            stored = self._daemon.stored.get(selection.job, [])
            ranks = [rank for rank in stored if not selection.ranks or rank in selection.ranks]
        content = pprof(Profile.of(one for rank in ranks for one in sampled(rank, **self._daemon.shares.get(rank, {}))))
        for offset in range(0, len(content), 100):
            yield profile_service_pb2.QueryProfileResponse(pprof=content[offset : offset + 100])

    def DumpStacks(
        self, request: profile_service_pb2.DumpStacksRequest, context: grpc.ServicerContext
    ) -> profile_service_pb2.DumpStacksResponse:
        self._daemon.dumps.append(request)
        if self._daemon.stack_answers is not None:
            return self._daemon.stack_answers(request)
        ranks = self._daemon.asked_for(request.ranks, request.pods)
        stacks = [profile_service_pb2.RankStack(rank=rank, phase="forward", frames=[str(TRAIN)]) for rank in ranks]
        return profile_service_pb2.DumpStacksResponse(ranks=stacks)


@dataclass
class GarbageDaemon:
    """Answers every call with the bytes of `make`, which need not be a message."""

    server: ApiServer
    node: str
    make: Callable[[], bytes]

    def start(self) -> None:
        self._grpc = grpc.server(ThreadPoolExecutor(16))
        self._grpc.add_generic_rpc_handlers((_Garbage(self.make),))
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self.pod_name = f"rankscope-daemon-{self.node}"
        ports = [{"name": "grpc", "containerPort": port}]
        make_pod(
            self.server, OPERATOR_NAMESPACE, self.pod_name, self.node, DAEMON_LABELS, ports=ports, address="127.0.0.1"
        )

    def stop(self) -> None:
        self._grpc.stop(None).wait()
        delete_pod(self.server, OPERATOR_NAMESPACE, self.pod_name)


class _Garbage(grpc.GenericRpcHandler):
    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make

    def service(self, handler_call_details: Any) -> Any:
        def answers(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            while context.is_active():
                yield self._make()
                time.sleep(0.2)

        return grpc.unary_stream_rpc_method_handler(answers)
