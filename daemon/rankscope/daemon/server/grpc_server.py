"""The daemon's gRPC server: ranks and windows, captures, health and reflection, and who may call it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankscope.common.tls import CONNECTIONS_OPTION, with_bounded_connections
from rankscope.daemon.config import Config, parse_address
from rankscope.daemon.server.certificates import CertificateError, Certificates, TlsFiles, names
from rankscope.daemon.server.sockets import ListenError, SocketLock, in_use
from rankscope.daemon.windows.broadcast import Publisher, Tick, TooManyReadersError
from rankscope.daemon.windows.window import window_columns
from rankscope.v1 import capture_service_pb2_grpc, rank_service_pb2_grpc
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import (
    ListRanksRequest,
    ListRanksResponse,
    WatchRanksRequest,
    WatchRanksResponse,
)

log = logging.getLogger(__name__)

# Longer than a handshake may take: a connection without a call by then was refused.
PATIENCE_SECONDS = 12.0
LOG_SECONDS = 60.0
MAX_ARRIVALS = 1 << 16
MAX_PEERS = 4096


class Arrivals:
    """Counts and logs connections to the port with TLS that never show a valid certificate: gRPC ends them without a
    trace. May be used from any thread."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS, log_seconds: float = LOG_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._log_seconds = log_seconds
        self._lock = threading.Lock()
        self._waiting: deque[float] = deque(maxlen=MAX_ARRIVALS)
        self._peers: dict[str, float] = {}  # when each was last seen
        self._is_waiting = False
        self._unlogged = 0
        self._logged_at = float("-inf")
        self.strangers_total = 0

    def came(self) -> None:
        with self._lock:
            self._waiting.append(time.monotonic())
            self._check_in(self._patience_seconds)

    def shown(self, peer: str) -> None:
        """A call came over a connection with a valid certificate; `peer` is its address and port."""
        with self._lock:
            seen_at = self._peers.get(peer, float("-inf"))
            if len(self._peers) >= MAX_PEERS:
                self._peers.clear()
            self._peers[peer] = time.monotonic()
            # Ports are used again: a later arrival may be another connection from the same one.
            if self._waiting and self._waiting[-1] > seen_at:
                self._waiting.pop()

    def _check_in(self, seconds: float) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            timer = threading.Timer(seconds, self._check_waiting)
            timer.daemon = True
            timer.start()

    def _check_waiting(self) -> None:
        with self._lock:
            self._is_waiting = False
            now = time.monotonic()
            while self._waiting and now - self._waiting[0] >= self._patience_seconds:
                self._waiting.popleft()
                self._unlogged += 1
                self.strangers_total += 1
            if self._unlogged and now - self._logged_at >= self._log_seconds:
                log.warning(
                    "refused %d connections: they showed no certificate, an expired one, one of another authority, or "
                    "did not use TLS",
                    self._unlogged,
                )
                self._unlogged, self._logged_at = 0, now
            if self._waiting:
                self._check_in(max(0.1, self._waiting[0] + self._patience_seconds - now))
            elif self._unlogged:
                self._check_in(self._patience_seconds)


# Daemons have certificates of the same authority: one that was stolen from a node must not open the other nodes.
OPERATOR_ROLE = "rankscope-operator"
MAX_CALLERS = 256
NOT_AN_OPERATOR = "this certificate is not an operator's"
UNREADABLE = "the request cannot be read"
REQUEST_SECONDS = 10.0

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


