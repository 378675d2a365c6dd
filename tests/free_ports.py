"""Ports for servers that cannot be told to choose one themselves, or that come back on the same one."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000


def free_port() -> int:
    """Below the range that the kernel gives to outgoing connections: one of those, of any process, could take it before
    the server binds it, or while the server is down."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(_FIRST, end) if end > 2 * _FIRST else range(_FIRST, 1 << 16), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port: too many servers run on this machine")
