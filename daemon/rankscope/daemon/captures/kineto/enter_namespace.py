"""A program, not a module: `python -I -S enter_namespace.py NAMESPACE_FD CHANNEL_FD` enters a network namespace, binds
libkineto's daemon socket there and sends its descriptor back over the channel, or the stage and errno of its failure.

It is a separate process because a forked copy of the daemon would hold copies of the locks of gRPC's threads."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

# The daemon's name in libkineto's protocol. The kernel takes the trailing NUL as part of the name.
ABSTRACT_NAME = b"\0dynolog\0"
CLONE_NEWNET = 0x40000000
RECEIVE_BUFFER_BYTES = 256 * 1024
# Not in Python's socket module. The kernel then reports when each datagram was sent.
SO_TIMESTAMPNS = 35


def bind_at(name: bytes | str) -> socket.socket:
    """A non-blocking socket for libkineto's datagrams that reports sender and time. Raises OSError."""
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        endpoint.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        endpoint.bind(name)
    except OSError:
        endpoint.close()
        raise
    return endpoint


def main(namespace: int, channel: socket.socket) -> None:
    stage = "enter"
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        stage = "bind"
        with bind_at(ABSTRACT_NAME) as endpoint:
            socket.send_fds(channel, [b"ok"], [endpoint.fileno()])
    except OSError as error:
        channel.send(f"{stage}:{error.errno or 0}".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