class CallGuard:
    """An interceptor of gRPC. Lets in an operator by its certificate, and everybody who can open the Unix socket.

    A request is read only after its caller was let in: gRPC by itself has a thread wait for the message of every call,
    so that calls without a message would take all threads. `arrivals` are those of the port with TLS; None without
    TLS, when the address is the protection."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        self._arrivals = arrivals
        self._logged: set[tuple[str, str]] = set()

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._guarded(_unknown_method))
        behaviour = getattr(handler, _kind(handler))
        answers = "stream" if handler.response_streaming else "unary"
        made = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        if handler.request_streaming:  # read by a handler whose caller was let in
            read = handler.request_deserializer
            return made(self._guarded(behaviour), read, handler.response_serializer)
        guarded = self._guarded(_taking_one(behaviour, handler.request_deserializer))
        return made(guarded, response_serializer=handler.response_serializer)

    def _guarded(self, behaviour: Behaviour) -> Behaviour:
        def guard(requests: Any, context: grpc.ServicerContext) -> Any:
            if self._arrivals is not None and not context.peer().startswith("unix:"):
                self._check(context, self._arrivals)
            return behaviour(requests, context)

        return guard

    def _check(self, context: grpc.ServicerContext, arrivals: Arrivals) -> None:
        arrivals.shown(context.peer())
        known_as = caller_names(context.auth_context())
        if OPERATOR_ROLE in known_as:
            return
        address = context.peer().rpartition(":")[0]
        shown = ", ".join(sorted(known_as))[:200]
        if (address, shown) not in self._logged and len(self._logged) < MAX_CALLERS:
            self._logged.add((address, shown))
            log.warning("refused %s: its certificate is of %r, not of %s", address, shown, OPERATOR_ROLE)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, NOT_AN_OPERATOR)


def caller_names(auth: dict[str, list[bytes]]) -> frozenset[str]:
    """The names in the caller's certificate, which an authority of ours has signed."""
    try:
        return names(auth["x509_pem_cert"][0])
    except (KeyError, IndexError, CertificateError):
        return frozenset()


def _taking_one(behaviour: Behaviour, read: Callable[[bytes], Any]) -> Behaviour:
    def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        too_late = threading.Timer(REQUEST_SECONDS, context.cancel)
        too_late.daemon = True
        too_late.start()
        try:
            raw = next(requests)
        except StopIteration:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
        finally:
            too_late.cancel()
        try:
            request = read(raw)
        except (DecodeError, ValueError):  # gRPC would log every one with a traceback
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
        return behaviour(request, context)

    return take


def _kind(handler: grpc.RpcMethodHandler) -> str:
    return f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"


def _unknown_method(request: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


# For downloads and short calls (lists, health, reflection), beside the readers that each keep a thread.
MAX_DOWNLOADS = 8
SHORT_CALL_THREADS = 8
# Silent and slow connections are closed, and cannot use up all file descriptors.
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    (CONNECTIONS_OPTION, 1024),
)
NO_CAPTURES = (
    "captures are off on this daemon: by --captures false, or because they cannot be kept (its log says why); "
    "pass another --capture-dir"
)


@dataclass(frozen=True)
class Service:
    """A gRPC service: its full name and how to add it to a server."""

    name: str
    add_to: Callable[[grpc.Server], None]

    @classmethod
    def of(cls, name: str, add: Callable[[Any, grpc.Server], None], servicer: object) -> Service:
        return cls(f"rankscope.v1.{name}", partial(add, servicer))


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort returns never")


