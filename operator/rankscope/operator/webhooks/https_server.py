"""The webhooks' HTTPS server. Any pod of the cluster may reach its port, so nobody who is slow, silent or loud keeps
the API server from being heard; new certificates hold from the next connection on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import TimeoutError as FutureTimeoutError  # in 3.10 not yet the built-in one
from dataclasses import dataclass
from typing import Any, TypeVar

# The little of HTTP/1.1 that an API server's webhook calls need: POST with a length.

HEADERS_LIMIT = 100


class BadRequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Head:
    path: str
    length: int
    keeps_alive: bool


def read_head(raw: bytes, body_limit: int) -> Head:
    """`raw` ends with the empty line. What two readers could understand differently is refused."""
    try:
        first, *lines = raw.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
        method, path, version = first.split(" ")
    except ValueError:
        raise BadRequestError(400, "no HTTP request") from None
    if version not in ("HTTP/1.1", "HTTP/1.0") or not path.startswith("/"):
        raise BadRequestError(400, "no HTTP/1.1 request")
    headers = _headers(lines)
    if method != "POST":
        raise BadRequestError(405, "webhooks are called by POST")
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise BadRequestError(411, "a body has to tell its length")
    text = headers["content-length"]
    if not text.isdigit() or len(text) > 12:
        raise BadRequestError(400, "its length is no number")
    if int(text) > body_limit:
        raise BadRequestError(413, f"a review may have {body_limit} bytes")
    keeps = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Head(path, int(text), keeps)


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > HEADERS_LIMIT:
        raise BadRequestError(400, "too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in headers):
            raise BadRequestError(400, "a header cannot be read")
        headers[name] = value.strip()
    return headers


log = logging.getLogger(__name__)

BODY_BYTES_LIMIT = 3 << 20
# Of all connections together: what is more is turned away at once.
BUFFERED_BYTES_LIMIT = 64 << 20
CONNECTIONS_LIMIT = 512
HANDSHAKE_SECONDS = 5.0
HEAD_SECONDS = 10.0
BODY_SECONDS = 10.0
# Longer than the API server keeps a connection idle: it is the one to close it, or a request may meet a closed door.
IDLE_SECONDS = 150.0
STOP_SECONDS = 3.0
_CHUNK_BYTES = 1 << 16

Heard = TypeVar("Heard")
Respond = Callable[[str, bytes], tuple[int, bytes]]
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required"}
_REASONS |= {413: "Payload Too Large", 500: "Internal Server Error", 503: "Service Unavailable"}


class WebhookServer:
    """The port is ours from the start; it answers from the first `use` on, until `stop`."""

    def __init__(self, host: str, port: int, respond: Respond) -> None:
        self._respond = respond
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, port))
        self.port = int(self._socket.getsockname()[1])
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        # Those we wait for, the longest first: they make room when there is none.
        self._waiting: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()
        self._connections: set[asyncio.StreamWriter] = set()
        self._buffered_bytes = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rankscope-webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def use(self, certificate: bytes, key: bytes) -> None:
        """From any thread. Raises ValueError for what is no pair, and goes on with what there was."""
        asyncio.run_coroutine_threadsafe(self._use(certificate, key), self._loop).result(10.0)

    def stop(self) -> None:
        """Requests under way are answered, for a moment."""
        if self._thread.is_alive():
            with contextlib.suppress(FutureTimeoutError):
                asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(STOP_SECONDS + 5.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_tell_quietly)
        self._loop.run_forever()
        self._loop.close()

    async def _use(self, certificate: bytes, key: bytes) -> None:
        # Tried on another context first: half a pair would spoil the one in use. And in the loop, so that no connection
        # begins between certificate and key.
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, key)
        _load(self._tls, certificate, key)
        if self._server is None:
            self._server = await asyncio.start_server(
                self._connected,
                sock=self._socket,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                limit=_CHUNK_BYTES,
                backlog=256,
            )

    async def _close(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.close()
        for writer in list(self._waiting):
            writer.transport.abort()
        give_up = self._loop.time() + STOP_SECONDS
        while self._connections and self._loop.time() < give_up:
            await asyncio.sleep(0.02)
        for writer in list(self._connections):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_LIMIT:
            if not self._waiting:
                writer.transport.abort()
                return
            dropped = self._waiting.popitem(last=False)[0]
            self._connections.discard(dropped)
            dropped.transport.abort()
        self._connections.add(writer)
        try:
            waits = HEAD_SECONDS
            while await self._serve_one(reader, writer, waits):
                waits = IDLE_SECONDS
        except (OSError, EOFError, asyncio.TimeoutError, TimeoutError, asyncio.LimitOverrunError):
            pass  # gone, too slow, or no HTTP
        finally:
            self._connections.discard(writer)
            # Not awaited: whoever does not read would hold us here.
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, waits: float) -> bool:
        """True if another request may follow."""
        raw = await self._wait_for(writer, reader.readuntil(b"\r\n\r\n"), waits)
        try:
            head = read_head(raw, BODY_BYTES_LIMIT)
        except BadRequestError as error:
            await self._answer(writer, error.status, f"{error}\n".encode(), False)
            return False
        body = await self._wait_for(writer, self._body(reader, head.length), BODY_SECONDS)
        if body is None:
            await self._answer(writer, 503, b"rankscope: too much at once\n", False)
            return False
        status, answer = self._safely(head, body)
        keeps = head.keeps_alive and not self._stopping
        await self._answer(writer, status, answer, keeps)
        return keeps

    async def _wait_for(self, writer: asyncio.StreamWriter, what: Awaitable[Heard], seconds: float) -> Heard:
        self._waiting[writer] = None
        try:
            return await asyncio.wait_for(what, seconds)
        finally:
            self._waiting.pop(writer, None)

    async def _body(self, reader: asyncio.StreamReader, length: int) -> bytes | None:
        parts: list[bytes] = []
        held = 0
        try:
            while held < length:
                part = await reader.read(min(_CHUNK_BYTES, length - held))
                if not part:
                    raise EOFError
                if self._buffered_bytes + len(part) > BUFFERED_BYTES_LIMIT:
                    return None
                parts.append(part)
                held += len(part)
                self._buffered_bytes += len(part)
            return b"".join(parts)
        finally:
            self._buffered_bytes -= held

    def _safely(self, head: Head, body: bytes) -> tuple[int, bytes]:
        try:
            return self._respond(head.path, body)
        except Exception:
            log.exception("a webhook request failed")
            return 500, b"rankscope: internal error\n"

    async def _answer(self, writer: asyncio.StreamWriter, status: int, body: bytes, keeps: bool) -> None:
        kind = "application/json" if status == 200 else "text/plain; charset=utf-8"
        head = (
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await asyncio.wait_for(writer.drain(), BODY_SECONDS)


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """From memory: the standard library reads files only, and a key does not belong on a disk."""
    descriptor = os.memfd_create("rankscope-webhook-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"the webhooks' certificate and key are no pair: {error}") from error
    finally:
        os.close(descriptor)


def _tell_quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Port scanners and broken clients are not news."""
    log.debug("webhooks: %s: %r", context.get("message"), context.get("exception"))
