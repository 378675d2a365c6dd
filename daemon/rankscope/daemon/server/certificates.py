"""The daemon's certificates, read anew when their files change: new connections get the new ones, open streams live on.

Who may call with which certificate is decided elsewhere (guarding.py)."""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import grpc

from rankscope.common.tls import FollowedTls
from rankscope.common.tls import files as material_files
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.server.sockets import ListenError

# Certificates on disk: whether key and certificate belong together, and until when they are good.
#
# The standard library does not tell the latter of a file, and nothing else here needs a package for X.509.

SOON_DAYS = 7.0

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION, _EXTENSIONS, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0xA3, 0x17, 0x18
_DNS_NAME = 0x82
_COMMON_NAME, _SUBJECT_ALTERNATIVE_NAME = bytes.fromhex("550403"), bytes.fromhex("551d11")


class CertificateError(ValueError):
    """Not a certificate, or not one that can be read."""


@dataclass(frozen=True)
class Validity:
    begin: datetime
    end: datetime

    def days_left(self, now: datetime) -> float:
        return (self.end - now).total_seconds() / 86400


def check_pair(certificate: Path, key: Path) -> None:
    """Raises CertificateError if they cannot be used together. A key under a password is one that cannot be used."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise CertificateError(f"{certificate} and {key} are no pair that can be used: {reason}") from error


def validity(pem: bytes) -> Validity:
    """Of the first certificate: the others are those that signed it."""
    try:
        times = [_time(tag, content) for tag, content in _elements(_parts(pem)[3][1])]
        return Validity(times[0], times[1])
    except (ValueError, IndexError) as error:
        raise CertificateError(f"not a certificate: {error}") from error


def names(pem: bytes) -> frozenset[bytes]:
    """Of the first certificate, to the last byte: DNS names, or the common names where there are no alternative names
    at all (RFC 6125)."""
    try:
        parts = _parts(pem)
        alternative = [value for tag, content in parts if tag == _EXTENSIONS for value in _alternative_names(content)]
        if alternative:
            return frozenset(content for tag, content in _sequence(alternative[0]) if tag == _DNS_NAME)
        attributes = [attribute for _, group in _elements(parts[4][1]) for _, attribute in _elements(group)]
        pairs = [[content for _, content in _elements(attribute)] for attribute in attributes]
        return frozenset(pair[1] for pair in pairs if pair[0] == _COMMON_NAME)
    except (ValueError, IndexError) as error:
        raise CertificateError(f"not a certificate: {error}") from error


def _alternative_names(content: bytes) -> Iterator[bytes]:
    for _, extension in _sequence(content):
        values = list(_elements(extension))
        if values[0][1] == _SUBJECT_ALTERNATIVE_NAME:
            yield values[-1][1]


def _sequence(data: bytes) -> Iterator[tuple[int, bytes]]:
    """What is in the sequence that is all of the data."""
    ((_, content),) = _elements(data)
    return _elements(content)


def _parts(pem: bytes) -> list[tuple[int, bytes]]:
    """Serial number, algorithm, issuer, validity, subject, key, extensions; the version before them may be missing."""
    text = pem.decode("latin-1")
    begin = text.find(_BEGIN)
    end = text.find(_END, begin)
    if begin < 0 or end < 0:
        raise CertificateError("no PEM certificate in it")
    der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)])
    signed = next((content for tag, content in _sequence(der) if tag == _SEQUENCE), b"")
    return [(tag, content) for tag, content in _elements(signed) if tag != _VERSION]


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The DER values one after the other."""
    position = 0
    while position < len(data):
        tag, length = data[position], data[position + 1]
        position += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[position : position + size], "big")
            position += size
        if position + length > len(data):
            raise ValueError("cut off")
        yield tag, data[position : position + length]
        position += length


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        # Two digits of a year: X.509 counts 50 to 99 to the last century.
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time where one belongs")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)


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
