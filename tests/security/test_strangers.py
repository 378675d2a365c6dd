"""Who gets in: an operator of our authority, and nobody else, whatever they show and whatever they call."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import timedelta

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rankscope.common.http_server import is_loopback
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.certificates import Pair
from tests.listening_sockets import listening
from tests.security.attacked import DAEMON, METRICS, OPERATOR, PATIENCE_SECONDS, Attacked
from tests.security.http2 import END_HEADERS, HEADERS, Connection, call_headers, frame


def refusal(channel: grpc.Channel, method: str = "", body: bytes = b"") -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        if method:
            list(channel.unary_stream(method)(body, timeout=PATIENCE_SECONDS))
        else:
            RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=PATIENCE_SECONDS)
    return raised.value.code(), raised.value.details() or ""


def methods(attacked: Attacked) -> Iterator[str]:
    """All that it serves, as it says itself: a new one is tried without a new test."""
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with attacked.channel(attacked.operator) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (listed,) = stub.ServerReflectionInfo(iter(requests), timeout=PATIENCE_SECONDS)
        for service in listed.list_services_response.service:
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name)
            (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=PATIENCE_SECONDS)
            for raw in answer.file_descriptor_response.file_descriptor_proto:
                file = FileDescriptorProto.FromString(raw)
                for described in file.service:
                    if f"{file.package}.{described.name}" == service.name:
                        yield from (f"/{service.name}/{method.name}" for method in described.method)


def test_missing_expired_or_foreign_certificates_and_plain_text_are_refused(attacked: Attacked) -> None:
    expired = attacked.authority.issue("expired", OPERATOR, lasts=timedelta(days=-1))
    foreign = attacked.other_authority.issue("operator", OPERATOR)
    for pair in (None, expired, foreign, None):
        with attacked.channel(pair) as channel:
            code, text = refusal(channel)
        assert code is grpc.StatusCode.UNAVAILABLE
        attacked.check_manners(text)
    with grpc.insecure_channel(f"127.0.0.1:{attacked.port}") as plain:
        assert refusal(plain)[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("role", [DAEMON, METRICS, "rankscope-operator.rankscope.svc", f"{OPERATOR}\x00.example.com"])
def test_other_roles_are_denied_every_method_before_requests_are_read(attacked: Attacked, role: str) -> None:
    with attacked.channel(attacked.authority.issue("role", "x", (role,))) as channel:
        for method in [*methods(attacked), "/no.Such/Method"]:
            for body in (b"", b"\xff\xff\xff", b"\x0a\x04" + b"\xff" * 4):
                code, text = refusal(channel, method, body)
                assert code is grpc.StatusCode.PERMISSION_DENIED, method
                attacked.check_manners(text)
    attacked.wait_for_line(f"its certificate is of {role!r}")


def test_an_operators_garbage_is_refused_and_not_logged(attacked: Attacked) -> None:
    before = attacked.lines
    with attacked.channel(attacked.operator) as channel:
        for body in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):
            method = "/rankscope.v1.RankService/ListRanks"
            code, text = refusal(channel, method, body)
            assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be read")
    assert attacked.lines == before


def test_abandoned_calls_of_another_role_take_no_thread(attacked: Attacked) -> None:
    stolen = attacked.authority.issue("stolen", DAEMON)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(Connection(attacked, stolen)).begin()
            for stream in range(1, 101, 2):
                connection.send(frame(HEADERS, END_HEADERS, stream, call_headers()))
        attacked.wait_until_served()


def metrics_answer(attacked: Attacked, pair: Pair | None, path: str) -> bytes:
    context = ssl.create_default_context(cafile=str(attacked.authority.certificate))
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    with (
        socket.create_connection(("127.0.0.1", attacked.metrics_port), PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=DAEMON) as wrapped,
    ):
        wrapped.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        said = b""
        while part := wrapped.recv(65536):
            said += part
    return said


def test_tls_metrics_need_a_certificate_and_health_does_not(attacked: Attacked) -> None:
    issue = attacked.authority.issue
    for pair in (issue("metrics", METRICS), attacked.operator):
        assert b"rankscope_rank_info" in metrics_answer(attacked, pair, "/metrics")
    for _ in range(2):
        for pair in (None, issue("x", DAEMON)):
            answer = metrics_answer(attacked, pair, "/metrics")
            assert b" 403 " in answer
            attacked.check_manners(answer.decode())
            assert b" 200 " in metrics_answer(attacked, pair, "/healthz")
    attacked.wait_for_line("refused /metrics to 127.0.0.1: its certificate is of ''")
    attacked.wait_for_line(f"refused /metrics to 127.0.0.1: its certificate is of '{DAEMON}'")
    foreign = attacked.other_authority.issue("metrics", METRICS)
    expired = issue("old", METRICS, lasts=timedelta(days=-1))
    for pair in (foreign, expired, foreign):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            metrics_answer(attacked, pair, "/metrics")
    attacked.wait_for_line(f"port {attacked.metrics_port}: refused 127.0.0.1: certificate verify failed")
    for path in ("/metrics/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/metrics%00"):
        answer = metrics_answer(attacked, attacked.operator, path)
        assert b" 404 " in answer
        assert b"root:" not in answer


def test_only_documented_ports_listen_and_reachable_ones_use_tls(attacked: Attacked) -> None:
    found = listening(attacked.pid)
    documented = {attacked.port, attacked.metrics_port, attacked.console_port, attacked.alerts_port}
    assert {port for _, port in found} == documented
    for address, port in found:
        if not is_loopback(address):
            assert speaks_tls(port), (address, port)


def speaks_tls(port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as plain, context.wrap_socket(plain) as tls:
        return tls.getpeercert(binary_form=True) is not None
