"""The users' API for the console, in the names of its callers.

The console's browsers come by HTTP, with tokens, certificates or through a proxy. The API is asked in their place over
a Unix socket that only this process uses. A call shows a ticket, which stands for what the caller has shown: access,
limits and audit are those of a call over the network."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from rankscope.operator.access.guard import Authentication, Credentials, Guard, RefusedError
from rankscope.operator.captures.audit import CaptureAudit

THREADS = 32
STOP_SECONDS = 2.0
OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_concurrent_streams", 32),
)
_SOCKETS = grpc.LocalConnectionType.UDS

Handlers = Callable[[Guard], Sequence[grpc.GenericRpcHandler]]
Opened = Callable[[], grpc.Channel]


class CallerChannels:
    """From `start` to `stop`. Thread-safe."""

    def __init__(self, authentication: Authentication, handlers: Handlers, audit: CaptureAudit) -> None:
        """`handlers` are the services behind a guard."""
        self._tickets: dict[str, tuple[Credentials, str]] = {}  # what its caller has shown, and the address
        self._folder = ""
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="rankscope-console-api"),
            handlers=handlers(Guard(authentication, audit, self._peer)),
            maximum_concurrent_rpcs=THREADS,
            options=OPTIONS,
        )

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rankscope-")  # for us alone
        self._server.add_secure_port(self._target, grpc.local_server_credentials(_SOCKETS))
        self._server.start()

    def stop(self) -> None:
        self._server.stop(STOP_SECONDS).wait(STOP_SECONDS + 1.0)
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
