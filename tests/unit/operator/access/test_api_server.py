"""The API's port: TLS that follows its files, and callers that are slow, silent or many."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankscope.common.tls import FollowedTls, Read, TlsMaterial, files
from rankscope.operator.access import api_server as people_serving
from rankscope.operator.access.api_server import UserApiServer, UserApiSettings
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.certificates import Authority
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import Cluster, begun, refusal

NAME = "rankscope-api.rankscope.svc"
METHOD = "/rankscope.v1.CaptureService/GetCapture"
GET = pb.GetCaptureRequest(id="lab/mine")
Start = Callable[[Read], UserApiServer]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Start]:
    started: list[UserApiServer] = []

    def serve(read: Read) -> UserApiServer:
        server = UserApiServer(
            UserApiSettings("127.0.0.1", 0), [cluster.captures.handler(cluster.guard)], FollowedTls(read)
        )
        started.append(server)
        server.start()
        return server

    yield serve
    for server in started:
        server.stop()


@contextlib.contextmanager
def channel(server: UserApiServer, authority: Authority) -> Iterator[grpc.Channel]:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    options = [("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"127.0.0.1:{server.port}", credentials, options) as made:
        yield made


def shown(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def found(server: UserApiServer, authority: Authority, token: str) -> str:
    with channel(server, authority) as opened:
        answer = CaptureServiceStub(opened).GetCapture(GET, metadata=shown(token), timeout=30)
        return str(answer.capture.id)


def certificate_of(server: UserApiServer) -> bytes:
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=30).encode()


def test_a_certificate_change_serves_new_connections_once_complete(
    cluster: Cluster, authority: Authority, start: Start
) -> None:
    token = begun(cluster)
    pair = authority.issue("api", NAME)
    server = start(files(pair.certificate, pair.key))
    assert found(server, authority, token) == "lab/mine"
    with channel(server, authority) as before:
        stub = CaptureServiceStub(before)
        stub.GetCapture(GET, metadata=shown(token), timeout=30)
        first = certificate_of(server)
        other = authority.issue("other", NAME)
        pair.certificate.write_bytes(other.certificate.read_bytes())  # and not yet the key
        assert certificate_of(server) == first
        pair.key.write_bytes(other.key.read_bytes())
        assert certificate_of(server) == other.certificate.read_bytes() != first
        stub.GetCapture(GET, metadata=shown(token), timeout=30)


def test_a_certificate_that_is_still_being_made_is_waited_for(
    cluster: Cluster, authority: Authority, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people_serving, "PAUSE_SECONDS", 0.05)
    token = begun(cluster)
    held: list[TlsMaterial] = []
    server = start(lambda: held[-1] if held else None)
    assert server.port == 0
    pair = authority.issue("api", NAME)
    held.append(TlsMaterial(pair.certificate.read_bytes(), pair.key.read_bytes()))
    wait_until(lambda: server.port)
    assert found(server, authority, token) == "lab/mine"


def test_files_that_are_no_pair_are_told_at_the_start(authority: Authority, start: Start) -> None:
    one, other = authority.issue("one", NAME), authority.issue("other", NAME)
    with pytest.raises(ValueError, match="not a usable pair"):
        start(files(one.certificate, other.key))
    with pytest.raises(ValueError, match="No such file"):
        start(files(one.certificate, one.key.with_name("none")))


def test_an_address_that_is_taken_is_told(cluster: Cluster) -> None:
    settings = UserApiSettings("127.0.0.1", cluster.server.port)
    with pytest.raises(ValueError, match="is taken"):
        UserApiServer(settings, [cluster.captures.handler(cluster.guard)], None).start()


def test_plain_text_tokens_and_expired_certificates_are_refused(
    cluster: Cluster, authority: Authority, start: Start
) -> None:
    token = begun(cluster)
    pair = authority.issue("api", NAME)
    server = start(files(pair.certificate, pair.key))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as plain:
        error = refusal(lambda: CaptureServiceStub(plain).GetCapture(GET, metadata=shown(token), timeout=30))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert found(server, authority, token) == "lab/mine"
    authority.issue("api", NAME, lasts=timedelta(days=-1))
    with channel(server, authority) as opened:
        error = refusal(lambda: CaptureServiceStub(opened).GetCapture(GET, metadata=shown(token), timeout=30))
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "CERTIFICATE_VERIFY_FAILED" in error.details()


@pytest.mark.parametrize("opening", [b"", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_connections_without_a_handshake_hold_nobody_up(
    cluster: Cluster, authority: Authority, start: Start, opening: bytes
) -> None:
    token = begun(cluster)
    pair = authority.issue("api", NAME)
    server = start(files(pair.certificate, pair.key))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 30))
            one.sendall(opening)
        assert found(server, authority, token) == "lab/mine"


def test_unfinished_calls_take_only_their_callers_share(cluster: Cluster, authority: Authority, start: Start) -> None:
    """More of them than there are threads, by strangers and by one who may come in."""
    ada, mallory = begun(cluster), cluster.may("mallory", "get")
    pair = authority.issue("api", NAME)
    server = start(files(pair.certificate, pair.key))
    silent = threading.Event()

    def never() -> Iterator[bytes]:
        silent.wait(120)
        yield from ()

    calls: list[Any] = []
    with contextlib.ExitStack() as stack:
        # One connection has 32 calls at most.
        for metadata in ([], shown("forged"), shown(mallory)):
            for _ in range(2):
                opened = stack.enter_context(channel(server, authority))
                method = opened.stream_unary(METHOD)
                calls += [method.future(never(), metadata=metadata, timeout=120) for _ in range(32)]
        wait_until(lambda: sum(call.done() for call in calls) >= 2 * 64 + 64 - 16)
        assert found(server, authority, ada) == "lab/mine"
        waiting = [call for call in calls if not call.done()]
        assert len(waiting) <= 16
        silent.set()
        for call in waiting:
            call.cancel()
