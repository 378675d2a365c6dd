"""The kubelet's answer on its pod-resources socket."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from rankscope.daemon.gpu.attribution import NAME_CHARACTERS, MalformedAnswerError, pods_by_device
from rankscope.kubelet.pod_resources_pb2 import ListPodResourcesResponse
from tests.fuzz.checking import check_text
from tests.fuzz.targets import recorded

SEEDS = recorded("kubelet")
TOKENS = [
    b"\x0a",
    b"\x12",
    b"\x1a",
    b"nvidia.com/gpu",
    b"GPU-",
    b"::",
    b"\xff\xff\xff\xff\x0f",
    b"\xff" * 9 + b"\x01",
    b"\x80",
]


def run(data: bytes) -> None:
    try:
        pods = pods_by_device(ListPodResourcesResponse.FromString(data))
    except (DecodeError, MalformedAnswerError) as error:
        assert len(str(error)) < 200
        return
    assert len(pods) <= len(data)
    for device, pod in pods.items():
        check_text(device, NAME_CHARACTERS)
        check_text(pod.name, NAME_CHARACTERS)
        check_text(pod.namespace, NAME_CHARACTERS)
        assert pod.name
