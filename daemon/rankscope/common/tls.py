"""The TLS side of a server whose certificates are replaced while it serves: new connections get the new ones."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class TlsMaterial:
    """All PEM. With `client_authorities` a caller may show a certificate, and one of another authority is refused;
    whether one is needed is for the server to say."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_authorities: bytes = b""


Read = Callable[[], TlsMaterial | None]


def files(certificate: Path, key: Path, client_authorities: Path | None = None) -> Read:
    """Read anew at every connection; raises OSError."""

    def read() -> TlsMaterial:
        authorities = b"" if client_authorities is None else _content(client_authorities)
        return TlsMaterial(_content(certificate), _content(key), authorities)

    return read


class FollowedTls:
    """`context` is asked for at every connection. What cannot be used leaves what there was, and is told once."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._used: TlsMaterial | None = None
        self._context: ssl.SSLContext | None = None
        self._complaint = ""

    def context(self) -> ssl.SSLContext | None:
        """None: there is nothing to serve with yet."""
        with self._lock:
            try:
                material = self._read()
                if material is not None and material != self._used:
                    self._context = server_context(material)
                    self._used = material
                self._complaint = ""
            except (OSError, ValueError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("new certificates cannot be used, what there was stays: %s", error)
            return self._context


def server_context(material: TlsMaterial) -> ssl.SSLContext:
    """Raises ValueError for what cannot be used together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, material.certificate, material.key)
    if material.client_authorities:
        try:
            context.load_verify_locations(cadata=material.client_authorities.decode("ascii"))
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
        raise ValueError(f"certificate and key are no pair that can be used: {error}") from error
    finally:
        os.close(descriptor)


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES)
