"""A daemon that plays a script: a real gRPC server with CaptureService, saying what a conductor would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import capture_service_pb2_grpc

ID = "c-20260301-101112-a1b2c3"
ACCEPTED, ARMED, RUNNING = pb.CAPTURE_STATE_ACCEPTED, pb.CAPTURE_STATE_ARMED, pb.CAPTURE_STATE_RUNNING
WRITTEN, ANALYSED = pb.CAPTURE_STATE_WRITTEN, pb.CAPTURE_STATE_ANALYSED
FAILED, CANCELLED = pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED
START_MILLIS = 1_772_000_000_000
CHUNK = 1000


class ScriptedCaptures(capture_service_pb2_grpc.CaptureServiceServicer):
    """Sends `script`; then, if it does not end with a final state, waits until it is cancelled."""

    def __init__(self) -> None:
        self.script: Sequence[pb.Capture] = ()
        self.refusal = ""
        self.known: dict[str, pb.Capture] = {}
        self.artifacts: dict[int | tuple[int, int], bytes] = {}  # rank, or rank and window
        self.requests: list[pb.StartCaptureRequest] = []
        self.offsets: list[int] = []
        self.break_off_after = 0  # chunks of a download, once
        self.hang_up_after = 0  # messages of a capture, as a daemon that dies
        self.is_away = False
        self.cancelled = threading.Event()

    def StartCapture(
        self, request: pb.StartCaptureRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StartCaptureResponse]:
        self.requests.append(request)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        for number, capture in enumerate(self.script):
            if self.hang_up_after and number == self.hang_up_after:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            self.known[capture.id] = capture
            yield pb.StartCaptureResponse(capture=capture)
        if self.script[-1].state not in (ANALYSED, FAILED, CANCELLED):
            self.cancelled.wait(600)

    def GetCapture(self, request: pb.GetCaptureRequest, context: grpc.ServicerContext) -> pb.GetCaptureResponse:
        return pb.GetCaptureResponse(capture=self._find(request.id, context))

    def ListCaptures(self, request: pb.ListCapturesRequest, context: grpc.ServicerContext) -> pb.ListCapturesResponse:
        return pb.ListCapturesResponse(captures=[c for c in self.known.values() if request.job in ("", c.job)])

    def CancelCapture(
        self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext
    ) -> pb.CancelCaptureResponse:
        before = pb.Capture()
        before.CopyFrom(self._find(request.id, context))
        after = pb.Capture()
        after.CopyFrom(before)
        if before.state not in (ANALYSED, FAILED, CANCELLED):
            after.state = CANCELLED
            for entry in after.ranks:
                entry.state, entry.error = CANCELLED, f"rank {entry.rank} (pid {entry.pid}): cancelled"
        self.known[request.id] = after
        self.cancelled.set()
        return pb.CancelCaptureResponse(capture=before)

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        self.offsets.append(request.offset)
        key = (request.rank, request.window) if request.window else request.rank
        if key not in self.artifacts:
            context.abort(grpc.StatusCode.NOT_FOUND, f"capture {request.id} has no artifact of rank {request.rank}")
        data = self.artifacts[key]
        if request.offset > len(data):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "behind the end")
        left = data[request.offset :]
        for number, start in enumerate(range(0, max(1, len(left)), CHUNK)):
            if self.break_off_after and number == self.break_off_after:
                self.break_off_after = 0
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield pb.DownloadArtifactResponse(chunk=left[start : start + CHUNK], total_bytes=len(data))

    def _find(self, capture_id: str, context: grpc.ServicerContext) -> pb.Capture:
        if self.is_away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if capture_id not in self.known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no capture {capture_id!r} on this node")
        return self.known[capture_id]


def serve(captures: ScriptedCaptures, target: str) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(8))
    capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(captures, server)
    server.add_insecure_port(target)
    server.start()
    return server


def capture(
    state: pb.CaptureState.ValueType,
    *ranks: pb.CaptureState.ValueType,
    job: str = "bert",
    edit: Callable[[pb.Capture], None] = lambda capture: None,
) -> pb.Capture:
    """With one entry for each given state of a rank."""
    made = pb.Capture(id=ID, job=job, state=state, requested_unix_millis=START_MILLIS)
    for number, rank_state in enumerate(ranks):
        entry = made.ranks.add(rank=number, node="node-a", backend="kineto", pid=4100 + number, state=rank_state)
        if rank_state == ANALYSED:
            entry.artifact, entry.bytes, entry.steps = f"rank{number}.json.gz", 2500, 3
            entry.start_unix_millis = START_MILLIS + 2 * number
    edit(made)
    return made
