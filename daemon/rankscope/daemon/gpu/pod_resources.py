"""Which pod the kubelet gave which GPU: its pod-resources socket (v1 List), asked now and then in a thread of its own.

The answer is read field by field: five fields of it matter, and they are not worth another generated contract."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import grpc

log = logging.getLogger(__name__)

LIST: Final = "/v1.PodResourcesLister/List"
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
    """Asking it never blocks."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def latest(self) -> Mapping[str, Pod]:
        """Pods by the uuid of a GPU that is theirs alone."""
        ...


class MalformedAnswerError(ValueError):
    """The kubelet's answer is not what v1 says."""


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
        told = ""
        while not self._stopping.is_set():
            try:
                self._pods = self._ask() if self._socket.is_socket() else NO_PODS
                told = ""
            except (grpc.RpcError, MalformedAnswerError, OSError) as error:
                self._pods = NO_PODS
                reason = error.code().name if isinstance(error, grpc.RpcError) else str(error)
                if reason != told:
                    log.warning("%s: pods of GPUs are not known: %s", self._socket, reason[:200])
                told = reason
            self._stopping.wait(ASK_SECONDS)

    def _ask(self) -> Mapping[str, Pod]:
        options = [("grpc.max_receive_message_length", ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            ask = channel.unary_unary(LIST, request_serializer=bytes, response_deserializer=bytes)
            return parse_pods(ask(b"", timeout=ANSWER_SECONDS))


def parse_pods(answer: bytes) -> Mapping[str, Pod]:
    """A device that two pods have (time slicing) is nobody's."""
    owners: dict[str, Pod | None] = {}
    for number, pod_bytes in _messages(answer):
        if number != 1:
            continue
        name = namespace = ""
        devices: list[str] = []
        for field, value in _messages(pod_bytes):
            if field == 1:
                name = _text(value)
            elif field == 2:
                namespace = _text(value)
            elif field == 3:
                devices += _devices(value)
        pod = Pod(name, namespace)
        for device in devices:
            owners[device] = pod if owners.get(device, pod) == pod else None
    return {device: pod for device, pod in owners.items() if pod is not None and pod.name}


def _devices(container: bytes) -> list[str]:
    found = []
    for field, device_bytes in _messages(container):
        if field != 2:
            continue
        resource, ids = "", []
        for inner, value in _messages(device_bytes):
            if inner == 1:
                resource = _text(value)
            elif inner == 2:
                ids.append(_text(value))
        if resource.startswith(GPU_RESOURCES):
            # A GPU that is sliced by time is "GPU-…::3".
            found += [identifier.partition("::")[0] for identifier in ids]
    return found


def _text(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        raise MalformedAnswerError("a name is not UTF-8") from error
    if len(text) > NAME_CHARACTERS or not text.isprintable():
        raise MalformedAnswerError("a name is too long or not printable")
    return text


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Length-delimited fields of one message; the others are passed over."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise MalformedAnswerError("a field is longer than the answer")
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise MalformedAnswerError(f"wire type {kind}")
    if at > len(data):
        raise MalformedAnswerError("the answer ends within a field")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedAnswerError("a number has no end")
