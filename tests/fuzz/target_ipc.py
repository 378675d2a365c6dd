"""Datagrams that anyone in a container may send to libkineto's endpoint."""

from __future__ import annotations

import os
import time
from typing import Any

from rankscope.daemon.captures import wire
from rankscope.daemon.captures.clients import CLIENTS_PER_PROCESS
from rankscope.daemon.captures.endpoint import Endpoint, Offer
from rankscope.daemon.captures.namespaces import network_namespace
from rankscope.daemon.captures.places import Place
from rankscope.daemon.captures.receiving import Datagram
from rankscope.daemon.procfs import read_stat
from tests.fuzz.targets import recorded

_HEADER = wire.HEADER
# A registration of the protocol's: what this torch sends where it sees a GPU.
_REGISTRATION = _HEADER.pack(16, b"ctxt") + bytes.fromhex("00000000085b00000000000000000000")
SEEDS = [*recorded("ipc"), _REGISTRATION, b""]
TOKENS = [b"req\0", b"ctxt\0", b"dynolog", _HEADER.pack(16, b"req"), _HEADER.pack(48, b"req"), bytes(32)]
SIZE_LIMIT = 2048
_PID = os.getpid()
_TEXT = "ACTIVITIES_LOG_FILE=/tmp/x.json\nACTIVITIES_DURATION_MSECS=100"


class _Socket:
    """Takes answers; nothing is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []

    def sendto(self, answer: bytes, flags: int, address: Any) -> None:
        self.sent.append((answer, address))


def run(data: bytes) -> None:
    _check_parser(data)
    # Whole, cut by the kernel, and from an address that the sender chose as well.
    for address, is_whole, pid in (
        (b"\0client\0", True, _PID),
        (b"\0client\0", False, _PID),
        (data[:107], True, _PID),
        (b"\0client\0", True, 0),
    ):
        _check_answer(data, address, is_whole, pid)


def _check_parser(data: bytes) -> None:
    try:
        message = wire.parse(data[: wire.DATAGRAM_LIMIT])
    except wire.MalformedError as error:
        assert len(str(error)) < 200
        return
    if isinstance(message, wire.Request):
        assert len(message.pids) <= wire.PIDS_LIMIT


def _check_answer(data: bytes, address: bytes, is_whole: bool, pid: int) -> None:
    endpoint = Endpoint(shy_seconds=0.0)
    handed: list[int] = []
    try:
        endpoint.offer(_PID, Offer(read_stat("/proc/self").start_ticks, lambda: _TEXT, lambda: handed.append(1)))
        socket = _Socket()
        place = Place(socket, network_namespace(_PID), None, bound_at=0.0, filled_at=0.0)  # type: ignore[arg-type]
        datagram = Datagram(data[: wire.DATAGRAM_LIMIT], address, pid, 0, time.time(), is_whole)
        endpoint._answer(place, datagram)
        tallies = endpoint.tallies
        assert tallies.answered == len(socket.sent)
        assert tallies.answered + tallies.malformed + tallies.unvouched + tallies.late == 1, tallies
        assert endpoint.client_count() <= CLIENTS_PER_PROCESS
        for answer, to in socket.sent:
            # Never anybody else, and only who the kernel vouches for.
            assert to == address and pid == _PID and address[:1] == b"\0" and is_whole
            size, kind = _HEADER.unpack_from(answer)
            assert size == len(answer) - _HEADER.size and kind.rstrip(b"\0") in (b"req", b"ctxt")
        ready = any(_TEXT.encode() in answer for answer, _ in socket.sent)
        assert bool(handed) == ready and endpoint.withdraw(_PID) == (not ready)
    finally:
        endpoint.stop()
