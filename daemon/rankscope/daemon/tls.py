"""The daemon's certificates, read anew when their files change: new connections get the new ones, open streams live on.

Who may call with which certificate is decided elsewhere (guarding.py)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import grpc

from rankscope.daemon.certificates import SOON_DAYS, CertificateError, check_pair, validity
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.listening import ListenError
from rankscope.wire.following_tls import FollowedTls
from rankscope.wire.following_tls import files as material_files

log = logging.getLogger(__name__)

CERTIFICATE_BYTES = 1 << 20


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

    def __init__(self, files: TlsFiles, on_connection: Callable[[], None] = lambda: None) -> None:
        self._files = files
        self._on_connection = on_connection
        self._lock = threading.Lock()
        try:
            self._state = files.state
        except OSError as error:
            raise ListenError(f"{error.filename} cannot be read: {error.strerror}") from error
        self._first = files.read()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._first, self._changed, require_client_authentication=True)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        self._on_connection()
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
