"""Requests to servers that are not trusted with this process' time and memory: one deadline for all of a request, its
connection and its head included, and a size limit for the answer. A request goes to the host that is named: no proxy,
no redirection."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

CONNECT_SECONDS: Final = 5.0
CHUNK_BYTES: Final = 64 << 10
# What `requested` raises, and reading the answer in it.
REQUEST_FAILURES: Final = (OSError, http.client.HTTPException, ValueError)


def server_url(text: str) -> SplitResult:
    """The parts of a server's address. Raises ValueError if it is none, or has more than a path: a password in it
    would be shown in lists of processes."""
    parts = urlsplit(text)
    port = parts.port  # raises ValueError
    has_more = "@" in parts.netloc or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or has_more or not text.isprintable():
        raise ValueError("must be like https://HOST:PORT, without user, query and fragment")
    return parts


@contextlib.contextmanager
def requested(
    method: str,
    url: SplitResult,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    seconds: float,
    answer_bytes: int,
    context: ssl.SSLContext | None = None,
) -> Iterator[http.client.HTTPResponse]:
    """`context` is for https; without one, the authorities of this machine count."""
    deadline_seconds = time.monotonic() + seconds
    host = url.hostname or ""
    connected = socket.create_connection(
        (host, url.port or (443 if url.scheme == "https" else 80)), min(CONNECT_SECONDS, seconds)
    )
    try:
        connection = http.client.HTTPConnection(host, url.port)
        if url.scheme == "https":
            context = context or ssl.create_default_context()
            connected.settimeout(seconds)
            connected = context.wrap_socket(connected, server_hostname=host)
            connection = http.client.HTTPSConnection(host, url.port, context=context)
        connection.sock = _TimedSocket(connected, deadline_seconds, answer_bytes)
        path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
        connection.request(method, path, body or None, {"Connection": "close", **headers})
        yield connection.getresponse()
    finally:
        connected.close()


def body_of(answer: http.client.HTTPResponse) -> bytes:
    """All of it. Not by `read`, which takes as much memory as the head claims."""
    body = bytearray()
    while chunk := answer.read1(CHUNK_BYTES):
        body += chunk
    return bytes(body)


class _TimedSocket(io.RawIOBase):
    """What http.client needs of a socket, with one deadline for all of its calls and a limit for what is read. The
    caller closes the socket."""

    def __init__(self, connected: socket.socket, deadline_seconds: float, answer_bytes: int) -> None:
        self._connected = connected
        self._deadline_seconds = deadline_seconds
        self._answer_bytes = self._left_bytes = answer_bytes

    def sendall(self, content: ReadableBuffer) -> None:
        left = memoryview(content)
        while left:
            self._set_timeout()
            left = left[self._connected.send(left[:CHUNK_BYTES]) :]

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        self._set_timeout()
        read = self._connected.recv_into(buffer)
        self._left_bytes -= read
        if self._left_bytes < 0:
            raise http.client.HTTPException(f"the answer is longer than {self._answer_bytes >> 10} KiB")
        return read

    def close(self) -> None:
        pass

    def _set_timeout(self) -> None:
        left_seconds = self._deadline_seconds - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError("timed out")
        self._connected.settimeout(left_seconds)
