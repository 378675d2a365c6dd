"""The users' API as a gRPC server with TLS. Everybody may reach its port, so everything that a caller can use before
it is authenticated has a limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from rankscope.common.http_server import is_loopback
from rankscope.common.tls import CONNECTIONS_OPTION, FollowedTls, TlsMaterial, with_bounded_connections
from rankscope.operator.access.capture_service import UserCaptures
from rankscope.operator.access.guard import Authentication, Guard
from rankscope.operator.access.profile_relay import ProfileRelay
from rankscope.operator.access.profile_service import KnownRuns, UserProfiles
from rankscope.operator.access.recording_service import UserRecordings
from rankscope.operator.access.run_service import UserJobs
from rankscope.operator.access.trace_relay import Traces
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.kube.api_client import ObjectApi
from rankscope.operator.kube.objects import CaptureObject
from rankscope.operator.kube.watch_cache import Watched

log = logging.getLogger(__name__)

PORT = 9468
THREADS = 128
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 32),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # The stream of a caller that vanished is ended.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    (CONNECTIONS_OPTION, 1024),
)
# Between two looks for a certificate that does not exist yet.
PAUSE_SECONDS = 1.0
STOP_SECONDS = 2.0


@dataclass(frozen=True)
class UserApiSettings:
    listen_host: str
    listen_port: int = PORT
    # Audience of the tokens: those that pods and kubectl have for the API server are not for anybody else.
    audience: str = "rankscope"
    # Callers need a certificate that the server's own authorities have signed.
    needs_certificates: bool = False


class UserApiServer:
    """From `start` to `stop`. Raises ValueError for an address that others can reach without TLS."""

    def __init__(
        self, settings: UserApiSettings, handlers: Sequence[grpc.GenericRpcHandler], tls: FollowedTls | None
    ) -> None:
        host = settings.listen_host
        if tls is None and not is_loopback(host):
            raise ValueError(
                f"--api-listen {host}: others can reach this address, and tokens are sent to it: "
                "pass --api-certificate and --api-key, or --fleet-certificates"
            )
        self._address = f"[{host}]:{settings.listen_port}" if ":" in host else f"{host}:{settings.listen_port}"
        self._tls = tls
        self._needs_certificates = settings.needs_certificates
        self._used: TlsMaterial | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve_when_possible, name="rankscope-api", daemon=True)
        self.port = 0  # once it listens
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="rankscope-api"),
            handlers=handlers,
            # More calls than threads would wait unseen in the pool's queue; this way they are refused.
            maximum_concurrent_rpcs=THREADS,
            options=with_bounded_connections(OPTIONS),
        )

    def start(self) -> None:
        """Raises ValueError if the address is taken, or the files cannot be used. A certificate that does not exist yet
        is waited for, in a thread."""
        if self._tls is None:
            self._listen(None)
        elif (first := self._changed()) is not None:
            self._listen(first)
        elif self._tls.problem:
            raise ValueError(self._tls.problem)
        else:
            self._thread.start()

    @property
    def address(self) -> str:
        """With the port it has, once it listens."""
        return f"{self._address.rpartition(':')[0]}:{self.port}" if self.port else self._address

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(STOP_SECONDS).wait(STOP_SECONDS + 1.0)

    def _serve_when_possible(self) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            first = self._changed()
            if first is None:
                continue
            try:
                self._listen(first)
            except ValueError as error:
                log.error("%s", error)
            return

    def _listen(self, first: grpc.ServerCertificateConfiguration | None) -> None:
        try:
            if first is None:
                self.port = int(self._server.add_insecure_port(self._address))
            else:
                credentials = grpc.dynamic_ssl_server_credentials(first, self._changed, self._needs_certificates)
                self.port = int(self._server.add_secure_port(self._address, credentials))
        except RuntimeError as error:
            raise ValueError(f"--api-listen {self._address}: the address is taken, or not ours") from error
        self._server.start()
        how = "without TLS" if first is None else "with TLS"
        log.info("users are served at %s, port %d, %s", self._address, self.port, how)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate from now on; None: the one in use stays, or there is none yet."""
        assert self._tls is not None
        material = self._tls.material()
        if material is None or material is self._used:
            return None
        self._used = material
        authorities = material.authorities if self._needs_certificates else None
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], authorities)


class UserApi:
    """Server, authentication, and all services. Raises ValueError where tokens would travel in plain text."""

    def __init__(
        self,
        api: ObjectApi,
        settings: UserApiSettings,
        authentication: Authentication,
        captures: Watched[CaptureObject],
        runs: KnownRuns,
        jobs: UserJobs,
        calls: DaemonCalls,
        addresses: Callable[[], Mapping[str, str]],
        relay: ProfileRelay,
        audit: CaptureAudit,
        tls: FollowedTls | None,
        has_namespaces: bool = True,
        plain_runs: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._traces = Traces(calls, addresses)
        service = UserCaptures(
            api,
            captures,
            runs.object_of,
            self._traces,
            audit,
            is_ready=lambda: captures.listed.is_set() and runs.is_listed,
            has_namespaces=has_namespaces,
            plain_runs=plain_runs,
        )
        profiles = UserProfiles(runs, relay, audit, has_namespaces, plain_runs)
        recordings = UserRecordings(runs, calls, addresses, audit, has_namespaces, plain_runs)
        self._services = (service, profiles, recordings, jobs)
        guard = Guard(authentication, audit)
        self.calls = guard.counts
        self.server = UserApiServer(settings, self.handlers(guard), tls)

    def handlers(self, guard: Guard) -> Sequence[grpc.GenericRpcHandler]:
        """The same services, behind this guard."""
        return [service.handler(guard) for service in self._services]

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self._traces.stop()
