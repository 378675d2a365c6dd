"""Slow, silent, endless, oversized requests, with a certificate or without: an operator is still answered."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator

import pytest

from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.security.attacked import DAEMON, OPERATOR, PATIENCE_SECONDS, Attacked
from tests.security.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Connection,
    call_headers,
    field,
    frame,
)
from tests.support.waiting import wait_until

ODD = range(1, 4001, 2)  # streams of a client


@contextlib.contextmanager
def connected(port: int, number: int, opening: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(number):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
            one.sendall(opening)
            made.append(one)
        yield made


@pytest.mark.parametrize("opening", [b"", b"\x16\x03\x01\x02\x00\x01", PREFACE, b"GET / HTTP/1.1\r\n"])
def test_connections_without_a_handshake_hold_nobody_up(attacked: Attacked, opening: bytes) -> None:
    with connected(attacked.port, 200, opening):
        attacked.wait_until_served()


def silent(connection: Connection) -> None:
    """The handshake, and then nothing."""


def half_a_preface(connection: Connection) -> None:
    connection.send(PREFACE[:10])


def headers_without_an_end(connection: Connection) -> None:
    connection.begin().send(frame(HEADERS, 0, 1, call_headers()))


def a_message_without_an_end(connection: Connection) -> None:
    connection.begin().send(frame(HEADERS, END_HEADERS, 1, call_headers()))
    connection.send(frame(DATA, 0, 1, b"\x00\x00\x00\xff\xffa"))


@pytest.mark.parametrize("slow", [silent, half_a_preface, headers_without_an_end, a_message_without_an_end])
def test_even_with_a_stolen_certificate_silence_holds_nobody_up(
    attacked: Attacked, slow: Callable[[Connection], None]
) -> None:
    stolen = attacked.authority.issue("stolen", DAEMON)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            slow(stack.enter_context(Connection(attacked, stolen)))
        attacked.wait_until_served()


def endless_headers(connection: Connection) -> Iterator[bytes]:
    """CONTINUATION after CONTINUATION: 64 MiB of a head that never ends."""
    yield frame(HEADERS, 0, 1, call_headers())
    for number in range(4096):
        yield frame(CONTINUATION, 0, 1, field(f"x-{number}", "v" * 16000))


def huge_headers(connection: Connection) -> Iterator[bytes]:
    for stream in ODD[:200]:
        yield frame(HEADERS, 0, stream, call_headers() + field("x", "v" * 12000))
        yield frame(CONTINUATION, END_HEADERS, stream, field("y", "v" * 12000))


def settings_flood(connection: Connection) -> Iterator[bytes]:
    for number in range(200):
        yield frame(SETTINGS, 0, 0, b"\x00\x03" + (number + 1).to_bytes(4, "big")) * 100


def ping_flood(connection: Connection) -> Iterator[bytes]:
    for number in range(200):
        yield frame(PING, 0, 0, number.to_bytes(8, "big")) * 100


def rapid_resets(connection: Connection) -> Iterator[bytes]:
    for stream in ODD:
        yield frame(HEADERS, END_HEADERS, stream, call_headers()) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")


def streams_without_number(connection: Connection) -> Iterator[bytes]:
    for stream in ODD:
        yield frame(HEADERS, END_HEADERS, stream, call_headers())


def oversized_messages(connection: Connection) -> Iterator[bytes]:
    for stream in ODD[:50]:
        yield frame(HEADERS, END_HEADERS, stream, call_headers())
        yield frame(DATA, END_STREAM, stream, b"\x00\x7f\xff\xff\xff" + b"a" * 16000)


def empty_data(connection: Connection) -> Iterator[bytes]:
    yield frame(HEADERS, END_HEADERS, 1, call_headers())
    for _ in range(200):
        yield frame(DATA, 0, 1) * 100


FLOODS = (
    endless_headers,
    huge_headers,
    settings_flood,
    ping_flood,
    rapid_resets,
    streams_without_number,
    oversized_messages,
    empty_data,
)


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("role", [DAEMON, OPERATOR])
def test_a_flood_of_frames_costs_only_its_senders_connection(
    attacked: Attacked, flood: Callable[[Connection], Iterator[bytes]], role: str
) -> None:
    before, lines = attacked.resident_bytes, attacked.lines
    with Connection(attacked, attacked.authority.issue("flood", role)) as connection:
        connection.begin()
        # Nothing is read, or what is answered would slow us down.
        connection.socket.settimeout(5.0)
        for part in flood(connection):
            if not connection.send(part):
                break
        if role != OPERATOR:  # whose calls are the honest ones: they may wait for one another
            attacked.wait_until_served()
        assert attacked.resident_bytes - before < 64 << 20
    assert attacked.lines - lines <= 2


@pytest.mark.acceptance  # nobody is served for a few seconds only, which a busy machine may miss
def test_abandoned_operator_calls_are_ended_and_others_served_again(attacked: Attacked) -> None:
    with Connection(attacked, attacked.operator) as connection:
        connection.begin()
        for stream in ODD[:60]:
            connection.send(frame(HEADERS, END_HEADERS, stream, call_headers()))
        wait_until(lambda: not attacked.is_served(), lambda: attacked.log)
        attacked.wait_until_served(40.0)  # after a minute gRPC ends it by itself: nobody has acknowledged its settings


def test_excess_connections_are_closed_and_open_streams_continue(
    attacked: Attacked,
) -> None:
    with attacked.channel(attacked.operator) as channel:
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
        next(stream)
        with connected(attacked.port, 1100) as many:
            many[-1].settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert many[-1].recv(1) == b""
            for _ in range(3):
                assert next(stream).windows
        stream.cancel()
    attacked.wait_until_served()


HTTP_SLOW = (b"", b"GET /metrics HTTP/1.1\r\nA:", b"\x16\x03\x01")


@pytest.mark.parametrize("opening", HTTP_SLOW)
@pytest.mark.parametrize("listener", ["metrics", "alerts"])
def test_http_callers_that_do_not_finish_keep_nobody_out(attacked: Attacked, listener: str, opening: bytes) -> None:
    port = {"metrics": attacked.metrics_port, "alerts": attacked.alerts_port}[listener]
    with connected(port, 200, opening):
        context = ssl.create_default_context(cafile=str(attacked.authority.certificate))
        context.load_cert_chain(attacked.operator.certificate, attacked.operator.key)
        path = {"metrics": "/healthz", "alerts": "/api/v1/alerts"}[listener]
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=DAEMON) as wrapped,
        ):
            wrapped.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {attacked.token.decode()}\r\n\r\n".encode())
            assert b" 200 " in wrapped.recv(4096)
