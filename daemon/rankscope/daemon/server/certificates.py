"""The daemon's certificates: their files, what is in them, and their replacement while the daemon serves.

New connections get the new certificates; open streams continue with the old ones. `grpc_server.py` decides which
certificate may call."""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from rankscope.common.tls import FollowedTls, TlsMaterial, files
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.server.sockets import ListenError

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger(__name__)

SOON_DAYS = 7.0
CERTIFICATE_BYTES = 1 << 20


class CertificateError(ValueError):
    """Not a certificate, or not one that can be read."""


@dataclass(frozen=True)
class Validity:
    begin: datetime
    end: datetime

    def days_left(self, now: datetime) -> float:
        return (self.end - now).total_seconds() / 86400


def check_pair(certificate: Path, key: Path) -> None:
    """Raises CertificateError if they cannot be used together. A key with a password cannot be used."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CertificateError(f"{certificate} and {key} are not a usable pair: {reason}") from error


def validity(content: bytes) -> Validity:
    """Of the first certificate: the others are the authorities that signed it."""
    certificate = _loaded(content)
    return Validity(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def names(content: bytes) -> frozenset[str]:
    """DNS names of the first certificate, PEM or DER, or its common names where it has no alternative names (RFC 6125).

    Whole names: gRPC's own list ends a name at its first NUL, and an authority may have signed
    `rankscope-operator\\0.example.com`."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    certificate = _loaded(content)
    try:
        try:
            extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            attributes = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            return frozenset(str(attribute.value) for attribute in attributes)
        return frozenset(extension.value.get_values_for_type(x509.DNSName))
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise CertificateError(f"the names of the certificate cannot be read: {error}") from error


def _loaded(content: bytes) -> x509.Certificate:
    # Imported here: it takes 10 MB of memory, which a daemon without TLS does not need.
    from cryptography import x509

    try:
        if b"-----BEGIN " in content:
            return x509.load_pem_x509_certificate(content)
        return x509.load_der_x509_certificate(content)
    except ValueError as error:
        raise CertificateError(f"not a certificate: {error}") from error


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

    def check(self) -> None:
        """Raises ListenError, which names the file, for a certificate or key that cannot be used."""
        for path in (self.key, self.certificate, self.client_authority):
            _check_pem(path)
        try:
            check_pair(self.certificate, self.key)
            for path in (self.certificate, self.client_authority):
                _warn_of_expiry(path, path.read_bytes())
        except (CertificateError, OSError) as error:
            raise ListenError(str(error)) from error

    def followed(self) -> FollowedTls:
        return FollowedTls(files(self.certificate, self.key, self.client_authority))


def metrics_tls(config: Config) -> FollowedTls | None:
    """For /metrics, where it has TLS. Raises ListenError as `TlsFiles.check` does."""
    found = TlsFiles.of(config)
    if found is None or not config.metrics_tls:
        return None
    found.check()
    return found.followed()


class Certificates:
    """The gRPC server's: gRPC asks for every new connection."""

    def __init__(self, found: TlsFiles, on_connection: Callable[[], None] = lambda: None) -> None:
        found.check()
        self._files = found
        self._on_connection = on_connection
        self._tls = found.followed()
        first = self._tls.material()
        if first is None:
            raise ListenError(self._tls.problem)
        self._used = first

    def credentials(self) -> grpc.ServerCredentials:
        first = _configuration(self._used)
        return grpc.dynamic_ssl_server_credentials(first, self._changed, require_client_authentication=True)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        self._on_connection()
        material = self._tls.material()
        if material is None or material is self._used:
            return None
        self._used = material
        log.info("certificates were read again from %s", self._files.certificate)
        with contextlib.suppress(CertificateError):  # OpenSSL accepted it
            _warn_of_expiry(self._files.certificate, material.certificate)
        return _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pair = (material.key, material.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=material.authorities)


def _check_pem(path: Path) -> None:
    try:
        with path.open("rb") as file:
            content = file.read(CERTIFICATE_BYTES)
    except OSError as error:
        raise ListenError(f"{path} cannot be read: {error.strerror}; fix it or pass --tls-certificate none") from error
    if b"-----BEGIN " not in content:
        raise ListenError(f"{path} is not PEM")


def _warn_of_expiry(path: Path, content: bytes) -> None:
    try:
        days = validity(content).days_left(datetime.now(timezone.utc))
    except CertificateError as error:
        raise CertificateError(f"{path}: {error}") from error
    if days < 0:
        log.warning("%s expired %.1f days ago: nobody can connect", path, -days)
    elif days < SOON_DAYS:
        log.warning("%s expires in %.1f days", path, days)
