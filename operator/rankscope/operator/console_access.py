"""Who may use the console of an operator or a correlator: the callers of the users' API, by the same guard.

A request is authenticated before the console's API sees it, and counts against the limit of its tenant until it has
been answered. A run that the caller may not list is answered like one that does not exist. Streams outlast a review, so
they are checked again."""

from __future__ import annotations

import secrets
import shutil
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import grpc
from cryptography import x509
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope.common.http_server import is_loopback
from rankscope.common.run_names import run_labels
from rankscope.common.tls import FollowedTls, Read, TlsMaterial
from rankscope.operator.access.guard import (
    Authentication,
    Credentials,
    Guard,
    RefusedError,
    UnauthenticatedError,
)
from rankscope.operator.access.token_review import Access, Caller, NoAnswerError
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.certificates.authority import names_of
from rankscope.operator.console.api import Elsewhere
from rankscope.operator.console.endpoints import PREFIX, problem
from rankscope.operator.console.history import History
from rankscope.operator.console.older_history import PrometheusHistory
from rankscope.operator.console.server import CERTIFICATE, ConsoleServer

RECHECK_SECONDS = 30.0
# Callers whose review is waited for; the API's own threads must not wait for the API server.
REVIEWS_AT_ONCE = 16
USER_CHARACTERS, MAX_GROUPS = 256, 256
# Kubernetes' own: a proxy that is deceived must not make a caller one of them.
SYSTEM = "system:"
AUTHENTICATED = "system:authenticated"
ANSWERS = {
    grpc.StatusCode.UNAUTHENTICATED: (401, "log in, with the token that the text names or through the proxy"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "ask an administrator for the role"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "wait, then try again"),
}
_VIEWER = "rankscope.viewer"
# Of the users' API behind the console.
API_THREADS = 32
API_STOP_SECONDS = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_concurrent_streams", 32),
)
_SOCKETS = grpc.LocalConnectionType.UDS

Handlers = Callable[[Guard], Sequence[grpc.GenericRpcHandler]]
Opened = Callable[[], grpc.Channel]


@dataclass(frozen=True)
class ConsoleSettings:
    host: str
    port: int
    names: tuple[str, ...] = ()  # of this server, besides those of its certificate
    # Whose X-Forwarded-User and X-Forwarded-Groups are believed: callers on loopback, or with a certificate of this
    # name and authority.
    proxy_on_loopback: bool = False
    proxy_name: str = ""
    proxy_authority: Path | None = None
    prometheus_url: str = ""  # has the time before this process; empty: none


class Console:
    """The console with its access, from `start` to `stop`. Raises ValueError for an address that cannot be used."""

    def __init__(
        self,
        settings: ConsoleSettings,
        history: History,
        authentication: Authentication,
        audit: CaptureAudit,
        handlers: Handlers,
        shown: Read | None,
        elsewhere: Elsewhere = dict,
        *,
        needs_certificates: bool = False,
    ) -> None:
        """`handlers` are the services of the users' API. With `needs_certificates` callers are known by their
        certificates, and see everything. `elsewhere` are the names of runs that another replica correlates."""
        authentication = ProxyAuthentication(authentication, settings)
        self._channels = CallerChannels(authentication, handlers, audit)
        access = ConsoleAccess(Guard(authentication, audit), self._channels, has_namespaces=not needs_certificates)
        if shown is not None and settings.proxy_authority is not None:
            shown = _with_authorities(shown, settings.proxy_authority)
        tls = None if shown is None else FollowedTls(shown, needs_certificates)
        names = frozenset(settings.names) if tls is None else ServedNames(tls, settings.names)
        host, port = settings.host, settings.port
        older = PrometheusHistory(settings.prometheus_url)
        try:
            self._server = ConsoleServer(
                history, host, port, access=access, tls=tls, names=names, elsewhere=elsewhere, older=older
            )
        except OSError as error:
            text = f"--console-listen {host}:{port}: {error.strerror or error}; pass another address"
            raise ValueError(text) from error

    @property
    def url(self) -> str:
        return self._server.url

    def start(self) -> None:
        self._channels.start()
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._channels.stop()


