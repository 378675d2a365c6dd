"""CaptureService over gRPC: the conductor's captures, and artifacts in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NoReturn, Protocol

import grpc

from rankscope.daemon.captures.conducting import Conductor
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.records import FINAL
from rankscope.daemon.serving import Service
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import capture_service_pb2_grpc

CHUNK_BYTES = 256 * 1024


class Artifacts(Protocol):
    def open(self, capture_id: str, rank: int, window: int = 0) -> tuple[BinaryIO, int]:
        """The artifact and its size. Raises CaptureError if there is none."""
        ...

    def remove(self, capture_id: str) -> None: ...


class CaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    def __init__(self, conductor: Conductor, artifacts: Artifacts) -> None:
        self._conductor = conductor
        self._artifacts = artifacts

    def StartCapture(
        self, request: pb.StartCaptureRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.StartCaptureResponse]:
        """The capture goes on when the caller leaves: it has been asked for, and GetCapture tells how it ended."""
        try:
            capture_id = self._conductor.start(request, requested_by=context.peer())
        except CaptureError as error:
            self._conductor.audit.refused(context.peer(), request, str(error))
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        for capture in self._conductor.records.follow(capture_id, context.is_active):
            yield pb.StartCaptureResponse(capture=capture)

    def GetCapture(self, request: pb.GetCaptureRequest, context: grpc.ServicerContext) -> pb.GetCaptureResponse:
        capture = self._conductor.records.get(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.GetCaptureResponse(capture=capture)

    def ListCaptures(self, request: pb.ListCapturesRequest, context: grpc.ServicerContext) -> pb.ListCapturesResponse:
        return pb.ListCapturesResponse(captures=self._conductor.records.all(request.job))

    def CancelCapture(
        self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext
    ) -> pb.CancelCaptureResponse:
        capture = self._conductor.cancel(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        return pb.CancelCaptureResponse(capture=capture)

    def DeleteCapture(
        self, request: pb.DeleteCaptureRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCaptureResponse:
        capture = self._conductor.records.get(request.id)
        if capture is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, _unknown(request.id))
        if capture.state not in FINAL:
            _abort(context, grpc.StatusCode.UNAVAILABLE, f"capture {request.id} is under way; cancel it first")
        self._conductor.records.forget(request.id)
        self._artifacts.remove(request.id)
        return pb.DeleteCaptureResponse()

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        """Resumable: `offset` is what the caller has already."""
        try:
            artifact, size = self._artifacts.open(request.id, request.rank, request.window)
        except CaptureError as error:
            _abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        with artifact:
            if request.offset > size:
                reason = f"offset {request.offset} lies behind the end of the artifact ({size} bytes)"
                _abort(context, grpc.StatusCode.OUT_OF_RANGE, reason)
            artifact.seek(request.offset)
            yield pb.DownloadArtifactResponse(chunk=artifact.read(CHUNK_BYTES), total_bytes=size)
            while context.is_active() and (chunk := artifact.read(CHUNK_BYTES)):
                yield pb.DownloadArtifactResponse(chunk=chunk, total_bytes=size)


def capture_service(conductor: Conductor, artifacts: Artifacts) -> Service:
    name = pb.DESCRIPTOR.services_by_name["CaptureService"].full_name
    servicer = CaptureServicer(conductor, artifacts)
    return Service(name, lambda to: capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(servicer, to))


def _unknown(capture_id: str) -> str:
    return f"no capture {capture_id[:64]!r} on this node; `rankscope captures ls` lists them"


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort returns never")
