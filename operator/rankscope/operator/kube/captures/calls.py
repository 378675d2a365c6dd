"""What is asked of a node's daemon about a capture. Blocking; each call has a deadline of its own."""

from __future__ import annotations

import grpc

from rankscope.operator.kube.certificates.daemon_credentials import DaemonTls, credentials, naming
from rankscope.operator.kube.resources import CaptureSpec
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

CALL_SECONDS = 10.0
_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


class DaemonRefusedError(Exception):
    """The daemon said no, and why."""


class DaemonAwayError(Exception):
    """The daemon did not answer: to be asked again."""


class DaemonCalls:
    def __init__(self, tls: DaemonTls | None = None) -> None:
        self._tls = tls

    def start(
        self,
        address: str,
        capture_id: str,
        job: str,
        ranks: list[int],
        spec: CaptureSpec,
        start_unix_millis: int,
        why: str,
    ) -> pb.Capture:
        """The same id again is the same capture: a restarted operator may ask twice."""
        request = pb.StartCaptureRequest(
            id=capture_id,
            job=job,
            ranks=",".join(map(str, ranks)),
            options=pb.CaptureOptions(
                shapes=spec.options.shapes,
                stacks=spec.options.stacks,
                memory=spec.options.memory,
                flops=spec.options.flops,
                modules=spec.options.modules,
                allow_slowdown=spec.options.allow_slowdown,
            ),
            reason=why,
            start_unix_millis=start_unix_millis,
            patience_seconds=spec.patience_seconds,
        )
        if isinstance(spec.steps, int):
            request.steps = spec.steps
        elif isinstance(spec.seconds, float):
            request.seconds = spec.seconds
        with self.channel(address) as channel:
            try:
                call = CaptureServiceStub(channel).StartCapture(request, timeout=CALL_SECONDS)
                first: pb.StartCaptureResponse = next(iter(call))
                call.cancel()
            except grpc.RpcError as error:
                raise _told(error) from error
            except StopIteration:
                raise DaemonAwayError("the daemon told nothing about the capture") from None
        return first.capture

    def get(self, address: str, capture_id: str) -> pb.Capture | None:
        """None: the daemon knows of no such capture."""
        with self.channel(address) as channel:
            try:
                answer: pb.GetCaptureResponse = CaptureServiceStub(channel).GetCapture(
                    pb.GetCaptureRequest(id=capture_id), timeout=CALL_SECONDS
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                raise _told(error) from error
        return answer.capture

    def cancel(self, address: str, capture_id: str) -> None:
        with self.channel(address) as channel:
            try:
                request = pb.CancelCaptureRequest(id=capture_id)
                CaptureServiceStub(channel).CancelCapture(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise _told(error) from error

    def delete(self, address: str, capture_id: str) -> None:
        with self.channel(address) as channel:
            try:
                request = pb.DeleteCaptureRequest(id=capture_id)
                CaptureServiceStub(channel).DeleteCapture(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise _told(error) from error

    def channel(self, address: str) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(address)
        try:
            shown = credentials(self._tls)
        except OSError as error:
            raise DaemonAwayError(f"the daemon cannot be asked: {error}") from error
        return grpc.secure_channel(address, shown, [naming()])


def _told(error: grpc.RpcError) -> Exception:
    text = (error.details() or error.code().name)[:500]
    return DaemonRefusedError(text) if error.code() in _REFUSALS else DaemonAwayError(text)
