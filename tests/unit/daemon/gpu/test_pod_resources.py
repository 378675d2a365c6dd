from __future__ import annotations

from concurrent import futures
from pathlib import Path

import grpc
import pytest

from rankscope.daemon.gpu.attribution import NO_PODS, KubeletPods, MalformedAnswerError, Pod, pods_by_device
from rankscope.kubelet.pod_resources_pb2 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
)
from rankscope.kubelet.pod_resources_pb2_grpc import (
    PodResourcesListerServicer,
    add_PodResourcesListerServicer_to_server,
)
from tests.support.waiting import wait_until


def pod(name: str, *devices: str, resource: str = "nvidia.com/gpu") -> PodResources:
    held = ContainerDevices(resource_name=resource, device_ids=devices)
    return PodResources(name=name, namespace="research", containers=[ContainerResources(name="main", devices=[held])])


def answer(*pods: PodResources) -> ListPodResourcesResponse:
    return ListPodResourcesResponse(pod_resources=pods)


def test_devices_lead_to_pods() -> None:
    found = pods_by_device(
        answer(pod("a", "GPU-1", "GPU-2"), pod("b", "MIG-3"), pod("c", "hca-0", resource="rdma/hca"))
    )
    assert found == {"GPU-1": Pod("a", "research"), "GPU-2": Pod("a", "research"), "MIG-3": Pod("b", "research")}


def test_fields_and_numbers_are_those_of_the_kubelet() -> None:
    # As a kubelet sends them, with what else v1 has: cpu ids (packed), memory, a number.
    held = b"\x0a\x0envidia.com/gpu\x12\x05GPU-1"
    container = b"\x0a\x04main\x12" + bytes([len(held)]) + held + b"\x1a\x02\x01\x02\x22\x00\x28\x07"
    sent = b"\x0a\x01a\x12\x08research\x1a" + bytes([len(container)]) + container
    read = ListPodResourcesResponse.FromString(b"\x0a" + bytes([len(sent)]) + sent)
    assert pods_by_device(read) == {"GPU-1": Pod("a", "research")}


def test_a_gpu_that_pods_share_belongs_to_none() -> None:
    shared = answer(pod("a", "GPU-1::0"), pod("b", "GPU-1::1"), pod("a", "GPU-2::0", "GPU-2::1"))
    assert pods_by_device(shared) == {"GPU-2": Pod("a", "research")}


@pytest.mark.parametrize("malformed", [pod("a\nb", "GPU-1"), pod("a" * 254, "GPU-1"), pod("a", "GPU-\x1b[31m")])
def test_a_name_that_kubernetes_does_not_allow_is_refused(malformed: PodResources) -> None:
    with pytest.raises(MalformedAnswerError):
        pods_by_device(answer(malformed))


def test_a_socket_that_is_missing_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pods = KubeletPods(tmp_path / "none.sock")
    pods.start()
    assert pods.latest() == NO_PODS
    pods.close()
    assert not caplog.records


class Kubelet(PodResourcesListerServicer):
    def List(self, request: ListPodResourcesRequest, context: grpc.ServicerContext) -> ListPodResourcesResponse:
        return answer(pod("trainer-0", "GPU-1"))


def test_a_kubelet_is_asked_over_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    server = grpc.server(futures.ThreadPoolExecutor(1))
    add_PodResourcesListerServicer_to_server(Kubelet(), server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    pods = KubeletPods(path)
    pods.start()
    try:
        wait_until(lambda: pods.latest() == {"GPU-1": Pod("trainer-0", "research")}, pods.latest)
    finally:
        pods.close()
        server.stop(None)
