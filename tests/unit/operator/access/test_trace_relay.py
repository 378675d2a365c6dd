from __future__ import annotations

from typing import Any, cast

from rankscope.operator.access import trace_relay
from rankscope.operator.access.trace_relay import Traces
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.kube.objects import CaptureObject, read_capture_object
from rankscope.v1 import capture_service_pb2 as pb

REPORT_BYTES = 3 << 20


class Verbose:
    """A daemon that reports as much as a message may have."""

    asked = 0

    def get(self, address: str, capture_id: str) -> pb.Capture:
        self.asked += 1
        return pb.Capture(id=capture_id, reason="x" * REPORT_BYTES)


def capture(uid: str, **rank: Any) -> CaptureObject:
    metadata = {"namespace": "lab", "name": uid, "uid": uid, "creationTimestamp": "2026-03-01T10:00:00Z"}
    status = {"phase": "Succeeded", "captureId": "k-victim", "ranks": [{"rank": 0, "state": "analysed", **rank}]}
    made = read_capture_object({"metadata": metadata, "spec": {"run": "x", "steps": 1}, "status": status})
    assert made is not None
    return made


def test_details_are_requested_by_object_id_and_cached_within_limits() -> None:
    daemon = Verbose()
    traces = Traces(cast(DaemonCalls, daemon), lambda: {"a": "x:1"})
    things = [capture(f"u-{number}", node="a") for number in range(20)]
    try:
        for thing in things:
            for _ in range(2):
                assert traces.details(thing)["a"].id == thing.capture_id
        assert daemon.asked == 20
        held = sum(capture.ByteSize() for each in traces._cached.values() for capture in each.found.values())
        assert held == traces._cached_bytes <= trace_relay.CACHED_BYTES
        assert traces.details(capture("u-99", node="unknown")) == {}
    finally:
        traces.stop()
