from __future__ import annotations

import contextlib
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.daemon.gpu.pod_resources import LIST, NO_PODS, KubeletPods, MalformedAnswerError, Pod, parse_pods
from tests.integration.daemon_process import wait_until


def field(number: int, content: bytes | str) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2]) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def pod(name: str, *devices: str, resource: str = "nvidia.com/gpu") -> bytes:
    held = field(1, resource) + b"".join(field(2, device) for device in devices)
    # With what else v1 has: cpu ids (packed), memory, a number.
    container = field(1, "main") + field(2, held) + field(3, b"\x01\x02") + bytes([5 << 3, 7])
    return field(1, field(1, name) + field(2, "research") + field(3, container))


def test_devices_lead_to_pods() -> None:
    answer = pod("a", "GPU-1", "GPU-2") + pod("b", "MIG-3") + pod("c", "rdma-0", resource="rdma/hca")
    assert parse_pods(answer) == {
        "GPU-1": Pod("a", "research"),
        "GPU-2": Pod("a", "research"),
        "MIG-3": Pod("b", "research"),
    }


def test_a_gpu_that_pods_share_is_nobodys() -> None:
    assert parse_pods(pod("a", "GPU-1::0") + pod("b", "GPU-1::1") + pod("a", "GPU-2::0", "GPU-2::1")) == {
        "GPU-2": Pod("a", "research")
    }


@pytest.mark.parametrize(
    "answer", [b"\xff" * 11, field(1, b"x")[:-1] + b"", b"\x0a\x7f", b"\x0b", pod("a\nb", "GPU-1")]
)
def test_a_malformed_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        parse_pods(answer)


@given(st.binary(max_size=200))
def test_no_answer_breaks_the_reader(answer: bytes) -> None:
    with contextlib.suppress(MalformedAnswerError):
        parse_pods(answer)


def test_a_socket_that_is_missing_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pods = KubeletPods(tmp_path / "none.sock")
    pods.start()
    assert pods.latest() == NO_PODS
    pods.close()
    assert not caplog.records


def test_a_kubelet_is_asked_over_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: pod("trainer-0", "GPU-1"))
    service, name = LIST.strip("/").split("/")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    pods = KubeletPods(path)
    pods.start()
    try:
        wait_until(lambda: pods.latest() == {"GPU-1": Pod("trainer-0", "research")}, pods.latest)
    finally:
        pods.close()
        server.stop(None)
