"""What servers share: TLS with certificates that are replaced while they serve (new connections get the new ones), and
connections that do not take all file descriptors.

Many systems start a process with 1,024 descriptors. Anybody who can reach a port could take them all, and a daemon
without descriptors cannot read /proc."""

from __future__ import annotations

import logging
import os
import resource
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 20
DESCRIPTORS_WANTED = 1 << 16
CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"
CONNECTIONS_SHARE = 4


@dataclass(frozen=True)
class TlsMaterial:
    """All PEM. `authorities` sign the other side's certificates. A server with them asks callers for a certificate and
    refuses one of another authority; whether a caller needs one is decided by the routes."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes = b""


Read = Callable[[], TlsMaterial | None]


def files(certificate: Path, key: Path, authorities: Path | None = None) -> Read:
    """Reads the files again at every call; raises OSError."""

    def read() -> TlsMaterial:
        trusted = b"" if authorities is None else _content(authorities)
        return TlsMaterial(_content(certificate), _content(key), trusted)

    return read


class FollowedTls:
    """To be asked at every connection. Material that cannot be used is logged once; the one before stays in use."""

    def __init__(self, read: Read, needs_certificates: bool = False) -> None:
        """`needs_certificates`: a caller without a certificate is refused before it can send anything."""
        self._read = read
        self._needs_certificates = needs_certificates
        self._lock = threading.Lock()
        self._used: TlsMaterial | None = None
        self._context: ssl.SSLContext | None = None
        self.problem = ""  # of the newest material

    def material(self) -> TlsMaterial | None:
        """The newest that can be used, as the same object while it does not change. None: there is none yet."""
        with self._lock:
            self._follow()
            return self._used

    def context(self) -> ssl.SSLContext | None:
        """None: there is no certificate yet."""
        with self._lock:
            self._follow()
            return self._context

    def _follow(self) -> None:
        try:
            material = self._read()
            if material is not None and material != self._used:
                self._context = server_context(material)
                if self._needs_certificates:
                    self._context.verify_mode = ssl.CERT_REQUIRED
                self._used = material
            self.problem = ""
        except (OSError, ValueError) as error:
            if str(error) != self.problem:
                self.problem = str(error)
                log.warning("new certificates cannot be used, the old ones stay: %s", error)


class FollowedContext(ssl.SSLContext):
    """For servers of asyncio, which keep one context: every connection gets the newest."""

    _tls: FollowedTls

    @classmethod
    def of(cls, tls: FollowedTls) -> FollowedContext:
        made = cls(ssl.PROTOCOL_TLS_SERVER)
        made._tls = tls
        return made

    def wrap_bio(self, *given: Any, **named: Any) -> ssl.SSLObject:
        context = self._tls.context()
        # Without a certificate the handshake fails, until there is one.
        return super().wrap_bio(*given, **named) if context is None else context.wrap_bio(*given, **named)


def server_context(material: TlsMaterial) -> ssl.SSLContext:
    """Raises ValueError if certificate, key and authorities cannot be used together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, material.certificate, material.key)
    if material.authorities:
        try:
            context.load_verify_locations(cadata=material.authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"the authorities of callers cannot be read: {error}") from error
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """From memory: the standard library reads files only, and a key does not belong on a disk."""
    descriptor = os.memfd_create("rankscope-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, certificate + b"\n" + key)
        # Without the callback, a key under a password would ask for it on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ValueError(f"certificate and key are not a usable pair: {error}") from error
    finally:
        os.close(descriptor)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES)


def raise_limit() -> int:
    """Raises the limit as far as it is needed and allowed. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return DESCRIPTORS_WANTED if soft == resource.RLIM_INFINITY else soft


def with_bounded_connections(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Options of a gRPC server: its connections take at most a part of the descriptors."""
    most = raise_limit() // CONNECTIONS_SHARE
    return [(name, min(value, most) if name == CONNECTIONS_OPTION else value) for name, value in options]
