"""Where the daemons are: the pods of our DaemonSet, by node."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.operator.kube.api import Document
from rankscope.operator.kube.runs.pods import read_pod

SELECTOR = "app.kubernetes.io/name=rankscope,app.kubernetes.io/component=daemon"
PORT_NAME = "grpc"
DEFAULT_PORT = 9465


@dataclass(frozen=True)
class DaemonPod:
    uid: str
    node: str
    address: str  # HOST:PORT
    created: str


def read_daemon_pod(document: Document) -> DaemonPod | None:
    pod = read_pod(document)
    if pod is None or not pod.node or not pod.address or pod.is_over or pod.deleting:
        return None
    ports = [
        port.get("containerPort")
        for container in document["spec"].get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == PORT_NAME
    ]
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return DaemonPod(pod.uid, pod.node, f"{host}:{ports[0] if ports else DEFAULT_PORT}", pod.created)


class DaemonPods:
    """Told by a watch."""

    def __init__(self) -> None:
        self._pods: dict[str, DaemonPod] = {}
        self._lock = threading.Lock()

    def changed(self, uid: str, pod: DaemonPod) -> None:
        with self._lock:
            self._pods[uid] = pod

    def deleted(self, uid: str) -> None:
        with self._lock:
            self._pods.pop(uid, None)

    @property
    def addresses(self) -> Mapping[str, str]:
        """Node to HOST:PORT; while a daemon is replaced there may be two of a node, and the newest counts."""
        with self._lock:
            ordered = sorted(self._pods.values(), key=lambda pod: pod.created)
        return {pod.node: pod.address for pod in ordered}
