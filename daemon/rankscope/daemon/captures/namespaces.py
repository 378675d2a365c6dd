"""libkineto's daemon sockets by abstract name, one in each network namespace where training processes live: such names
do not cross from one to another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

from rankscope.daemon.captures import entering

CHILD_SECONDS: Final = 10.0


class SocketError(Exception):
    """A socket cannot be had: says where, why and what to do."""


class SlowError(SocketError):
    """Not now, for want of CPU; the next try may do."""


def network_namespace(pid: int | None = None, proc_root: Path = Path("/proc")) -> int:
    """A number that is equal for processes that share a network; ours by default. Raises OSError for a process that is
    gone."""
    return (proc_root / ("self" if pid is None else str(pid)) / "ns" / "net").stat().st_ino


def bind_here() -> socket.socket:
    try:
        return entering.bind_at(entering.ABSTRACT_NAME)
    except OSError as error:
        raise _bind_error("the daemon's own network namespace", error.strerror) from error


def bind_in(pid: int, namespace: int, proc_root: Path = Path("/proc")) -> socket.socket:
    """The socket in the network namespace of a process, which must be the one named. Needs CAP_SYS_ADMIN; takes a
    while."""
    where = f"the network namespace of pid {pid}"
    try:
        descriptor = os.open(proc_root / str(pid) / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SocketError(f"{where} cannot be opened: {error.strerror}") from error
    try:
        # Since it was looked at, the process may have moved, or its pid become another's.
        if os.fstat(descriptor).st_ino != namespace:
            raise SocketError(f"{where} is another by now")
        return _bind_by_child(descriptor, where)
    finally:
        os.close(descriptor)


def _bind_by_child(namespace: int, where: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-I", "-S", entering.__file__, str(namespace), str(theirs.fileno())]
        try:
            child = subprocess.Popen(
                command, pass_fds=(namespace, theirs.fileno()), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise SocketError(f"{where} cannot be entered: no process to do it: {error.strerror}") from error
        theirs.close()
        try:
            return _receive(ours, where)
        finally:
            child.kill()
            child.wait()


def _receive(channel: socket.socket, where: str) -> socket.socket:
    channel.settimeout(CHILD_SECONDS)
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 64, 1)
    except TimeoutError as error:
        raise SlowError(f"{where}: no answer within {CHILD_SECONDS:g} s; is this machine overloaded?") from error
    if descriptors:
        endpoint = socket.socket(fileno=descriptors[0])
        endpoint.set_inheritable(False)
        endpoint.setblocking(False)
        return endpoint
    stage, _, number = message.decode().partition(":")
    reason = os.strerror(int(number)) if number else "the helper process died"
    if stage == "bind":
        raise _bind_error(where, reason)
    raise SocketError(
        f"{where} cannot be entered: {reason}; give the daemon CAP_SYS_ADMIN, or use file sockets "
        "(KINETO_IPC_SOCKET_DIR, see docs/captures.md)"
    )


def _bind_error(where: str, reason: str | None) -> SocketError:
    return SocketError(
        f"libkineto's socket cannot be bound in {where}: {reason}; is another profiling daemon (dynolog) running there?"
    )
