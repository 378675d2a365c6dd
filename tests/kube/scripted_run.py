"""A run whose pods are real objects of the API server and whose ranks are told by scripted daemons."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from tests.kube.api_server import ApiError, ApiServer
from tests.kube.fleet import delete_pod, make_pod
from tests.kube.scripted_daemon import BUSY_SECONDS, WAITING_SECONDS, ScriptedDaemon, Spoken
from tests.support.waiting import wait_until

BASE = "/apis/rankscope.dev/v1alpha1/namespaces"
FINISHED = ("Succeeded", "Failed", "Cancelled")


def _verdict(status: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    found = status.get("verdict", {})
    culprits = tuple(culprit["rank"] for culprit in found.get("culprits", ()))
    return (found.get("kind", ""), found.get("severity", ""), culprits)


@dataclass
class ScriptedRun:
    """A PyTorchJob with one pod on each daemon's node."""

    server: ApiServer
    namespace: str
    name: str
    daemons: list[ScriptedDaemon]
    ranks_per_pod: int = 2
    pods: list[str] = field(default_factory=list)  # uids
    job: str = "10.0.0.1:29500"

    def __post_init__(self) -> None:
        self.uid = str(uuid.uuid4())

    def start(self) -> None:
        for index in range(len(self.daemons)):
            self.pods.append(self.make_pod(index))
        self.speak()

    def make_pod(self, index: int, suffix: str = "", **fields: Any) -> str:
        labels = {
            "training.kubeflow.org/job-name": self.name,
            "training.kubeflow.org/replica-type": "worker",
            "training.kubeflow.org/replica-index": str(index),
        }
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": self.name, "uid": self.uid}
        name = self.pod_name(index) + suffix
        node = self.daemons[index].node
        return make_pod(self.server, self.namespace, name, node, labels, owner={**owner, "controller": True}, **fields)

    def pod_name(self, index: int) -> str:
        return f"{self.name}-worker-{index}"

    def delete_pod(self, index: int, suffix: str = "") -> None:
        delete_pod(self.server, self.namespace, self.pod_name(index) + suffix)

    def speak(self, incarnation: int = 1) -> None:
        """Every pod's ranks, in order; again after pods came or went."""
        world_size = self.ranks_per_pod * len(self.pods)
        for index, (daemon, pod) in enumerate(zip(self.daemons, self.pods, strict=False)):
            first = index * self.ranks_per_pod
            numbers = range(first, first + self.ranks_per_pod)
            daemon.ranks = [Spoken(pod, number, world_size, self.job, incarnation=incarnation) for number in numbers]

    def slow(self, *slow_ranks: int) -> None:
        for daemon in self.daemons:
            for rank in daemon.ranks:
                if rank.pod in self.pods:
                    busy = not slow_ranks or rank.rank in slow_ranks
                    rank.self_seconds = BUSY_SECONDS if busy else WAITING_SECONDS

    @property
    def object_name(self) -> str:
        return f"pytorchjob-{self.name}"

    @property
    def exported_job(self) -> str:
        """The run's name, of which metrics have labels."""
        return f"{self.namespace}/{self.object_name}"

    @property
    def path(self) -> str:
        return f"{BASE}/{self.namespace}/trainingruns/{self.object_name}"

    @property
    def status(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.server.admin.get(self.path).get("status", {})
        except ApiError as error:
            if error.status != 404:
                raise
            return {}
        return found

    def verdict(self) -> tuple[str, str, tuple[int, ...]]:
        return _verdict(self.status)

    def wait_for_verdict(self, kind: str, culprits: tuple[int, ...] = ()) -> dict[str, Any]:
        """The status with it."""
        wanted = (kind, "none" if kind == "healthy" else "alarm", culprits)
        seen: dict[str, Any] = {}

        def is_given() -> bool:
            nonlocal seen
            seen = self.status
            return _verdict(seen) == wanted

        wait_until(is_given, lambda: f"{_verdict(seen)} instead of {wanted}; status: {seen}")
        return seen

    def make_capture(self, name: str, **spec: Any) -> str:
        """Its path."""
        wanted = {"run": self.object_name, "ranks": "straggler+peer", "steps": 3, **spec}
        body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": name}, "spec": wanted}
        path = f"{BASE}/{self.namespace}/captures"
        self.server.admin.create(path, body)
        return f"{path}/{name}"

    def capture(self, path: str) -> dict[str, Any]:
        status: dict[str, Any] = self.server.admin.get(path).get("status", {})
        return status

    def finished_capture(self, path: str, seconds: float = 180.0) -> dict[str, Any]:
        wait_until(lambda: self.capture(path).get("phase") in FINISHED, seconds=seconds)
        return self.capture(path)
