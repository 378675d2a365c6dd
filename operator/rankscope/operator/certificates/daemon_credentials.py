"""What the operator shows to daemons, and whom it believes to be one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

# Pods have no names in DNS: every daemon's certificate carries this one.
DAEMON_NAME = "rankscope-daemon"


@dataclass(frozen=True)
class ClientPair:
    """All PEM. `authorities` are those that a daemon's certificate may be signed by."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


class DaemonTls(Protocol):
    """Asked for every connection: certificates are rotated under us. Raises OSError where there is none to show."""

    def pair(self) -> ClientPair: ...


@dataclass(frozen=True)
class Tls:
    """Files that somebody else renews."""

    certificate: Path
    key: Path
    authority: Path

    def pair(self) -> ClientPair:
        return ClientPair(self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes())


@dataclass(frozen=True)
class HeldTls:
    """From memory: nobody has to mount a key for us that we keep ourselves."""

    current: Callable[[], ClientPair | None]

    def pair(self) -> ClientPair:
        held = self.current()
        if held is None:
            raise OSError("our own certificate is not there yet; the leader makes it (--fleet-certificates)")
        return held


def credentials(tls: DaemonTls) -> grpc.ChannelCredentials:
    pair = tls.pair()
    return grpc.ssl_channel_credentials(pair.authorities, pair.key, pair.certificate)


def naming() -> tuple[str, str]:
    """The option of a channel by which a daemon is known by its role, not by its address."""
    return ("grpc.ssl_target_name_override", DAEMON_NAME)
