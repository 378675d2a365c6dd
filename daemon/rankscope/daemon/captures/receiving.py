"""Taking a datagram off a socket, with what the kernel says about it: who sent it, from where, and when."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from rankscope.daemon.captures.clients import Address
from rankscope.daemon.captures.entering import SO_TIMESTAMPNS
from rankscope.daemon.captures.wire import DATAGRAM_LIMIT

_CREDENTIALS: Final = struct.Struct("=iII")
_TIMESTAMP: Final = struct.Struct("=qq")
_DESCRIPTOR: Final = struct.Struct("=i")
# No room for descriptors: what a sender passes along, the kernel drops.
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_TIMESTAMP.size)


@dataclass(frozen=True)
class Datagram:
    content: bytes
    address: Address
    pid: int  # in our pid namespace; 0 if the sender is not to be seen from it
    uid: int
    sent_unix_seconds: float
    is_whole: bool


def receive(endpoint: socket.socket) -> Datagram | None:
    """The next datagram, or None if there is none."""
    try:
        content, ancillary, flags, address = endpoint.recvmsg(DATAGRAM_LIMIT, _ANCILLARY_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    pid, uid, sent = 0, 0, 0.0
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            pid, uid, _ = _CREDENTIALS.unpack_from(data)
        elif kind == SO_TIMESTAMPNS and len(data) >= _TIMESTAMP.size:
            seconds, nanos = _TIMESTAMP.unpack_from(data)
            sent = seconds + nanos / 1e9
        elif kind == socket.SCM_RIGHTS:
            _close(data)
    return Datagram(content, address or b"", pid, uid, sent, not flags & socket.MSG_TRUNC)


def _close(descriptors: bytes) -> None:
    whole = len(descriptors) - len(descriptors) % _DESCRIPTOR.size
    for (descriptor,) in _DESCRIPTOR.iter_unpack(descriptors[:whole]):
        with contextlib.suppress(OSError):
            os.close(descriptor)
