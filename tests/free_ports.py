"""Ports for servers that cannot be told to choose one themselves, or that come back on the same one."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_FIRST = 10_000
_WORKERS = 16  # of pytest-xdist; each has ports of its own, so that none takes what another is about to bind
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
# Processes that do not share a sandbox begin at different places.
_turns = itertools.count(os.getpid())


def free_port() -> int:
    """Below the range that the kernel gives to outgoing connections: one of those, of any process, could take it before
    the server binds it, or while the server is down."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(_FIRST + _worker, end if end > 2 * _FIRST else 1 << 16, _WORKERS)
    for _ in range(len(ports)):
        port = ports[next(_turns) % len(ports)]
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port: too many servers run on this machine")
