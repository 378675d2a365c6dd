"""Captures and profiles for callers on this machine: only for the user whose daemon it is.

The daemon's socket is open to its own user alone. The console listens on loopback, which every user and every container
in the host's network can reach, so it must not open more than the socket does. The kernel's table of connections says
who called."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Collection
from pathlib import Path

import grpc
from starlette.requests import Request

from rankscope.operator.console.endpoints import Channels, ProblemError

Address = tuple[str, int]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_MAPPED = bytes(10) + b"\xff\xff"


def local_channels(target: str, users: Collection[int] | None = None) -> Channels:
    """To the daemon at `target`, for `users`: by default our own, root, and who became root to start us."""
    allowed = {0, os.geteuid(), int(os.environ.get("SUDO_UID", 0))} if users is None else users

    def channel(request: Request) -> grpc.Channel:
        user = None
        if request.client is not None:
            user = caller((request.client.host, request.client.port), request.scope["server"])
        if user not in allowed:
            who = "a caller that is not known" if user is None else f"user {user}"
            advice = "run `rankscope up` as this user, or come through SSH as the user that runs it"
            raise ProblemError(403, f"captures, profiles and reports of this daemon are not for {who}", advice)
        return grpc.insecure_channel(target)

    return channel


def caller(client: Address, server: Address, tables: Collection[Path] = _TABLES) -> int | None:
    """The user id that made the connection. None if the connection is over: what is left of it has no owner, and the
    kernel shows it as root's."""
    wanted = {(_place(*client, is_wide), _place(*server, is_wide)) for is_wide in (False, True)}
    for table in tables:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
            if (local, remote) in wanted and state == _ESTABLISHED and inode != "0":
                return int(user)
    return None


def _place(host: str, port: int, is_wide: bool) -> str:
    """As in 0100007F:2505, in the byte order of the machine; or the same as an address of IPv6."""
    packed = ipaddress.ip_address(host).packed
    if is_wide and len(packed) == 4:
        packed = _MAPPED + packed
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
