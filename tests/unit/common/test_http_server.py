from __future__ import annotations

import contextlib
import http.client
import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.common import http_server
from rankscope.common.http_server import HEAD_BYTES, HttpServer, Limits, Request, Response, Route, is_loopback
from rankscope.common.tls import FollowedTls, TlsMaterial, files
from tests.certificates import Authority, Pair
from tests.free_ports import free_port
from tests.support.waiting import wait_until

AT_ONCE = 8
LIMIT_SECONDS = 180.0


BODY_BYTES = 3 << 20


def echo(request: Request) -> Response:
    return Response(200, request.body)


ROUTES = {("GET", "/"): Route(lambda request: Response(200, b"x" * 1000)), ("POST", "/"): Route(echo, BODY_BYTES)}
Start = Callable[..., HttpServer]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may stand still for seconds; what ends in these tests is ended by another limit."""
    monkeypatch.setattr(http_server, "SILENCE_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(http_server._Handler, "timeout", LIMIT_SECONDS)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which servers are ahead of this machine's clock."""
    ahead = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead[0], thread_time=time.thread_time, sleep=time.sleep
    )
    monkeypatch.setattr(http_server, "time", clock)
    return ahead


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[HttpServer] = []

    def start(tls: FollowedTls | None = None, **limits: float) -> HttpServer:
        made.append(HttpServer("127.0.0.1", 0, ROUTES, tls, Limits(**{"connections": AT_ONCE, **limits})))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield start
    for server in made:
        server.stop()


def connect(server: HttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), LIMIT_SECONDS)


def ask(server: HttpServer, method: str = "GET", body: bytes | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_SECONDS)
    connection.request(method, "/", body)
    return connection.getresponse().read()


