"""The gRPC side: windows for whoever watches, health, reflection, and the place of captures."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rankscope.daemon.arriving import Arrivals
from rankscope.daemon.config import Config, parse_address
from rankscope.daemon.guarding import CallGuard
from rankscope.daemon.listening import ListenError, SocketLock, in_use
from rankscope.daemon.publishing import Publisher, Tick, TooManyReadersError
from rankscope.daemon.tls import Certificates, TlsFiles
from rankscope.v1 import capture_service_pb2, capture_service_pb2_grpc, rank_service_pb2, rank_service_pb2_grpc
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import (
    ListRanksRequest,
    ListRanksResponse,
    WatchRanksRequest,
    WatchRanksResponse,
)

# For calls that end at once (lists, health, reflection), beside the readers that each keep a thread.
SHORT_CALL_THREADS = 8
# Whoever connects and says nothing, or says it byte by byte, is cut off, and cannot have all the descriptors there are.
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_allowed_incoming_connections", 1024),
)
NO_CAPTURES = (
    "captures are off on this daemon: by --captures false, or because they cannot be kept (its log says why); "
    "pass another --capture-dir"
)


@dataclass(frozen=True)
class Service:
    """One gRPC service to offer: its full name and how to add it to a server."""

    name: str
    add_to: Callable[[grpc.Server], None]


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
            reader = self._publisher.open_reader()
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

        # Sent even when empty: a reader can tell a quiet node from a dead one.
        return WatchRanksResponse(
            node=self._node,
            windows=[window for window in tick.windows.values() if is_asked_for(window.identity)],
            departed=[identity for identity in tick.departed if is_asked_for(identity)],
            dropped=dropped,
        )


class NoCaptureServicer(capture_service_pb2_grpc.CaptureServiceServicer):
    """Says what to do in place of gRPC's "Method not implemented!"."""

    def _refuse(self, request: object, context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, NO_CAPTURES)
        raise AssertionError("abort returns never")

    StartCapture = GetCapture = ListCaptures = CancelCapture = DeleteCapture = DownloadArtifact = _refuse


def rank_service(node: str, publisher: Publisher) -> Service:
    name = rank_service_pb2.DESCRIPTOR.services_by_name["RankService"].full_name
    servicer = RankServicer(node, publisher)
    return Service(name, lambda to: rank_service_pb2_grpc.add_RankServiceServicer_to_server(servicer, to))


def no_capture_service() -> Service:
    name = capture_service_pb2.DESCRIPTOR.services_by_name["CaptureService"].full_name
    servicer = NoCaptureServicer()
    return Service(name, lambda to: capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(servicer, to))


class GrpcServer:
    """Serves from the moment it is made until `close`. `targets` are what a client passes to grpc.insecure_channel, or
    for TCP with TLS to grpc.secure_channel."""

    def __init__(self, services: Sequence[Service], socket_lock: SocketLock | None, config: Config) -> None:
        threads = config.watch_readers + SHORT_CALL_THREADS
        files = TlsFiles.of(config)
        arrivals = None if files is None else Arrivals()
        self._certificates = None if files is None or arrivals is None else Certificates(files, arrivals.came)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix="rankscope-grpc"),
            # More calls than threads would wait unseen in the pool's queue; this way they are told.
            maximum_concurrent_rpcs=threads,
            interceptors=(CallGuard(arrivals),),
            options=OPTIONS,
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
