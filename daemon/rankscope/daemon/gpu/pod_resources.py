"""Which pod has which GPU, by the kubelet's pod-resources API (v1 List). A thread polls its socket."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import grpc

from rankscope.kubelet.pod_resources_pb2 import ListPodResourcesRequest, ListPodResourcesResponse
from rankscope.kubelet.pod_resources_pb2_grpc import PodResourcesListerStub

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 16 << 20
NAME_CHARACTERS: Final = 253  # the longest a name may be in Kubernetes
GPU_RESOURCES: Final = ("nvidia.com/", "amd.com/")


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str


NO_PODS: Final[Mapping[str, Pod]] = {}


class PodSource(Protocol):
    """`latest` does not block."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def latest(self) -> Mapping[str, Pod]:
        """Pods by the UUID of a GPU that no other pod has."""
        ...


class MalformedAnswerError(ValueError):
    """A name in the kubelet's answer cannot be a Kubernetes name."""


class KubeletPods:
    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._pods: Mapping[str, Pod] = NO_PODS
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-kubelet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()

    def latest(self) -> Mapping[str, Pod]:
        return self._pods

    def _run(self) -> None:
        logged = ""
        while not self._stopping.is_set():
            try:
                self._pods = self._ask() if self._socket.is_socket() else NO_PODS
                logged = ""
            except (grpc.RpcError, MalformedAnswerError, OSError) as error:
                self._pods = NO_PODS
                reason = error.code().name if isinstance(error, grpc.RpcError) else str(error)
                if reason != logged:
                    log.warning("%s: pods of GPUs are not known: %s", self._socket, reason[:200])
                logged = reason
            self._stopping.wait(ASK_SECONDS)

    def _ask(self) -> Mapping[str, Pod]:
        options = [("grpc.max_receive_message_length", ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            stub = PodResourcesListerStub(channel)
            return pods_by_device(stub.List(ListPodResourcesRequest(), timeout=ANSWER_SECONDS))


def pods_by_device(answer: ListPodResourcesResponse) -> Mapping[str, Pod]:
    """A device that two pods have (time slicing) is left out."""
    owners: dict[str, Pod | None] = {}
    for pod in answer.pod_resources:
        owner = Pod(_checked(pod.name), _checked(pod.namespace))
        for container in pod.containers:
            for devices in container.devices:
                if not devices.resource_name.startswith(GPU_RESOURCES):
                    continue
                for identifier in devices.device_ids:
                    # A time-sliced GPU is "GPU-…::3".
                    device = _checked(identifier).partition("::")[0]
                    owners[device] = owner if owners.get(device, owner) == owner else None
    return {device: owner for device, owner in owners.items() if owner is not None and owner.name}


def _checked(name: str) -> str:
    if len(name) > NAME_CHARACTERS or not name.isprintable():
        raise MalformedAnswerError("a name is too long or not printable")
    return name
