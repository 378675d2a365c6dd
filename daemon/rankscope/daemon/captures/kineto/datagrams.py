"""libkineto's datagrams: a length, a type, a payload; little-endian. Parsing is strict: anyone in the training
container can send."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from typing import Final

from rankscope.daemon.captures.kineto.clients import Address
from rankscope.daemon.captures.kineto.enter_namespace import SO_TIMESTAMPNS

HEADER: Final = struct.Struct("<Q32s")
_REQUEST: Final = struct.Struct("<iiq")
_REGISTRATION: Final = struct.Struct("<iiq")
_COUNT: Final = struct.Struct("<i")
REQUEST_TYPE: Final = b"req"
REGISTRATION_TYPE: Final = b"ctxt"

# A process names itself and its ancestors; no process tree is this deep.
MAX_PIDS: Final = 256
MAX_DATAGRAM_BYTES: Final = HEADER.size + _REQUEST.size + 4 * MAX_PIDS
# Bit of a request's mask: the sender accepts a configuration now. Without it a profiler is already running.
READY: Final = 2
_CREDENTIALS: Final = struct.Struct("=iII")
_TIMESTAMP: Final = struct.Struct("=qq")
_DESCRIPTOR: Final = struct.Struct("=i")
# No room for descriptors: the kernel drops any that a sender passes.
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(_TIMESTAMP.size)


class MalformedError(Exception):
    """Not a datagram of this protocol; the message names the error."""


@dataclass(frozen=True)
class Request:
    """A poll: "is there anything for me?" Its pids are claims of the sender and prove nothing."""

    mask: int
    job_id: int
    pids: tuple[int, ...]

    @property
    def is_ready(self) -> bool:
        return bool(self.mask & READY)


@dataclass(frozen=True)
class Registration:
    """Sent once at start: "I exist." The sender expects the number of clients."""

    gpu: int
    pid: int
    job_id: int


def parse(datagram: bytes) -> Request | Registration:
    if len(datagram) < HEADER.size:
        raise MalformedError(f"{len(datagram)} bytes are less than a header")
    size, padded_type = HEADER.unpack_from(datagram)
    payload = datagram[HEADER.size :]
    if size != len(payload):
        raise MalformedError(f"announces {size} bytes of payload and carries {len(payload)}")
    kind = padded_type.split(b"\0", 1)[0]
    if kind == REQUEST_TYPE:
        return _request(payload)
    if kind == REGISTRATION_TYPE:
        if len(payload) != _REGISTRATION.size:
            raise MalformedError(f"a registration of {len(payload)} bytes")
        return Registration(*_REGISTRATION.unpack(payload))
    raise MalformedError(f"unknown type {kind[:32]!r}")


def _request(payload: bytes) -> Request:
    if len(payload) < _REQUEST.size:
        raise MalformedError(f"a request of {len(payload)} bytes")
    mask, count, job_id = _REQUEST.unpack_from(payload)
    if not 0 <= count <= MAX_PIDS or len(payload) != _REQUEST.size + 4 * count:
        raise MalformedError(f"{count} pids announced in a request of {len(payload)} bytes")
    return Request(mask, job_id, struct.unpack_from(f"<{count}i", payload, _REQUEST.size))


def configuration(text: str) -> bytes:
    """The answer to a request; an empty text means "nothing for you"."""
    return _datagram(REQUEST_TYPE, text.encode("ascii"))


def count(registered: int) -> bytes:
    """The answer to a registration."""
    return _datagram(REGISTRATION_TYPE, _COUNT.pack(registered))


def _datagram(kind: bytes, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


# Receives a datagram with the kernel's information about it: sender, address, time.


@dataclass(frozen=True)
class Datagram:
    content: bytes
    address: Address
    pid: int  # in the daemon's pid namespace; 0 if the sender is not visible from it
    uid: int
    sent_unix_seconds: float
    is_whole: bool


def receive(endpoint: socket.socket) -> Datagram | None:
    """The next datagram, or None if there is none."""
    try:
        content, ancillary, flags, address = endpoint.recvmsg(MAX_DATAGRAM_BYTES, _ANCILLARY_BYTES)
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
