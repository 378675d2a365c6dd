"""HTTP/2 by hand, for what no honest library sends."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from dataclasses import dataclass

from tests.certificates import Pair
from tests.security.attacked import DAEMON, PATIENCE_SECONDS, Attacked

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4
METHOD = "/rankscope.v1.RankService/ListRanks"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: str, value: str) -> bytes:
    """HPACK: literal, not indexed, no Huffman code."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) < 127:
        return bytes([len(raw)]) + raw
    left, length = len(raw) - 127, [127]
    while left >= 128:
        length.append(left % 128 + 128)
        left //= 128
    return bytes([*length, left]) + raw


def call_headers(method: str = METHOD) -> bytes:
    named = {":method": "POST", ":scheme": "https", ":path": method, ":authority": DAEMON}
    named |= {"te": "trailers", "content-type": "application/grpc"}
    return b"".join(field(name, value) for name, value in named.items())


@dataclass
class Connection:
    """One with a certificate, and its handshake done."""

    attacked: Attacked
    pair: Pair

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.attacked.authority.certificate)
        context.load_cert_chain(self.pair.certificate, self.pair.key)
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", self.attacked.port), PATIENCE_SECONDS)
        self.socket = context.wrap_socket(plain, server_hostname=DAEMON)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def begin(self) -> Connection:
        self.send(PREFACE + frame(SETTINGS))
        return self

    def send(self, content: bytes) -> bool:
        """False if the other side has had enough."""
        try:
            self.socket.sendall(content)
        except OSError:
            return False
        return True

    def hear(self, seconds: float) -> bytes:
        """What comes for so long, or until the end."""
        give_up, heard = time.monotonic() + seconds, b""
        with contextlib.suppress(OSError):
            while (left := give_up - time.monotonic()) > 0:
                self.socket.settimeout(left)
                part = self.socket.recv(65536)
                if not part:
                    break
                heard += part
        return heard
