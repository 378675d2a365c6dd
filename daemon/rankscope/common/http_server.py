"""The HTTP server of daemon and operator: routes, optional TLS, and limits for a port that many can reach.

A request has a time limit for all of it, not for each byte; its head and body have a size limit. When there are too
many connections, the one that has been waited for longest is closed: a caller that sends its request at once is served
in any flood."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler
from io import BufferedReader, BytesIO
from socketserver import TCPServer
from typing import Any, cast

from rankscope.common.tls import FollowedTls
from rankscope.common.token_bucket import TokenBucket

log = logging.getLogger(__name__)

HEAD_BYTES = 16 << 10
# The longest pause within a request, and within the TLS handshake.
SILENCE_SECONDS = 5.0
STOP_SECONDS = 3.0
THREAD_SECONDS, THREAD_LOOKS = 1.0, 10
MAX_REFUSALS = 256
# CPU time that was not used is kept for a burst.
BURST_SECONDS, PAUSE_SECONDS = 5.0, 0.5
TEXT, JSON = "text/plain; charset=utf-8", "application/json"
_REQUEST_LINE = re.compile(rb"[!-~]+ \S+( HTTP/\S+)?\r?\n")


@dataclass(frozen=True)
class Limits:
    """`idle_seconds` is how long a connection may wait for its next request; 0 closes it after the first."""

    connections: int = 64
    request_seconds: float = 20.0
    idle_seconds: float = 0.0
    buffered_bytes: int = 64 << 20  # of the bodies of all requests together
    core_ratio: float | None = None  # CPU time that requests may take, on average; those beyond it wait


@dataclass(frozen=True)
class Request:
    path: str  # without the query
    query: str
    headers: Message
    address: str
    certificate: bytes  # the caller's, in DER, verified; empty without one
    body: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes = b""
    content_type: str = TEXT
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """`check` is called before a body is read; what it returns is the answer. It must not block."""

    handle: Callable[[Request], Response]
    body_bytes: int = 0  # 0: the request has no body
    check: Callable[[Request], Response | None] = lambda request: None


Routes = Mapping[tuple[str, str], Route]  # by method and path


class RequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def body_length(headers: Message, limit: int) -> int:
    """Of a request with these headers. Raises RequestError. What two readers could understand differently is
    refused."""
    if headers.defects or any("\n" in str(value) or "\r" in str(value) for value in headers.values()):
        raise RequestError(400, "a header cannot be read")
    lengths = headers.get_all("Content-Length", [])
    if "Transfer-Encoding" in headers or not lengths:
        raise RequestError(411, "Content-Length is needed")
    if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 20):
        raise RequestError(400, "Content-Length is not a number")
    length = int(lengths[0])
    if length > limit:
        raise RequestError(413, f"a body of {length} bytes; at most {limit} are read")
    return length


class HttpServer(TCPServer):
    """Listens from construction on; port 0 chooses a free one. Raises OSError if it cannot. `tls` without a certificate
    yet closes every connection: nothing is sent in plain text."""

    request_queue_size = 128
    # Connections that have ended keep the port for a minute, during which a restarted service must get it.
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, routes: Routes, tls: FollowedTls | None = None, limits: Limits | None = None
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.routes = routes
        self.limits = limits or Limits()
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[_Caller, None] = {}  # the one that has waited longest first
        self._buffered_bytes = 0
        self._logged: set[tuple[str, str]] = set()
        self._threads = threading.BoundedSemaphore(2 * self.limits.connections)
        self._is_serving = self._is_stopping = False
        self._accepting_seconds = self._answering_seconds = 0.0  # CPU time
        self._spent_seconds = 0.0  # of the bucket
        ratio = self.limits.core_ratio
        self._cpu_bucket = None if ratio is None else TokenBucket(BURST_SECONDS * ratio, ratio)
        super().__init__((host, port), cast(Any, None))
        self.port = int(self.server_address[1])
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{shown_host}:{self.port}"

    def start(self) -> None:
        """Serves in a new thread until `stop`."""
        self._is_serving = True
        name, kwargs = f"rankscope-port-{self.port}", {"poll_interval": 0.2}
        threading.Thread(target=self.serve_forever, kwargs=kwargs, name=name, daemon=True).start()

    def stop(self) -> None:
        """Requests that were read are still answered, for a moment."""
        if self._is_serving:
            self.shutdown()
        self.server_close()
        give_up = time.monotonic() + STOP_SECONDS
        with self._lock:
            self._is_stopping = True
            waiting = [caller for caller in self._open if caller.until_monotonic is not None]
            for caller in waiting:
                caller.cut()
        while time.monotonic() < give_up:
            with self._lock:
                if not self._open:
                    return
            time.sleep(0.02)

    @property
    def cpu_seconds(self) -> float:
        """Taken since the start."""
        return self._accepting_seconds + self._answering_seconds

    def service_actions(self) -> None:
        """Called after each connection, and a few times a second: ends requests that take too long."""
        self._accepting_seconds = time.thread_time()
        now = time.monotonic()
        with self._lock:
            for caller in self._open:
                if caller.until_monotonic is not None and caller.until_monotonic <= now:
                    caller.cut()
        if self._cpu_bucket is not None:
            # New connections wait until the CPU time that was used is within its share of a core.
            taken_seconds = self.cpu_seconds - self._spent_seconds
            self._spent_seconds += taken_seconds
            self._cpu_bucket.spend(now, taken_seconds)
            time.sleep(min(self._cpu_bucket.wait_seconds(now, 0.0), PAUSE_SECONDS))

    def process_request(self, request: Any, client_address: Any) -> None:
        caller = _Caller(request, time.monotonic() + self.limits.request_seconds)
        with self._lock:
            if len(self._open) >= self.limits.connections:
                oldest = next((each for each in self._open if each.until_monotonic is not None), None)
                if oldest is not None:
                    del self._open[oldest]
                    oldest.cut()
            has_room = len(self._open) < self.limits.connections
            if has_room:
                self._open[caller] = None
        if not has_room or not self._may_start_thread():
            with self._lock:
                self._open.pop(caller, None)
            self.shutdown_request(request)
            return
        name = f"rankscope-http-{self.port}"
        threading.Thread(target=self._attend, args=(caller, client_address), name=name, daemon=True).start()

    def _may_start_thread(self) -> bool:
        """The thread of the connection that made room ends in a moment. Looks are counted, not seconds: when the
        machine stood still, that thread did as well."""
        return any(self._threads.acquire(timeout=THREAD_SECONDS / THREAD_LOOKS) for _ in range(THREAD_LOOKS))

    def wait_for(self, caller: _Caller, seconds: float) -> bool:
        """Starts the caller's clock. False if the server stops, or the caller had to make room."""
        with self._lock:
            if self._is_stopping or caller not in self._open:
                return False
            caller.until_monotonic = time.monotonic() + seconds
            del self._open[caller]
            self._open[caller] = None
            return True

    def buffer(self, bytes_more: int) -> bool:
        """False if that is too much for all bodies together."""
        with self._lock:
            if self._buffered_bytes + bytes_more > self.limits.buffered_bytes:
                return False
            self._buffered_bytes += bytes_more
            return True

    def release(self, bytes_less: int) -> None:
        with self._lock:
            self._buffered_bytes -= bytes_less

    def _attend(self, caller: _Caller, client_address: Any) -> None:
        try:
            if self._tls is not None:
                self._tls_handshake(caller, self._tls)
            _Handler(caller, client_address, self)
        except ssl.SSLError as error:
            self._log_refusal(str(client_address[0]), error)
        except (OSError, ValueError, http.client.HTTPException):
            pass  # a caller that hangs up is its own affair
        finally:
            with self._lock:
                self._open.pop(caller, None)
            caller.end_tls()
            self.shutdown_request(caller.connection)
            with self._lock:
                self._answering_seconds += time.thread_time()  # of a thread of its own
            self._threads.release()

    def _log_refusal(self, address: str, error: ssl.SSLError) -> None:
        """Once for each address and reason. Probes that open the port and leave are not logged."""
        reason = error.reason or ""
        refusal = (address, reason)
        if not reason or isinstance(error, ssl.SSLEOFError) or refusal in self._logged:
            return
        if len(self._logged) < MAX_REFUSALS:
            self._logged.add(refusal)
            log.warning("port %d: refused %s: %s", self.port, address, reason.lower().replace("_", " "))

    def _tls_handshake(self, caller: _Caller, tls: FollowedTls) -> None:
        """In the caller's own thread: a silent one delays nobody else."""
        context = tls.context()
        if context is None:
            raise OSError("there is no certificate yet")
        caller.connection.settimeout(SILENCE_SECONDS)
        wrapped = context.wrap_socket(caller.connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            caller.connection = wrapped
        wrapped.do_handshake()


@dataclass(eq=False)
class _Caller:
    connection: socket.socket
    until_monotonic: float | None  # None: its request was read, and is being answered

    @property
    def is_over(self) -> bool:
        return self.until_monotonic is not None and self.until_monotonic <= time.monotonic()

    def end_tls(self) -> None:
        """Clients may take an end without TLS's own close_notify for an attack. No answer is waited for."""
        if isinstance(self.connection, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                self.connection.settimeout(0.0)
                self.connection.unwrap()

    def cut(self) -> None:
        # Past SSLSocket's own method, which is not for two threads: the thread that reads there wakes up at the end.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection. Errors have their number and nothing that was sent."""

    server: HttpServer
    timeout = SILENCE_SECONDS
    # Head and body are sent separately: with Nagle's algorithm the body would wait 40 ms for the caller's ACK.
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = TEXT
    # What an answer needs before a request was parsed.
    requestline, request_version, command = "", default_request_version, ""

    def __init__(self, caller: _Caller, client_address: Any, server: HttpServer) -> None:
        self._caller = caller
        super().__init__(caller.connection, client_address, server)

    def handle(self) -> None:
        limits = self.server.limits
        while self._answer_one() and self.server.wait_for(self._caller, limits.idle_seconds):
            self.connection.settimeout(limits.idle_seconds)
            is_over = not cast(BufferedReader, self.rfile).peek(1)
            if is_over or not self.server.wait_for(self._caller, limits.request_seconds):
                return
            self.connection.settimeout(SILENCE_SECONDS)

    def _answer_one(self) -> bool:
        """Whether another request may follow."""
        if not self._parse_head():
            return False
        may_continue = not self.close_connection and self.server.limits.idle_seconds > 0
        self.close_connection = True
        if self.command not in ("GET", "POST"):
            self.send_error(501)
            return False
        read_bytes = 0
        path, _, query = self.path.partition("?")
        certificate = b""
        if isinstance(self.connection, ssl.SSLSocket):
            certificate = self.connection.getpeercert(binary_form=True) or b""
        request = Request(path, query, self.headers, str(self.client_address[0]), certificate)
        try:
            route = self._route(path)
            response = route.check(request)
            if response is None:
                body = self._read_body(body_length(self.headers, route.body_bytes)) if route.body_bytes else b""
                read_bytes = len(body)
                # Only a request that was read whole can be followed by another.
                self.close_connection = not (may_continue and route.body_bytes)
                self._caller.until_monotonic = None
                response = self._handled(route, replace(request, body=body))
        except RequestError as error:
            response = Response(error.status, f"{error}\n".encode())
        finally:
            self.server.release(read_bytes)
        self._answer(response)
        return not self.close_connection

    def _parse_head(self) -> bool:
        """False if there is no request to answer."""
        head = bytearray()
        while line := self.rfile.readline(HEAD_BYTES + 1 - len(head)):
            # A TLS client on a plain port waits for an answer to its first bytes, and sends no more.
            if not head and line.endswith(b"\n") and not _REQUEST_LINE.match(line):
                self.send_error(400)
                return False
            head += line
            if len(head) > HEAD_BYTES:
                self.send_error(431)
                return False
            if line in (b"\r\n", b"\n"):
                break
        self.raw_requestline, _, rest = head.partition(b"\n")
        connection_file, self.rfile = self.rfile, BytesIO(rest)
        try:
            return bool(head) and self.parse_request()
        finally:
            self.rfile = connection_file

    def _handled(self, route: Route, request: Request) -> Response:
        try:
            return route.handle(request)
        except Exception:
            log.exception("port %d: a request for %s failed", self.server.port, request.path)
            return Response(500, b"unexpected; see the log\n")

    def _route(self, path: str) -> Route:
        routes = self.server.routes
        route = routes.get((self.command, path))
        if route is not None:
            return route
        if any(known == path for _, known in routes):
            raise RequestError(405, f"{self.command} is not for this path")
        raise RequestError(404, f"rankscope: {', '.join(sorted({known for _, known in routes}))}")

    def _read_body(self, length: int) -> bytes:
        body = bytearray()
        try:
            while len(body) < length and (piece := cast(BufferedReader, self.rfile).read1(length - len(body))):
                if not self.server.buffer(len(piece)):
                    raise RequestError(503, "too many requests at once")
                body += piece
            if len(body) < length:
                if self._caller.is_over:
                    raise RequestError(408, "the body came too slowly")
                raise RequestError(400, f"the body ended after {len(body)} of {length} bytes")
        except (OSError, RequestError) as error:
            self.server.release(len(body))
            if isinstance(error, TimeoutError):
                raise RequestError(408, "the body came too slowly") from error
            raise
        return bytes(body)

    def _answer(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("Connection", "close" if self.close_connection else "keep-alive")
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        super().send_error(code)  # the standard library's message repeats what was sent

    def log_message(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: callers that are not authenticated must not fill the log."""

    def version_string(self) -> str:
        return "rankscope"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
