"""Kubernetes Events, for `kubectl describe`: one for each change, never one for each window."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

from rankscope.operator.kube.api_client import Api, ConflictError, Document
from rankscope.operator.kube.object_writer import Outbox, Write

COMPONENT = "rankscope-operator"
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class Target:
    """The object of an event."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class Events:
    def __init__(self, api: Api, outbox: Outbox) -> None:
        self._api = api
        self._outbox = outbox

    def emit(self, target: Target, kind: Literal["Normal", "Warning"], reason: str, message: str, change: str) -> None:
        """`change` identifies what happened: the same change of an object makes one event, also of another replica."""
        digest = hashlib.sha256(f"{target.uid} {reason} {change}".encode()).hexdigest()[:16]
        name = f"{target.name[:200]}.{digest}"
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        body: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": target.namespace},
            "involvedObject": {
                "apiVersion": target.api_version,
                "kind": target.kind,
                "namespace": target.namespace,
                "name": target.name,
                "uid": target.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:MESSAGE_CHARACTERS],
            "source": {"component": COMPONENT, "host": socket.gethostname()},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path = f"/api/v1/namespaces/{target.namespace}/events"
        key = f"event {target.namespace}/{name}"
        self._outbox.put(Write(key, message, lambda: self._create(path, body), target.namespace))

    def _create(self, path: str, body: Document) -> None:
        try:
            self._api.create(path, body)
        except ConflictError:
            return  # made already, before a restart or by another replica
