from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from rankscope.operator.captures.controller import CapturesController
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
