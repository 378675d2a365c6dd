"""An HTTP server for a few callers on a port that many can reach.

A request has a time for all of it, not for each byte; its head has a size; and when there are too many at once, whoever
has been sending the longest makes room: a scraper that says at once what it wants is served in any flood."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BufferedIOBase
from typing import Any, cast

from rankscope.common.tls import FollowedTls

log = logging.getLogger(__name__)

AT_ONCE = 64
SILENCE_SECONDS = 5.0
REQUEST_SECONDS = 20.0
HEAD_BYTES = 16 << 10
REMEMBERED = 256


class HeadTooLargeError(http.client.HTTPException):
    """Of this type because the standard library answers it with 431."""


class BoundedHandler(BaseHTTPRequestHandler):
    """One request to a connection. Errors say their number and nothing else."""

    server: BoundedHttpServer
    timeout = SILENCE_SECONDS
    error_message_format = "%(code)d %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        self.rfile = cast(Any, _LimitedReader(self.rfile, HEAD_BYTES))

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
        try:
            super().handle_one_request()
        except HeadTooLargeError:
            self.send_error(431)

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    def get(self) -> None:
        self.send_error(405)

    def post(self) -> None:
        self.send_error(405)

    def read_body(self, length: int) -> bytes:
        """Shorter if the caller hung up. Raises TimeoutError when it comes too slowly."""
        reader = cast(_LimitedReader, self.rfile)
        reader.allow(length)
        body = bytearray()
        while len(body) < length and (piece := reader.read1(length - len(body))):
            body += piece
        if len(body) < length and self.server.is_over:
            raise TimeoutError("the body came too slowly")
        # What is done about it takes its own time.
        self.server.stop_clock()
        return bytes(body)

    def answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        super().send_error(code)  # the standard library's message repeats what was sent

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the standard library gave it
        """A scrape every few seconds is not news, and strangers must not fill the log."""

    def version_string(self) -> str:
        return "rankscope"


class BoundedHttpServer(HTTPServer):
    """Listens from when it is made; port 0 chooses a free one. Raises OSError if it cannot. With `tls` nothing is said
    in plain text."""

    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BoundedHandler],
        tls: FollowedTls | None = None,
        at_once: int = AT_ONCE,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._at_once = at_once
        self._request_seconds = request_seconds
        self._lock = threading.Lock()
        self._open: dict[_Caller, None] = {}  # the oldest first
        self._here = threading.local()  # the caller that this thread is for
        self._told: set[tuple[str, str]] = set()
        self._threads = threading.BoundedSemaphore(2 * at_once)
        super().__init__((host, port), handler)
        self.port = int(self.server_address[1])

    def serve(self, name: str) -> None:
        """In a thread of its own, until `close`."""
        kwargs = {"poll_interval": 0.2}
        threading.Thread(target=self.serve_forever, kwargs=kwargs, name=name, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        # HTTPServer would look up the host's full name here, which can take seconds where DNS is broken.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def stop_clock(self) -> None:
        """Of the caller of this thread: its request was read."""
        self._here.caller.until_monotonic = None

    @property
    def is_over(self) -> bool:
        """Whether the caller of this thread has had its time."""
        until = self._here.caller.until_monotonic
        return until is not None and until <= time.monotonic()

    def service_actions(self) -> None:
        """Called a few times a second: ends what takes too long."""
        now = time.monotonic()
        with self._lock:
            for caller in self._open:
                if caller.until_monotonic is not None and caller.until_monotonic <= now:
                    caller.cut()

    def process_request(self, request: Any, client_address: Any) -> None:
        caller = _Caller(request, time.monotonic() + self._request_seconds)
        with self._lock:
            if len(self._open) >= self._at_once:
                oldest = next((each for each in self._open if each.until_monotonic is not None), None)
                if oldest is not None:
                    del self._open[oldest]
                    oldest.cut()
            is_room = len(self._open) < self._at_once
            if is_room:
                self._open[caller] = None
        # Whoever made room is gone in a moment, and so is its thread.
        if not is_room or not self._threads.acquire(timeout=1.0):
            with self._lock:
                self._open.pop(caller, None)
            self.shutdown_request(request)
            return
        threading.Thread(target=self._attend, args=(caller, client_address), daemon=True).start()

    def _attend(self, caller: _Caller, client_address: Any) -> None:
        self._here.caller = caller
        try:
            if self._tls is not None:
                self._shake_hands(caller, self._tls)
            self.finish_request(caller.connection, client_address)
        except ssl.SSLError as error:
            self._tell(str(client_address[0]), error)
        except (OSError, ValueError, http.client.HTTPException):
            pass  # a caller that hangs up is its own affair
        finally:
            with self._lock:
                self._open.pop(caller, None)
            caller.say_goodbye()
            self.shutdown_request(caller.connection)
            self._threads.release()

    def _tell(self, address: str, error: ssl.SSLError) -> None:
        """Once for each address and reason. Probes of a port that open it and leave are not news."""
        reason = error.reason or ""
        told = (address, reason)
        if not reason or isinstance(error, ssl.SSLEOFError) or told in self._told or len(self._told) >= REMEMBERED:
            return
        self._told.add(told)
        log.warning("port %d: refused %s: %s", self.port, address, reason.lower().replace("_", " "))

    def _shake_hands(self, caller: _Caller, tls: FollowedTls) -> None:
        """In the caller's own thread: a silent one holds nobody up."""
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
    until_monotonic: float | None  # None: its request was read, and nobody waits for it

    def say_goodbye(self) -> None:
        """TLS has a word for the end, and clients may take an end without it for an attack. No answer is waited for."""
        if isinstance(self.connection, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                self.connection.settimeout(0.0)
                self.connection.unwrap()

    def cut(self) -> None:
        # Past SSLSocket's own method, which is not for two threads: whoever reads there wakes up and finds the end.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class _LimitedReader:
    """What a head may have; then what `allow` adds for the body."""

    def __init__(self, file: BufferedIOBase, limit: int) -> None:
        self._file = file
        self._left = limit

    def allow(self, body_bytes: int) -> None:
        self._left = body_bytes

    def readline(self, limit: int = -1) -> bytes:
        most = self._left + 1 if limit < 0 else min(limit, self._left + 1)
        line = self._file.readline(most)
        self._left -= len(line)
        if self._left < 0:
            raise HeadTooLargeError("the head is too large")
        return line

    def read1(self, size: int) -> bytes:
        piece = self._file.read1(min(size, self._left))
        self._left -= len(piece)
        return piece

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


# Which addresses others can reach.


def is_loopback(host: str) -> bool:
    """Names other than localhost may be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
