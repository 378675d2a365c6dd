"""Starts a capture and follows it to its end, also over a daemon that restarts meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import grpc

from rankscope.cli.capturing.connecting import CALL_SECONDS
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

FINAL = frozenset({pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED})
# A daemon that is restarted is back within seconds; one that is not will not say anything more.
RECONNECT_SECONDS = 30.0
POLL_SECONDS = 0.5
# Answers, and no trouble on the way: an operator looks at the token again while a capture goes on.
REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


class LostError(Exception):
    """The daemon went away and did not tell how the capture ended."""


def follow(
    stub: CaptureServiceStub, request: pb.StartCaptureRequest, warn: Callable[[str], None]
) -> Iterator[pb.Capture]:
    """The capture at every change; the last one is final. Raises grpc.RpcError if it was refused or nobody is there."""
    capture_id = ""
    try:
        for response in stub.StartCapture(request):
            capture_id = response.capture.id
            yield response.capture
            if response.capture.state in FINAL:
                return
    except grpc.RpcError as error:
        if not capture_id or error.code() in REFUSALS:
            raise
        warn(f"the connection was lost ({error.code().name}); asking again for capture {capture_id}")
    if not capture_id:
        raise LostError("the daemon said nothing about the capture; `rankscope captures ls` shows whether there is one")
    yield from follow_again(stub, capture_id)


def follow_again(
    stub: CaptureServiceStub, capture_id: str, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[pb.Capture]:
    """The capture now and at every change, asked for again and again, until it is final or nobody wants it any more."""
    seen: pb.Capture | None = None
    silent_since = time.monotonic()
    while is_wanted():
        try:
            response = stub.GetCapture(pb.GetCaptureRequest(id=capture_id), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise LostError(
                    f"the daemon was restarted and does not know capture {capture_id} any more; start another"
                ) from error
            if error.code() in REFUSALS:
                raise
            if time.monotonic() - silent_since > RECONNECT_SECONDS:
                raise LostError(
                    f"the daemon has been away for {RECONNECT_SECONDS:g} s; when it is back, "
                    f"`rankscope captures show {capture_id}` tells how the capture ended"
                ) from error
        else:
            silent_since = time.monotonic()
            if response.capture != seen:
                seen = response.capture
                yield seen
            if seen.state in FINAL:
                return
        time.sleep(POLL_SECONDS)
