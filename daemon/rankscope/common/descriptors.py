"""File descriptors: how many this process may have, and how many of them connections may take.

Many systems start a process with 1,024. Anybody who can reach a port could take them all, and a daemon without
descriptors cannot read /proc."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

DESCRIPTORS_WANTED = 1 << 16
CONNECTIONS_OPTION = "grpc.max_allowed_incoming_connections"
CONNECTIONS_SHARE = 4


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
