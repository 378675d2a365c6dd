"""Asks a daemon for the capture that alerts want."""

from __future__ import annotations

import grpc

from rankscope.operator.alerts.choosing import RefusedError, Wanted
from rankscope.operator.alerts.deciding import FailedError
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

STEPS = 3
# For ranks whose steps nobody sees.
SECONDS = 2.0
CALL_SECONDS = 15.0
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


def start_capture(target: str, wanted: Wanted) -> str:
    """The id of the capture, which goes on when we hang up."""
    request = pb.StartCaptureRequest(job=wanted.job, ranks=",".join(map(str, wanted.ranks)), reason=wanted.reason)
    if wanted.steps_are_known:
        request.steps = STEPS
    else:
        request.seconds = SECONDS
    try:
        with grpc.insecure_channel(target) as channel:
            call = CaptureServiceStub(channel).StartCapture(request, timeout=CALL_SECONDS)
            first: pb.StartCaptureResponse = next(iter(call))
            call.cancel()
            return first.capture.id
    except grpc.RpcError as error:
        if error.code() in _REFUSALS:
            raise RefusedError(error.details()) from error
        raise FailedError(f"the daemon at {target}: {error.code().name}: {error.details()}") from error
    except StopIteration:
        raise FailedError(f"the daemon at {target} told nothing about the capture") from None
