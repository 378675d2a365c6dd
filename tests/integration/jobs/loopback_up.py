"""Brings the loopback interface of this network namespace up; there may be no `ip` command."""

from __future__ import annotations

import fcntl
import socket
import struct

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    request = struct.pack("16sh14x", b"lo", 0)
    (flags,) = struct.unpack_from("h", fcntl.ioctl(control, SIOCGIFFLAGS, request), 16)
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