class RankServicer(rank_service_pb2_grpc.RankServiceServicer):
    def __init__(self, node: str, publisher: Publisher) -> None:
        self._node = node
        self._publisher = publisher

    def ListRanks(self, request: ListRanksRequest, context: grpc.ServicerContext) -> ListRanksResponse:
        tick = self._publisher.latest
        windows = () if tick is None else tick.windows.values()
        return ListRanksResponse(
            node=self._node,
            ranks=[
                ListRanksResponse.Rank(identity=window.identity, latest=window)
                for window in windows
                if request.job in ("", window.identity.job)
            ],
        )

    def WatchRanks(self, request: WatchRanksRequest, context: grpc.ServicerContext) -> Iterator[WatchRanksResponse]:
        try:
            reader = self._publisher.open_reader(context.cancel)
        except TooManyReadersError as error:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{error}; close one, or raise the daemon's --watch-readers"
            )
        # Without the callback a reader that left would hold its thread until the next window.
        if not context.add_callback(reader.close):
            reader.close()
        pods = frozenset(request.pods)
        try:
            while (tick := reader.take()) is not None:
                yield self._message(request.job, pods, tick, reader.dropped)
        finally:
            reader.close()

    def _message(self, job: str, pods: frozenset[str], tick: Tick, dropped: int) -> WatchRanksResponse:
        def is_asked_for(identity: RankIdentity) -> bool:
            return job in ("", identity.job) and (not pods or identity.pod in pods)

        windows = [window for window in tick.windows.values() if is_asked_for(window.identity)]
        # Sent even when empty: a reader can distinguish an idle node from a dead one.
        return WatchRanksResponse(
            node=self._node,
            windows=windows,
            departed=[identity for identity in tick.departed if is_asked_for(identity)],
            dropped=dropped,
            columns=window_columns(windows, tick.span),
        )


class NoCaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    """Gives the next step in place of gRPC's "Method not implemented!"."""

    def _refuse(self, request: object, context: grpc.ServicerContext) -> NoReturn:
        abort(context, grpc.StatusCode.UNIMPLEMENTED, NO_CAPTURES)

    StartCapture = GetCapture = ListCaptures = CancelCapture = DeleteCapture = DownloadArtifact = _refuse


def rank_service(node: str, publisher: Publisher) -> Service:
    servicer = RankServicer(node, publisher)
    return Service.of("RankService", rank_service_pb2_grpc.add_RankServiceServicer_to_server, servicer)


def no_capture_service() -> Service:
    add = capture_service_pb2_grpc.add_CaptureServiceServicer_to_server
    return Service.of("CaptureService", add, NoCaptureServicer())


class GrpcServer:
    """Serves from the moment it is made until `close`. `targets` are what a client passes to grpc.insecure_channel, or
    for TCP with TLS to grpc.secure_channel."""

    def __init__(self, services: Sequence[Service], socket_lock: SocketLock | None, config: Config) -> None:
        threads = config.watch_readers + MAX_DOWNLOADS + SHORT_CALL_THREADS
        files = TlsFiles.of(config)
        arrivals = None if files is None else Arrivals()
        self._certificates = None if files is None or arrivals is None else Certificates(files, arrivals.came)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="rankscope-grpc"),
            # More calls than threads would wait unseen in the pool's queue; this way they are refused.
            maximum_concurrent_rpcs=threads,
            interceptors=(CallGuard(arrivals),),
            options=with_bounded_connections(OPTIONS),
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for service in services:
            service.add_to(self._server)
            self._health.set(service.name, health_pb2.HealthCheckResponse.SERVING)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        names = [service.name for service in services]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.targets: tuple[str, ...] = self._bind(socket_lock, config.grpc_listen)
        self._server.start()

    def close(self, grace_seconds: float) -> None:
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_seconds).wait(grace_seconds + 1.0)

    def _bind(self, socket_lock: SocketLock | None, listen: str) -> tuple[str, ...]:
        targets = []
        if socket_lock is not None:
            target = f"unix:{socket_lock.path}"
            before = os.umask(0o177)
            try:
                self._server.add_insecure_port(target)
            except RuntimeError as error:
                raise ListenError(f"cannot listen on {socket_lock.path}; pass another --socket") from error
            finally:
                os.umask(before)
            targets.append(target)
        address = parse_address(listen, "grpc_listen")
        if address is not None:
            host, port = address
            shown_host = f"[{host}]" if ":" in host else host
            try:
                bound = self._add_port(f"{shown_host}:{port}")
            except RuntimeError as error:
                raise in_use(port, "--grpc-listen") from error
            targets.append(f"{shown_host}:{bound}")
        return tuple(targets)

    def _add_port(self, address: str) -> int:
        if self._certificates is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._certificates.credentials()))
