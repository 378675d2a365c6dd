"""The console's server: the API in uvicorn, in a thread of its own, with limits and the checks that browsers need.

Without `access` the API has no login, so the listener must be on loopback. That keeps other machines out, but not
web pages in the user's browser: the Host header must name this machine, and a request that a page of another origin
makes is refused."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Collection, Container
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit
from weakref import WeakSet

import grpc
import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rankscope.common.http_server import is_loopback
from rankscope.common.tls import FollowedContext, FollowedTls
from rankscope.operator.console.api import ENDPOINTS, ConsoleApi, Elsewhere
from rankscope.operator.console.endpoints import FORM, JSON, PREFIX, Channels, ProblemError, no_channel, problem
from rankscope.operator.console.history import History
from rankscope.operator.console.older_history import PrometheusHistory

PORT = 9469
CONNECTIONS, SOCKETS = 128, 512
HEAD_BYTES = 16 << 10
# For the next request, with its head; for a reader that takes nothing; and to stop.
HEAD_SECONDS, READER_SECONDS, STOP_SECONDS = 15.0, 30.0, 2.0
TUNNEL = "listen on 127.0.0.1 and come through an SSH tunnel: ssh -L 9469:127.0.0.1:9469 THIS_MACHINE"
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "SAMEORIGIN",
    # With no-referrer, a form of the console's own page would have the origin null.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Popups keep their opener: a trace is handed to Perfetto's page that way.
    "cross-origin-opener-policy": "same-origin-allow-popups",
}


CERTIFICATE = "certificate"  # of the caller, DER, in the state of a request
FORM_PATHS = frozenset(PREFIX + each.path for each in ENDPOINTS if each.takes_form)


class Access(Protocol):
    """Who may use the API."""

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """The application, for callers that are known."""

    def authorize(self, request: Request, run: str) -> bool: ...

    def channel(self, request: Request) -> grpc.Channel:
        """To the API of captures, profiles and hangs, in the caller's name."""


