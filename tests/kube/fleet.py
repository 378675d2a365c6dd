"""Nodes and pods without a kubelet: a node is a pid namespace with a real daemon in it, a pod is a real cgroup of the
name that a kubelet gives it, with real training processes inside. The API server is told of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.free_ports import free_port
from tests.integration.small_job import SCRIPT
from tests.kube.api_server import ApiServer
from tests.namespaces import missing_for_nodes
from tests.support.waiting import wait_until

DAEMON_LABELS = {"app.kubernetes.io/part-of": "rankscope", "app.kubernetes.io/component": "daemon"}
OPERATOR_NAMESPACE = "rankscope"
MAIN = (sys.executable, "-m", "rankscope.cli.main")


def cgroup_folder() -> Path:
    """Where groups can be made: the unified hierarchy, or any of the old ones; a daemon reads them all."""
    root = Path("/sys/fs/cgroup")
    return root if (root / "cgroup.procs").exists() else root / "pids"


@dataclass
class Node:
    """A pid namespace of its own: its daemon sees the processes started here and no others."""

    name: str
    folder: Path
    server: ApiServer
    flags: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    pod_name: str = ""
    _keeper: subprocess.Popen[bytes] | None = None
    _daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if (missing := missing_for_nodes()) is not None:
            pytest.fail(missing)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The first process of the namespace; everything here ends with it.
        self._keeper = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"], start_new_session=True
        )
        wait_until(self._is_ready)
        self.start_daemon()
        self.register()

    def start_daemon(self) -> None:
        with (self.folder / "daemon.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                self.inside(
                    *MAIN,
                    "daemon",
                    *("--node", self.name, "--grpc-listen", f"127.0.0.1:{self.port}", "--metrics-listen", "none"),
                    *("--socket", str(self.folder / "daemon.sock"), "--capture-dir", str(self.folder / "captures")),
                    *("--profile-dir", str(self.folder / "profiles")),
                    *("--window-seconds", "1", *self.flags),
                ),
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: "grpc" in self.log)

    def stop_daemon(self, number: int = signal.SIGKILL) -> None:
        assert self._daemon is not None
        # nsenter waits for the daemon, which is its child.
        for child in Path(f"/proc/{self._daemon.pid}/task/{self._daemon.pid}/children").read_text().split():
            os.kill(int(child), number)
        self._daemon.wait()

    def stop(self) -> None:
        if self._keeper is not None:
            os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()
        if self._daemon is not None:
            self._daemon.wait()

    @property
    def log(self) -> str:
        path = self.folder / "daemon.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def inside(self, *command: str) -> list[str]:
        assert self._keeper is not None
        child = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()[0]
        return ["nsenter", "--target", child, "--pid", "--mount", "--", *command]

    def register(self) -> None:
        """Its pod, as the DaemonSet's controller and the kubelet would make it."""
        self.pod_name = f"rankscope-daemon-{self.name}"
        ports = [{"name": "grpc", "containerPort": self.port}]
        make_pod(
            self.server, OPERATOR_NAMESPACE, self.pod_name, self.name, DAEMON_LABELS, ports=ports, address="127.0.0.1"
        )

    def _is_ready(self) -> bool:
        assert self._keeper is not None
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        return bool(children) and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep"


@dataclass
class TrainingPod:
    """A pod with some ranks of a job."""

    name: str
    uid: str
    node: Node
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def cgroup(self) -> Path:
        return (
            cgroup_folder() / "kubepods" / "burstable" / f"pod{self.uid}" / uuid.uuid5(uuid.NAMESPACE_DNS, self.uid).hex
        )

    def run(self, environment: dict[str, str], log: Path, *command: str) -> None:
        """A process of the pod: a rank of the real job if no command is given."""
        self.cgroup.mkdir(parents=True, exist_ok=True)
        enter = f'echo $$ > {self.cgroup}/cgroup.procs && exec "$@"'
        with log.open("ab") as output:
            self.processes.append(
                subprocess.Popen(
                    self.node.inside("bash", "-c", enter, "bash", *(command or (sys.executable, str(SCRIPT)))),
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=output,
                )
            )

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for line in (self.cgroup / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):  # a rank that ended meanwhile
                os.kill(int(line), signal.SIGKILL)
        for process in self.processes:
            process.wait()
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            try:
                self.cgroup.rmdir()
                self.cgroup.parent.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def make_namespace(server: ApiServer, name: str) -> None:
    if not server.admin.is_served(f"/api/v1/namespaces/{name}"):
        server.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})


def make_pod(
    server: ApiServer,
    namespace: str,
    name: str,
    node: str,
    labels: dict[str, str],
    *,
    owner: dict[str, Any] | None = None,
    ports: list[dict[str, Any]] | None = None,
    address: str = "10.1.2.3",
    annotations: dict[str, str] | None = None,
) -> str:
    """A running pod; its uid."""
    container: dict[str, Any] = {"name": "main", "image": "registry.example/train:1"}
    if ports:
        container["ports"] = ports
    metadata: dict[str, Any] = {"name": name, "labels": labels, "annotations": annotations or {}}
    if owner is not None:
        metadata["ownerReferences"] = [owner]
    path = f"/api/v1/namespaces/{namespace}/pods"
    made = server.admin.create(path, {"metadata": metadata, "spec": {"containers": [container], "nodeName": node}})
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    server.admin.merge(f"{path}/{name}/status", {"status": status})
    return str(made["metadata"]["uid"])


def delete_pod(server: ApiServer, namespace: str, name: str) -> None:
    server.admin.delete(f"/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds=0")


@dataclass
class TrainingJob:
    """A real DDP job over pods on several nodes: rank r in pod r // ranks_per_pod."""

    server: ApiServer
    namespace: str
    name: str
    nodes: list[Node]
    folder: Path
    ranks_per_pod: int = 2
    slow_rank: int = -1
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))  # of the PyTorchJob
    pods: list[TrainingPod] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        port = free_port()
        world_size = self.ranks_per_pod * len(self.nodes)
        owner = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }
        for index, node in enumerate(self.nodes):
            labels = {
                "training.kubeflow.org/job-name": self.name,
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": str(index),
            }
            name = f"{self.name}-worker-{index}"
            uid = make_pod(self.server, self.namespace, name, node.name, labels, owner=owner)
            pod = TrainingPod(name, uid, node)
            self.pods.append(pod)
            for local_rank in range(self.ranks_per_pod):
                rank = index * self.ranks_per_pod + local_rank
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_WORLD_SIZE": str(self.ranks_per_pod),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": self.name,
                    "RANKSCOPE_PROBE": "1",
                    "JOB_FOLDER": str(self.folder),
                    "SLOW_RANK": str(self.slow_rank),
                }
                pod.run(environment, self.folder / f"rank{rank}.log")
        wait_until((self.folder / "READY").exists, seconds=300.0)

    def stop(self) -> None:
        (self.folder / "STOP").touch()
        for pod in self.pods:
            pod.stop()
