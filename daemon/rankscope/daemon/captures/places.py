"""A socket that polls come in on: how many it takes at a time, and whom it may answer."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.clients import Address
from rankscope.daemon.captures.namespaces import network_namespace
from rankscope.daemon.captures.receiving import Datagram
from rankscope.daemon.captures.socket_files import belongs_to_client

# A job polls once a second at most; what comes above this rate on one socket waits, so that a flood costs the daemon
# some hundredths of a core and nobody in another namespace anything.
DATAGRAMS_PER_SECOND: Final = 2000
BATCH: Final = 64
KNOWN_LIMIT: Final = 4096
PAUSE_SECONDS: Final = BATCH / DATAGRAMS_PER_SECOND


@dataclass
class Place:
    """Either `namespace` is set, or `directory`: a file socket, which serves all namespaces."""

    endpoint: socket.socket
    namespace: int | None
    directory: str | None
    bound_at: float  # monotonic, as all of these
    filled_at: float
    allowance: float = DATAGRAMS_PER_SECOND
    is_paused: bool = False
    known: set[Address] = field(default_factory=set)

    def refill(self, now: float) -> None:
        self.allowance = min(DATAGRAMS_PER_SECOND, self.allowance + (now - self.filled_at) * DATAGRAMS_PER_SECOND)
        self.filled_at = now

    def may_receive(self) -> bool:
        if self.allowance < 1:
            return False
        self.allowance -= 1
        return True

    def is_stranger(self, address: Address, is_young: bool) -> bool:
        """Whether this is the first that is heard of a client while the socket is young."""
        if not is_young:
            self.known.clear()
            return False
        if address in self.known:
            return False
        if len(self.known) < KNOWN_LIMIT:
            self.known.add(address)
        return True

    def vouched_namespace(self, datagram: Datagram, proc_root: Path) -> int | None:
        """The network namespace of the sender, if it is who it seems to be and an answer reaches it and nobody else."""
        address = datagram.address
        if datagram.pid <= 0 or not address:
            return None
        if self.directory is not None:
            if not isinstance(address, str) or not belongs_to_client(address, self.directory, datagram.uid):
                return None
        elif not isinstance(address, bytes) or address[:1] != b"\0":
            return None
        try:
            namespace = network_namespace(datagram.pid, proc_root)
        except OSError:
            return None
        return namespace if self.namespace in (None, namespace) else None
