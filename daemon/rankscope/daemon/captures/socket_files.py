"""libkineto's daemon socket as a file, for daemons that may not enter namespaces: trainers with KINETO_IPC_SOCKET_DIR
share a directory with us. It is not trusted: every trainer can write there."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import time
from itertools import islice
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.entering import bind_at
from rankscope.daemon.captures.namespaces import SocketError

NAME: Final = "dynolog"
CLIENT_PREFIX: Final = "dynoconfigclient"
ENTRIES_LIMIT: Final = 4096
# A client binds its socket long before this, so a socket of that age that refuses has lost its process.
DEAD_AFTER_SECONDS: Final = 60.0


def bind_file(directory: str) -> socket.socket:
    """The socket in a directory, which is made if it is missing."""
    path = Path(directory, NAME)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o1777)  # trainers run as other users, and make their own sockets there
        if _is_socket(path):
            if not _is_dead(path):
                raise SocketError(f"{path} is served by another daemon (dynolog?); stop it, or use another directory")
            path.unlink()
        # The string that trainers are to use, to the letter: they compare.
        endpoint = bind_at(f"{directory}/{NAME}")
    except OSError as error:
        reason = error.strerror or str(error)
        raise SocketError(f"{path} cannot be bound: {reason}; make the directory writable, its path short") from error
    with contextlib.suppress(OSError):
        path.chmod(0o666)
    return endpoint


def unbind_file(directory: str, endpoint: socket.socket) -> None:
    """Close it, and remove its file: one that nobody serves makes every trainer wait 8 s at its exit."""
    endpoint.close()
    path = Path(directory, NAME)
    with contextlib.suppress(OSError):
        if _is_socket(path) and _is_dead(path):  # else it is another daemon's by now
            path.unlink()


def belongs_to_client(address: str, directory: str, uid: int) -> bool:
    """Whether an answer to this address can reach none but its sender. libkineto compares the directory as a string,
    and aborts its process where it differs; and a sender with another root may mean another file by the same name."""
    folder, _, name = address.rpartition("/")
    if folder != directory or not name.startswith(CLIENT_PREFIX):
        return False
    try:
        status = Path(address).lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == uid


def remove_dead_clients(directory: str) -> None:
    """libkineto leaves its client's socket file behind when its process is killed."""
    oldest = time.time() - DEAD_AFTER_SECONDS
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in islice(entries, ENTRIES_LIMIT):
            path = Path(entry.path)
            with contextlib.suppress(OSError):
                is_old = entry.name.startswith(CLIENT_PREFIX) and path.lstat().st_mtime < oldest
                if is_old and _is_socket(path) and _is_dead(path):
                    path.unlink()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _is_dead(path: Path) -> bool:
    """Nobody has it open. To connect sends nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED
