from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from rankscope.operator.captures.controller import MAX_PER_NAMESPACE, CapturesController
from rankscope.operator.kube.api_client import ConflictError
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.objects import FINALIZER, CaptureObject, read_capture_object
from rankscope.operator.kube.resources import CaptureStatus

LIMIT_SECONDS = 180.0


def document(version: int, **metadata: Any) -> dict[str, Any]:
    of_it = {"namespace": "lab", "name": "c", "uid": "c", "creationTimestamp": "2026-03-01T10:00:00Z"}
    return {
        "metadata": {**of_it, "resourceVersion": str(version), "finalizers": [FINALIZER], **metadata},
        "spec": {"run": "llama", "steps": 1},
        "status": {"phase": "Pending"} if version == 1 else {"phase": "Failed"},
    }


def read(found: dict[str, Any]) -> CaptureObject:
    made = read_capture_object(found)
    assert made is not None
    return made


def test_a_deletion_watched_during_a_write_is_not_lost() -> None:
    freed = threading.Event()

    class Writer:
        def write_status(self, thing: CaptureObject, status: CaptureStatus) -> Any:
            """By the time that the answer is read, the watch has reported the write and the deletion after it."""
            controller.changed("c", read(document(2)))
            controller.changed("c", read(document(3, deletionTimestamp="2026-03-01T10:00:01Z")))
            return document(2)

    class Api:
        def merge(self, path: str, body: Any) -> Any:
            assert body["metadata"] == {"finalizers": [], "resourceVersion": "3"}
            freed.set()

    leases = cast(ShardLeases, SimpleNamespace(holds=lambda job: True, is_settling=lambda job: False))
    controller = CapturesController(
        cast(Any, Api()), cast(Any, Writer()), leases, cast(Any, None), dict, dict[str, str]
    )
    controller.changed("c", read(document(1)))
    try:
        pulse = threading.Event()
        for _ in range(int(LIMIT_SECONDS / 0.05)):
            controller.reconcile()
            if freed.is_set():
                break
            pulse.wait(0.05)
    finally:
        controller.stop()
    assert freed.is_set()


@dataclass
class FakeWriter:
    written: dict[str, CaptureStatus] = field(default_factory=dict)
    seen: threading.Event = field(default_factory=threading.Event)

    def write_status(self, thing: CaptureObject, status: CaptureStatus) -> Any:
        self.written[thing.place] = status
        if thing.namespace == "lab":
            self.seen.set()
        raise ConflictError(409, "Conflict", "the object was modified")


class FakeCalls:
    """Daemons that do not answer while the test runs."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []

    def get(self, address: str, capture_id: str) -> None:
        self.asked.append(capture_id)
        self.release.wait(60)


def capture(namespace: str, name: str, status: dict[str, Any]) -> CaptureObject:
    metadata = {"namespace": namespace, "name": name, "uid": name, "creationTimestamp": "2026-03-01T10:00:00Z"}
    made = read_capture_object({"metadata": metadata, "spec": {"run": name, "steps": 1}, "status": status})
    assert made is not None
    return made


def test_endless_captures_of_a_namespace_hold_up_no_other() -> None:
    writer, calls = FakeWriter(), FakeCalls()
    leases = cast(ShardLeases, SimpleNamespace(holds=lambda job: True, is_settling=lambda job: True))
    controller = CapturesController(
        cast(Any, None), cast(Any, writer), leases, cast(Any, calls), dict, lambda: {"a": "x:1"}
    )
    # As their owner may have written them: begun, never to end, and with a start in the far future.
    forged = {"phase": "Running", "captureId": "x", "startUnixMs": 1 << 52}
    forged |= {"ranks": [{"rank": 0, "node": "a", "state": "accepted"}]}
    for number in range(200):
        # Of each kind more than there are workers; the second waits for its turn.
        waiting = capture("mallory", f"w-{number}", {"phase": "Pending"})
        controller.changed(waiting.uid, waiting)
        controller.changed(f"m-{number}", capture("mallory", f"m-{number}", forged))
    controller.changed("mine", capture("lab", "mine", {}))
    try:
        for _ in range(3):
            controller.reconcile()
        assert writer.seen.wait(60)
    finally:
        calls.release.set()
        controller.stop()
    assert "no rank of run mine reports" in str(writer.written["lab/mine"].message)
    assert len(calls.asked) <= MAX_PER_NAMESPACE
