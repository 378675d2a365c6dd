"""A real TLS server on a real port; its clients behave badly."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from rankscope.operator.certificates.authority import Certificates, Lifetimes, renewed
from rankscope.operator.webhooks import https_server as webhook_serving
from rankscope.operator.webhooks.https_server import BODY_BYTES_LIMIT, WebhookServer


def certificates() -> Certificates:
    return renewed(None, ("127.0.0.1",), True, datetime.now(timezone.utc), Lifetimes())


FIRST, SECOND = certificates(), certificates()


def trusting(*kept: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=b"".join(one.bundle for one in kept).decode())


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    made = WebhookServer("127.0.0.1", 0, lambda path, body: (200, path.encode() + b" " + str(len(body)).encode()))
    made.start()
    made.use(FIRST.serving, FIRST.serving_key)
    yield made
    made.stop()


def connection(server: WebhookServer, *trusted: Certificates) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", server.port, timeout=30, context=trusting(*trusted or (FIRST,)))


def post(held: http.client.HTTPSConnection, body: bytes = b"{}", path: str = "/validate") -> tuple[int, bytes]:
    held.request("POST", path, body)
    answer = held.getresponse()
    return answer.status, answer.read()


def raw(server: WebhookServer) -> ssl.SSLSocket:
    return trusting(FIRST).wrap_socket(
        socket.create_connection(("127.0.0.1", server.port), timeout=30), server_hostname="127.0.0.1"
    )


def test_a_connection_carries_many_requests_of_any_allowed_size(server: WebhookServer) -> None:
    held = connection(server)
    for size in (0, 2, BODY_BYTES_LIMIT, 5):
        assert post(held, b"x" * size) == (200, b"/validate %d" % size)


def test_new_certificates_hold_for_new_connections_and_old_connections_go_on(server: WebhookServer) -> None:
    held = connection(server)
    assert post(held)[0] == 200
    server.use(SECOND.serving, SECOND.serving_key)
    assert post(held)[0] == 200
    assert post(connection(server, SECOND))[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        post(connection(server, FIRST))


def test_half_a_pair_is_refused_and_what_there_was_goes_on(server: WebhookServer) -> None:
    for certificate, key in ((FIRST.serving, SECOND.serving_key), (b"", b""), (SECOND.serving, b"garbage")):
        with pytest.raises(ValueError, match="no pair"):
            server.use(certificate, key)
        assert post(connection(server))[0] == 200


def test_before_the_first_certificate_the_port_is_closed_not_silent() -> None:
    made = WebhookServer("127.0.0.1", 0, lambda path, body: (200, b""))
    made.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", made.port), timeout=10)
    made.stop()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 405),
        (b"POST / HTTP/1.1\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length : 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 400),
        (b"\x00\xff\r\n\r\n", 400),
    ],
)
def test_what_is_no_call_of_a_webhook_is_refused_and_the_connection_ended(
    server: WebhookServer, request_bytes: bytes, status: int
) -> None:
    with raw(server) as held:
        held.sendall(request_bytes)
        answer = b""
        while part := held.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert post(connection(server))[0] == 200


def test_a_head_without_an_end_ends_the_connection(server: WebhookServer) -> None:
    with raw(server) as held, pytest.raises(OSError):
        while True:
            held.sendall(b"a" * 65536)
    assert post(connection(server))[0] == 200


def test_silent_slow_and_greedy_clients_keep_nobody_waiting(
    server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_serving, "CONNECTIONS_LIMIT", 24)
    # Some say nothing even of TLS, some stop within a head, some promise a body that never comes.
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(20)]
    slow = [raw(server) for _ in range(30)]
    for number, held in enumerate(slow):
        half = b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n" + (b"\r\nx" if number % 2 else b"")
        try:
            held.sendall(half)
        except OSError:
            continue  # had to make room
    kept = connection(server)
    for _ in range(3):
        assert post(kept)[0] == 200
    assert len(server._connections) <= 24
    for held in (*silent, *slow):
        held.close()


def test_slow_clients_are_let_go(server: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_serving, "BODY_SECONDS", 0.2)
    with raw(server) as held:
        held.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nx")
        assert held.recv(100) == b""
    assert server._buffered_bytes == 0


def test_what_is_too_much_for_the_memory_is_turned_away(server: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_serving, "BUFFERED_BYTES_LIMIT", 100_000)
    assert post(connection(server), b"x" * 90_000)[0] == 200
    with raw(server) as held:
        held.sendall(b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 120_000)
        assert held.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert post(connection(server), b"x" * 90_000)[0] == 200


def test_stopping_lets_a_request_under_way_have_its_answer() -> None:
    entered, may_go = threading.Event(), threading.Event()

    def respond(path: str, body: bytes) -> tuple[int, bytes]:
        entered.set()
        may_go.wait(30)
        return 200, b"done"

    server = WebhookServer("127.0.0.1", 0, respond)
    server.start()
    server.use(FIRST.serving, FIRST.serving_key)
    answers: list[tuple[int, bytes]] = []
    asking = threading.Thread(target=lambda: answers.append(post(connection(server))))
    asking.start()
    entered.wait(30)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    time.sleep(0.1)
    may_go.set()
    asking.join(30)
    stopping.join(30)
    assert answers == [(200, b"done")]
