"""gRPC over TCP for the operator alone: certificates on both sides, and the caller's has to be an operator's.

Certificates are read anew when their files change: new connections get the new ones, open streams live on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc

from rankscope.daemon.certificates import SOON_DAYS, CertificateError, check_pair, validity
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.listening import ListenError
from rankscope.wire.following_tls import FollowedTls
from rankscope.wire.following_tls import files as material_files

log = logging.getLogger(__name__)

# Daemons have certificates of the same authority: one that was stolen from a node must not open the other nodes.
OPERATOR_ROLE = "rankscope-operator"
CERTIFICATE_BYTES = 1 << 20
CALLERS_REMEMBERED = 256
NOT_AN_OPERATOR = "this certificate is not an operator's"


@dataclass(frozen=True)
class TlsFiles:
    certificate: Path
    key: Path
    client_authority: Path

    @classmethod
    def of(cls, config: Config) -> TlsFiles | None:
        if config.tls_certificate == NONE:
            return None
        return cls(Path(config.tls_certificate), Path(config.tls_key), Path(config.tls_client_authority))

    @property
    def state(self) -> tuple[tuple[int, int, int, int], ...]:
        """Changes when any of them does. A Kubernetes secret is swapped by a link, so links are followed."""
        found = [path.stat() for path in (self.certificate, self.key, self.client_authority)]
        return tuple((status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size) for status in found)

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises ListenError, which names the file, for a certificate or key that cannot be used."""
        key, certificate, authority = (_read(path) for path in (self.key, self.certificate, self.client_authority))
        try:
            check_pair(self.certificate, self.key)
        except CertificateError as error:
            raise ListenError(str(error)) from error
        for path, content in ((self.certificate, certificate), (self.client_authority, authority)):
            _warn_of_the_end(path, content)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)


def metrics_tls(config: Config) -> FollowedTls | None:
    """For /metrics, where it is to have TLS. Raises ListenError as `TlsFiles.read` does."""
    files = TlsFiles.of(config)
    if files is None or not config.metrics_tls:
        return None
    files.read()
    return FollowedTls(material_files(files.certificate, files.key, files.client_authority))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(CERTIFICATE_BYTES)
    except OSError as error:
        raise ListenError(f"{path} cannot be read: {error.strerror}; mend it or pass --tls-certificate none") from error
    if b"-----BEGIN " not in content:
        raise ListenError(f"{path} is not PEM")
    return content


def _warn_of_the_end(path: Path, content: bytes) -> None:
    try:
        days = validity(content).days_left(datetime.now(timezone.utc))
    except CertificateError as error:
        raise ListenError(f"{path}: {error}") from error
    if days < 0:
        log.warning("%s expired %.1f days ago: nobody will connect", path, -days)
    elif days < SOON_DAYS:
        log.warning("%s expires in %.1f days", path, days)


class Certificates:
    """Asked by gRPC for every new connection. What cannot be read leaves the certificates as they are."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        try:
            self._state = files.state
        except OSError as error:
            raise ListenError(f"{error.filename} cannot be read: {error.strerror}") from error
        self._first = files.read()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._first, self._changed, require_client_authentication=True)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            try:
                state = self._files.state
                if state == self._state:
                    return None
                configuration = self._files.read()
                if self._files.state != state:
                    return None  # being written this moment: the next connection asks again
            except (OSError, ListenError) as error:
                log.warning("the new certificates cannot be used, the old ones stay: %s", error)
                return None
            self._state = state
        log.info("certificates were read anew from %s", self._files.certificate)
        return configuration


class OperatorsOnly(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Whoever comes over TCP has to show an operator's certificate; the Unix socket is guarded by its own mode."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._guarded(_unknown_method))
        made = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
        behaviour = getattr(handler, _kind(handler))
        return made(
            self._guarded(behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, behaviour: Callable[[Any, grpc.ServicerContext], Any]) -> Callable[..., Any]:
        def guard(request: Any, context: grpc.ServicerContext) -> Any:
            if not context.peer().startswith("unix:"):
                self._check(context)
            return behaviour(request, context)

        return guard

    def _check(self, context: grpc.ServicerContext) -> None:
        names = caller_names(context.auth_context())
        if OPERATOR_ROLE in names:
            return
        address = context.peer().rpartition(":")[0]
        shown = ", ".join(sorted(names))[:200]
        if (address, shown) not in self._told and len(self._told) < CALLERS_REMEMBERED:
            self._told.add((address, shown))
            log.warning("refused %s: its certificate is of %r, not of %s", address, shown, OPERATOR_ROLE)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, NOT_AN_OPERATOR)


def caller_names(auth: dict[str, list[bytes]]) -> frozenset[str]:
    """Names that the authority vouches for; the common name counts only where there are no others (RFC 6125)."""
    names = auth.get("x509_subject_alternative_name") or auth.get("x509_common_name") or ()
    return frozenset(name.decode(errors="replace") for name in names)


def _kind(handler: grpc.RpcMethodHandler) -> str:
    return f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"


def _unknown_method(request: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