def ended(connection: socket.socket) -> bytes:
    """What was still said before the server hung up."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            said += part
    return said


@pytest.mark.parametrize("opening", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nA: b\r\n"])
def test_any_number_of_unfinished_requests_blocks_nobody(start: Start, opening: bytes) -> None:
    server = start()
    slow = [connect(server) for _ in range(5 * AT_ONCE)]
    for one in slow:
        one.sendall(opening)
    for _ in range(3):
        assert len(ask(server)) == 1000
    assert ended(slow[0]) == b""  # the longest made room
    for one in slow:
        one.close()


def test_byte_after_byte_gets_no_longer_than_all_at_once(start: Start) -> None:
    server = start(request_seconds=1.0)
    begin = time.monotonic()
    with connect(server) as trickling:
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < LIMIT_SECONDS:
                trickling.sendall(b"G")  # each is in time for the socket's own limit
                trickling.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    if not trickling.recv(1):
                        break
        assert time.monotonic() - begin < LIMIT_SECONDS
    server.limits = Limits()
    assert len(ask(server)) == 1000


def test_slow_bodies_are_cut_off_but_slow_handlers_are_not(start: Start, later: list[float]) -> None:
    server = start(request_seconds=1.0)
    with connect(server) as slow:
        slow.sendall(b"POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nab")
        assert b"200" not in ended(slow)

    looks = threading.Semaphore(0)

    class Watched(HttpServer):
        def service_actions(self) -> None:
            super().service_actions()
            looks.release()

    def think(request: Request) -> Response:
        later[0] += 2 * LIMIT_SECONDS
        while looks.acquire(blocking=False):
            pass
        for _ in range(3):  # the first may have begun before
            assert looks.acquire(timeout=LIMIT_SECONDS)
        return Response(200, request.body)

    limits = Limits(request_seconds=LIMIT_SECONDS)
    thoughtful = Watched("127.0.0.1", 0, {("POST", "/"): Route(think, 10)}, limits=limits)
    thoughtful.start()
    assert ask(thoughtful, "POST", b"ab") == b"ab"
    thoughtful.stop()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * (2 * HEAD_BYTES) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * (2 * HEAD_BYTES) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: bc\r\n" * HEAD_BYTES + b"\r\n",
    ],
)
def test_an_oversized_head_is_refused_without_repeating_it(start: Start, head: bytes) -> None:
    server = start()
    with connect(server) as loud:
        with contextlib.suppress(OSError):
            loud.sendall(head)
        answer = ended(loud)
    assert answer == b"" or (b" 431 " in answer and b"xxx" not in answer)
    assert len(ask(server)) == 1000


def test_nonsense_is_refused_without_being_repeated(start: Start) -> None:
    server = start()
    for nonsense in (b"<script>secret</script>\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"BREW / HTTP/1.1\r\n\r\n"):
        with connect(server) as odd:
            odd.sendall(nonsense)
            answer = ended(odd)
            assert any(code in answer[:12] for code in (b"400", b"505", b"501"))
            assert b"secret" not in answer
            assert b"Python" not in answer


def test_a_tls_client_on_a_plain_port_gets_400(start: Start) -> None:
    server = start(request_seconds=LIMIT_SECONDS)
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="a").do_handshake()
    with connect(server) as secure:
        secure.sendall(hello.read())  # and waits for the server's part
        assert ended(secure).startswith(b"HTTP/1.1 400")


def tls_context(authority: Authority, shown: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context


def certificate_of(server: HttpServer, context: ssl.SSLContext) -> bytes | None:
    with connect(server) as plain, context.wrap_socket(plain, server_hostname="server") as wrapped:
        wrapped.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200 OK" in wrapped.recv(4096)
        return wrapped.getpeercert(binary_form=True)


def test_new_certificates_serve_new_connections_only_when_complete(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    own, fresh = authority.issue("server", "server"), authority.issue("fresh", "server")
    server = start(FollowedTls(files(own.certificate, own.key)))
    before = certificate_of(server, tls_context(authority))
    shutil.copy(fresh.certificate, own.certificate)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert certificate_of(server, tls_context(authority)) == before
    assert len(caplog.records) == 1
    shutil.copy(fresh.key, own.key)
    assert certificate_of(server, tls_context(authority)) != before


def test_plaintext_silent_and_untrusted_clients_get_nothing_and_block_nobody(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    own = authority.issue("server", "server")
    server = start(FollowedTls(files(own.certificate, own.key, authority.certificate)))
    silent = [connect(server) for _ in range(3 * AT_ONCE)]
    with connect(server) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in ended(plain)
    for stranger in 2 * (other.issue("x", "x"), authority.issue("late", "x", lasts=timedelta(days=-1))):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            certificate_of(server, tls_context(authority, stranger))
    told = [line for line in caplog.messages if line.startswith(f"port {server.port}: ")]
    assert len(told) == len(set(told)) == 2, told  # plain text, and certificates that cannot be verified
    assert certificate_of(server, tls_context(authority))
    assert certificate_of(server, tls_context(authority, authority.issue("known", "known")))
    for one in silent:
        one.close()


def test_the_end_of_an_answer_is_told_in_tls_too(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("server", "server")
    server = start(FollowedTls(files(own.certificate, own.key)))
    context = tls_context(authority)
    with (
        connect(server) as plain,
        context.wrap_socket(plain, server_hostname="server", suppress_ragged_eofs=False) as wrapped,
    ):
        wrapped.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200 OK" in ended(wrapped)


def test_until_there_is_a_certificate_nobody_is_served(start: Start, tmp_path: Path) -> None:
    held: list[TlsMaterial] = []
    server = start(FollowedTls(lambda: held[0] if held else None))
    with connect(server) as early:
        early.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert ended(early) == b""
    authority = Authority(tmp_path)
    pair = authority.issue("server", "server")
    held.append(TlsMaterial(pair.certificate.read_bytes(), pair.key.read_bytes()))
    assert certificate_of(server, tls_context(authority))


@pytest.fixture
def keeping(start: Start, tmp_path: Path) -> tuple[HttpServer, ssl.SSLContext]:
    """A server with TLS that keeps connections open, as webhooks need."""
    authority = Authority(tmp_path)
    own = authority.issue("server", "server", ("127.0.0.1", "server"))
    context = tls_context(authority)
    context.check_hostname = False
    return start(FollowedTls(files(own.certificate, own.key)), idle_seconds=60.0, buffered_bytes=8 << 20), context


def post(held: http.client.HTTPConnection, body: bytes = b"{}") -> tuple[int, bytes]:
    held.request("POST", "/", body)
    answer = held.getresponse()
    return answer.status, answer.read()


def secure(keeping: tuple[HttpServer, ssl.SSLContext]) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("127.0.0.1", keeping[0].port, timeout=LIMIT_SECONDS, context=keeping[1])


def raw(keeping: tuple[HttpServer, ssl.SSLContext]) -> ssl.SSLSocket:
    return keeping[1].wrap_socket(connect(keeping[0]))


def test_a_kept_connection_carries_many_requests_of_any_allowed_size(
    keeping: tuple[HttpServer, ssl.SSLContext],
) -> None:
    held = secure(keeping)
    for size in (0, 2, BODY_BYTES, 5):
        assert post(held, b"x" * size) == (200, b"x" * size)
        assert held.sock is not None


@pytest.mark.acceptance
def test_a_kept_connection_does_not_wait_for_acknowledgements(keeping: tuple[HttpServer, ssl.SSLContext]) -> None:
    held = secure(keeping)
    took: list[float] = []
    give_up = time.monotonic() + LIMIT_SECONDS
    # A delayed ACK takes 40 ms. The first are not delayed, and a busy machine delays some.
    while sum(seconds < 0.035 for seconds in took[30:]) < 10:
        assert time.monotonic() < give_up, sorted(took)
        begin = time.monotonic()
        assert post(held, b"x" * 5000)[0] == 200
        took.append(time.monotonic() - begin)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"PUT / HTTP/1.1\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length : 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nA: b\r\n Content-Length: 2\r\nContent-Length: 3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"\x00\xff\r\n\r\n", 400),
    ],
)
def test_a_request_that_is_refused_ends_a_kept_connection(
    keeping: tuple[HttpServer, ssl.SSLContext], request_bytes: bytes, status: int
) -> None:
    with raw(keeping) as held:
        held.sendall(request_bytes)
        assert ended(held).startswith(b"HTTP/1.1 %d " % status)
    assert post(secure(keeping))[0] == 200


def test_silent_slow_and_greedy_clients_keep_no_kept_connection_waiting(
    keeping: tuple[HttpServer, ssl.SSLContext],
) -> None:
    # Some send nothing of TLS, some stop within a head, some promise a body that never comes, some stay idle.
    silent = [connect(keeping[0]) for _ in range(20)]
    slow: list[ssl.SSLSocket] = []
    for opening in 6 * (
        b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\nx",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx",
    ):
        slow.append(raw(keeping))
        with contextlib.suppress(OSError):  # had to make room
            slow[-1].sendall(opening)
    kept = secure(keeping)
    for _ in range(3):
        assert post(kept)[0] == 200
    for held in (*silent, *slow):
        held.close()


def test_bodies_that_are_too_much_together_are_refused(start: Start) -> None:
    server = start(buffered_bytes=100_000)
    assert len(ask(server, "POST", b"x" * 90_000)) == 90_000
    with connect(server) as greedy:
        greedy.sendall(b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 120_000)
        assert greedy.recv(4096).startswith(b"HTTP/1.1 503 ")
    assert len(ask(server, "POST", b"x" * 90_000)) == 90_000


def test_closing_lets_a_request_under_way_have_its_answer() -> None:
    entered, may_go = threading.Event(), threading.Event()

    def handle(request: Request) -> Response:
        entered.set()
        may_go.wait(LIMIT_SECONDS)
        return Response(200, b"done")

    server = HttpServer("127.0.0.1", 0, {("GET", "/"): Route(handle)})
    server.start()
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server)))
    asking.start()
    entered.wait(LIMIT_SECONDS)
    closing = threading.Thread(target=server.stop)
    closing.start()
    time.sleep(0.3)
    may_go.set()
    asking.join(LIMIT_SECONDS)
    closing.join(LIMIT_SECONDS)
    assert answers == [b"done"]


def test_a_handler_that_fails_is_answered_with_500() -> None:
    def fail(request: Request) -> Response:
        raise OSError("a secret")

    server = HttpServer("127.0.0.1", 0, {("GET", "/"): Route(fail)})
    server.start()
    assert b"secret" not in ask(server)
    server.stop()


def test_threads_end_with_their_callers(start: Start, later: list[float]) -> None:
    server = start(request_seconds=LIMIT_SECONDS)

    def threads() -> int:
        return sum(thread.name == f"rankscope-http-{server.port}" for thread in threading.enumerate())

    callers = [connect(server) for _ in range(4 * AT_ONCE)]
    assert len(ask(server)) == 1000
    assert 0 < threads() <= 2 * AT_ONCE
    later[0] += 2 * LIMIT_SECONDS
    wait_until(lambda: not threads())
    for one in callers:
        one.close()


def test_an_ending_thread_is_awaited_by_attempts_not_the_clock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    for free_at, is_allowed in ((http_server.THREAD_LOOKS, True), (http_server.THREAD_LOOKS + 1, False)):
        waits: list[float] = []

        def acquire(timeout: float, waits: list[float] = waits, free_at: int = free_at) -> bool:
            waits.append(timeout)
            return len(waits) == free_at

        monkeypatch.setattr(server, "_threads", SimpleNamespace(acquire=acquire))
        assert server._may_start_thread() is is_allowed
        assert sum(waits) == pytest.approx(http_server.THREAD_SECONDS)


def test_a_name_that_begins_like_loopback_is_anybodys() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")] == [True] * 5
    reachable = ("127.example.com", "0.0.0.0", "::", "10.0.0.1", "node", "", "localhost.example.com")
    assert not any(map(is_loopback, reachable))


def test_a_restarted_server_gets_its_port_despite_lingering_connections() -> None:
    port = free_port()
    for _ in range(20):
        server = HttpServer("127.0.0.1", port, ROUTES)
        server.start()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_SECONDS)
        try:
            connection.request("GET", "/")
            # The server closes first, so the connection lingers on its side.
            assert connection.getresponse().read() == b"x" * 1000
        finally:
            server.stop()
            connection.close()


def test_two_servers_do_not_share_a_port(start: Start) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", start().port, ROUTES)