class BrowserChecks:
    """Middleware: what a browser must not do in the user's name, and the headers of every answer."""

    def __init__(self, app: ASGIApp, names: Container[str]) -> None:
        """`names` of this machine, besides those of loopback."""
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # A flame graph has a policy of its own.
                for name, value in {**SECURITY_HEADERS, "cache-control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        if refusal is None and scope["method"] == "POST" and scope["path"] in FORM_PATHS:
            try:
                scope = {**scope, **await asyncio.wait_for(_from_form(scope, receive), HEAD_SECONDS)}
            except (asyncio.TimeoutError, ValueError):
                refusal = problem(400, "the form cannot be read", "open the link from the console's page again")
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, method: str, path: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        name = _host_name(host)
        if not (is_loopback(name) or name in self._names):
            return problem(
                421,
                f"the Host header names {host or 'nothing'}",
                "open localhost:PORT or 127.0.0.1:PORT, through a tunnel too, or a name that the certificate has",
            )
        is_read = method in ("GET", "HEAD")
        if is_read and not path.startswith(PREFIX):
            return None  # a link from elsewhere may open the page
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if is_foreign or headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return problem(403, "a page of another origin made this request", "open the console itself")
        media = FORM if path in FORM_PATHS else JSON
        if not is_read and headers.get("content-type", "").partition(";")[0].strip() != media:
            return problem(415, f"a body must be {media}", f"send Content-Type: {media}")
        return None


async def _from_form(scope: Scope, receive: Receive) -> dict[str, Any]:
    """A browser sends no token with a download, a tab or a frame, so the page shows it in a form: the same as a GET.
    Unlike a link with a secret, it is in no address, and every replica takes it. Raises ValueError."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > HEAD_BYTES:
            raise ValueError("too long")
    token = parse_qs(body.decode("ascii"), max_num_fields=1).get("token", [""])[0]
    shown = [(b"authorization", f"Bearer {token}".encode("latin-1"))] if token else []
    return {"method": "GET", "headers": [*scope["headers"], *shown]}


def _host_name(host: str) -> str:
    """Without the port; empty if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, for peers that send no request or read no answer: it waits for them without end."""

    _head: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        shown = transport.get_extra_info("ssl_object")
        if shown is not None:
            self.app_state = {**self.app_state, CERTIFICATE: shown.getpeercert(binary_form=True) or b""}
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        """The time runs from the first byte that is missing, not from the last that came."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_timers(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self._give_up_head)

    def _give_up_head(self) -> None:
        self._head = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self.loop.call_later(READER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_timers(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers(self._head, self._reader)
        super().connection_lost(exc)

    def _stop_timers(self, *timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class ConsoleServer:
    """Listens from its construction, which raises OSError, and serves from `start` to `stop`."""

    def __init__(
        self,
        history: History,
        host: str,
        port: int,
        *,
        or_any_port: bool = False,
        access: Access | None = None,
        tls: FollowedTls | None = None,
        names: Container[str] = (),
        elsewhere: Elsewhere = dict,
        channels: Channels = no_channel,
        older: PrometheusHistory | None = None,
    ) -> None:
        """With `or_any_port`, a port that is taken is replaced by a free one. Callers may use `names` for this machine,
        besides those of loopback. `elsewhere` are the names of runs that another replica correlates. `channels` lead to
        captures, profiles and hangs; with `access`, those of the caller do."""
        if (access is None or tls is None) and not is_loopback(host):
            lack = "login" if access is None else "TLS"
            raise ValueError(f"{host}: others can reach this address, and the console has no {lack}; {TUNNEL}")
        try:
            self._socket = _listener(host, port)
        except OSError as error:
            if not or_any_port or error.errno != errno.EADDRINUSE:
                raise
            self._socket = _listener(host, 0)
        self._scheme = "http" if tls is None else "https"
        if access is None:
            self._api = ConsoleApi(history, elsewhere=elsewhere, channels=channels, older=older)
            app: ASGIApp = self._api.app
        else:
            self._api = ConsoleApi(history, access.authorize, elsewhere, access.channel, older)
            app = access.guarded(self._api.app)
        settings = uvicorn.Config(
            BrowserChecks(app, names),
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=int(HEAD_SECONDS) + 1,  # ours comes first
            timeout_graceful_shutdown=1,
        )
        settings.load()
        if tls is not None:
            settings.ssl = FollowedContext.of(tls)
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="rankscope-console", daemon=True)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}/" if ":" in host else f"{self._scheme}://{host}:{port}/"

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True
        self._api.close()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
        self._socket.close()


class BoundedListener(socket.socket):
    """Closes connections beyond a number. uvicorn counts requests, and asyncio waits a minute for each handshake."""

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        if len(self._open) >= SOCKETS:
            connection.close()
            raise BlockingIOError  # as if nobody had come
        counted = _Connection(connection.family, connection.type, connection.proto, connection.detach())
        counted.listener = self
        self._open.add(counted)
        return counted, address

    @cached_property
    def _open(self) -> WeakSet[socket.socket]:
        return WeakSet()


class _Connection(socket.socket):
    listener: BoundedListener

    def close(self) -> None:
        super().close()
        self.listener._open.discard(self)


def _listener(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = BoundedListener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


# Captures and profiles for callers on this machine: only for the user whose daemon it is.


Address = tuple[str, int]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_MAPPED = bytes(10) + b"\xff\xff"


def local_channels(target: str, users: Collection[int] | None = None) -> Channels:
    """To the daemon at `target`, for `users`: by default our own, root, and who became root to start us.

    The daemon's socket is open to its own user alone. The console listens on loopback, which every user and every
    container in the host's network can reach, so it must not open more than the socket does. The kernel's table of
    connections says who called."""
    allowed = {0, os.geteuid(), int(os.environ.get("SUDO_UID", 0))} if users is None else users

    def channel(request: Request) -> grpc.Channel:
        user = None
        if request.client is not None:
            user = caller((request.client.host, request.client.port), request.scope["server"])
        if user not in allowed:
            who = "a caller that is not known" if user is None else f"user {user}"
            advice = "run `rankscope up` as this user, or come through SSH as the user that runs it"
            raise ProblemError(403, f"captures, profiles and reports of this daemon are not for {who}", advice)
        return grpc.insecure_channel(target)

    return channel


def caller(client: Address, server: Address, tables: Collection[Path] = _TABLES) -> int | None:
    """The user id that made the connection. None if the connection is over: what is left of it has no owner, and the
    kernel shows it as root's."""
    wanted = {(_place(*client, is_wide), _place(*server, is_wide)) for is_wide in (False, True)}
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
            if (local, remote) in wanted and state == _ESTABLISHED and inode != "0":
                return int(user)
    return None


def _place(host: str, port: int, is_wide: bool) -> str:
    """As in 0100007F:2505, in the byte order of the machine; or the same as an address of IPv6."""
    packed = ipaddress.ip_address(host).packed
    if is_wide and len(packed) == 4:
        packed = _MAPPED + packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