def _with_authorities(shown: Read, authorities: Path) -> Read:
    def read() -> TlsMaterial | None:
        material = shown()
        return None if material is None else replace(material, authorities=authorities.read_bytes())

    return read


class CallerChannels:
    """The users' API, in the names of the console's callers. From `start` to `stop`. Thread-safe.

    Browsers come by HTTP, with tokens, certificates or through a proxy. The API is asked in their place over a Unix
    socket that only this process uses. A call shows a ticket, which stands for what the caller has shown: access,
    limits and audit are those of a call over the network."""

    def __init__(self, authentication: Authentication, handlers: Handlers, audit: CaptureAudit) -> None:
        """`handlers` are the services behind a guard."""
        self._tickets: dict[str, tuple[Credentials, str]] = {}  # what its caller has shown, and the address
        self._folder = ""
        self._server = grpc.server(
            ThreadPoolExecutor(API_THREADS, thread_name_prefix="rankscope-console-api"),
            handlers=handlers(Guard(authentication, audit, self._peer)),
            maximum_concurrent_rpcs=API_THREADS,
            options=_OPTIONS,
        )

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rankscope-")  # for us alone
        self._server.add_secure_port(self._target, grpc.local_server_credentials(_SOCKETS))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(API_STOP_SECONDS).wait(API_STOP_SECONDS + 1.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def of(self, shown: Credentials, address: str) -> Iterator[Opened]:
        """Opens channels in this caller's name, until the end of the context."""
        ticket = secrets.token_urlsafe(32)
        self._tickets[ticket] = (shown, address)
        ours = grpc.local_channel_credentials(_SOCKETS)
        credentials = grpc.composite_channel_credentials(ours, grpc.access_token_call_credentials(ticket))
        try:
            yield lambda: grpc.secure_channel(self._target, credentials, [("grpc.use_local_subchannel_pool", 1)])
        finally:
            del self._tickets[ticket]

    @property
    def _target(self) -> str:
        return f"unix:{self._folder}/api.sock"

    def _peer(self, context: grpc.ServicerContext) -> tuple[Credentials, str]:
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        known = self._tickets.get(str(given).removeprefix("Bearer "))
        if known is None:
            raise RefusedError(grpc.StatusCode.UNAUTHENTICATED, "the request of the browser is over")
        return known


class ProxyAuthentication:
    """A user that a trusted proxy names; without such a proxy, what the other authentication says."""

    def __init__(self, otherwise: Authentication, settings: ConsoleSettings) -> None:
        self._otherwise = otherwise
        self._settings = settings

    def allows(self, caller: Caller, access: Access) -> bool:
        return self._otherwise.allows(caller, access)

    def caller(self, shown: Credentials, address: str) -> Caller:
        if not shown.forwarded_user or not self._trusts(shown, address):
            return self._otherwise.caller(shown, address)
        user = shown.forwarded_user[0].strip()
        is_usable = len(shown.forwarded_user) == 1 and user.isprintable() and 0 < len(user) <= USER_CHARACTERS
        if not is_usable or user.startswith(SYSTEM):
            raise UnauthenticatedError("a proxy with an unusable user", "the proxy names no user that can be used")
        named = [group.strip() for value in shown.forwarded_groups for group in value.split(",")]
        groups = [group for group in named if group and not group.startswith(SYSTEM)][:MAX_GROUPS]
        return Caller(user, groups=(*groups, AUTHENTICATED))

    def _trusts(self, shown: Credentials, address: str) -> bool:
        if self._settings.proxy_on_loopback and is_loopback(address):
            return True
        return bool(self._settings.proxy_name) and self._settings.proxy_name in _names(shown.certificate)


def _names(certificate: bytes) -> set[str]:
    try:
        return names_of(certificate)
    except (ValueError, x509.ExtensionNotFound):
        return set()


class ServedNames:
    """Names that callers may use for this server: those of its certificate, and further ones."""

    def __init__(self, tls: FollowedTls, further: Sequence[str] = ()) -> None:
        self._tls = tls
        self._further = frozenset(name.lower() for name in further)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        material = self._tls.material()
        held = self._further | (set() if material is None else _names(material.certificate))
        return name in held or f"*.{name.partition('.')[2]}" in held


@dataclass
class _Viewer:
    """A request's caller, and what the API server has said about it."""

    shown: Credentials = field(repr=False)
    address: str
    caller: Caller
    checked: float
    allowed: dict[str, bool] = field(default_factory=dict)  # by namespace
    is_over: bool = False  # the stream ends
    opened: Opened | None = field(default=None, repr=False)  # channels in its name


class ConsoleAccess:
    def __init__(
        self,
        guard: Guard,
        channels: CallerChannels,
        has_namespaces: bool = True,
    ) -> None:
        """`has_namespaces` is False without Kubernetes: there, who may call may see everything."""
        self._guard = guard
        self._channels = channels
        self._has_namespaces = has_namespaces
        self._reviews = anyio.CapacityLimiter(REVIEWS_AT_ONCE)

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Only the API needs a known caller. The page is public: it contains the login form."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"].startswith(PREFIX):
                await self._serve(app, scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded

    def channel(self, request: Request) -> grpc.Channel:
        """To the users' API, in the caller's name."""
        viewer: _Viewer = request.scope[_VIEWER]
        assert viewer.opened is not None
        return viewer.opened()

    def authorize(self, request: Request, run: str) -> bool:
        """In a thread. A run that was asked for by name is audited."""
        viewer: _Viewer = request.scope[_VIEWER]
        if not self._has_namespaces:
            return True
        namespace = run_labels(run)["run_namespace"]
        access = Access("list", namespace, "trainingruns")
        try:
            is_allowed = self._allowed(viewer, "") or self._allowed(viewer, namespace)
            if not is_allowed and request.query_params.get("run") == run:
                self._guard.require(viewer.caller, viewer.address, access)
        except RefusedError:
            return False
        except NoAnswerError as error:
            viewer.is_over = True
            raise HTTPException(503, str(error)) from error
        return is_allowed

    def _allowed(self, viewer: _Viewer, namespace: str) -> bool:
        known = viewer.allowed.get(namespace)
        if known is None:
            access = Access("list", namespace, "trainingruns")
            known = viewer.allowed[namespace] = self._guard.allows(viewer.caller, access)
        return known

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_checked(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
            elif time.monotonic() - viewer.checked > RECHECK_SECONDS:
                await self._recheck(viewer)
            await send(message)

        try:
            viewer = await anyio.to_thread.run_sync(self._viewer, Request(scope), limiter=self._reviews)
            scope[_VIEWER] = viewer
            with self._guard.counted(viewer.caller), self._channels.of(viewer.shown, viewer.address) as viewer.opened:
                await app(scope, receive, send_checked)
        except (RefusedError, NoAnswerError) as error:
            if not has_started:
                await _refusal(error)(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            # Starlette wraps an exception of a stream.
            if not (has_started and viewer.is_over):
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _viewer(self, request: Request) -> _Viewer:
        shown = _shown(request)
        address = "" if request.client is None else request.client.host
        return _Viewer(shown, address, self._guard.identify(shown, address), time.monotonic())

    async def _recheck(self, viewer: _Viewer) -> None:
        """Raises if the caller is refused, which ends the stream. The client connects again and gets the reason."""
        viewer.checked = time.monotonic()
        viewer.allowed.clear()
        try:
            await run_in_threadpool(self._guard.identify, viewer.shown, viewer.address)
        except Exception:
            viewer.is_over = True
            raise


def _shown(request: Request) -> Credentials:
    der = request.scope.get("state", {}).get(CERTIFICATE, b"")
    headers = request.headers
    return Credentials(
        headers.getlist("authorization"),
        ssl.DER_cert_to_PEM_cert(der).encode() if der else b"",
        headers.getlist("x-forwarded-user"),
        headers.getlist("x-forwarded-groups"),
    )


def _refusal(error: RefusedError | NoAnswerError) -> Any:
    if isinstance(error, NoAnswerError):
        return problem(503, str(error), "try again in a moment")
    status, advice = ANSWERS.get(error.code, (403, "ask an administrator"))
    answer = problem(status, str(error), advice)
    if status == 401:
        answer.headers["www-authenticate"] = "Bearer"
    return answer
