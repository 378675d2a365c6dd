"""Datagrams that anyone in a container may send to libkineto's endpoint."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from rankscope.daemon.captures.kineto import datagrams
from rankscope.daemon.captures.kineto.clients import CLIENTS_PER_PROCESS
from rankscope.daemon.captures.kineto.datagrams import Datagram
from rankscope.daemon.captures.kineto.endpoint import Endpoint, Offer, Place
from rankscope.daemon.captures.kineto.sockets import network_namespace
from rankscope.daemon.procfs import read_stat
from tests.fuzz.scratch import scratch_folder
from tests.fuzz.targets import recorded

_HEADER = datagrams.HEADER
# A registration of the protocol's: what this torch sends where it sees a GPU.
_REGISTRATION = _HEADER.pack(16, b"ctxt") + bytes.fromhex("00000000085b00000000000000000000")
SEEDS = [*recorded("ipc"), _REGISTRATION, b""]
TOKENS = [b"req\0", b"ctxt\0", b"dynolog", _HEADER.pack(16, b"req"), _HEADER.pack(48, b"req"), bytes(32)]
SIZE_LIMIT = 2048
_PID = os.getpid()
_NAMESPACE = network_namespace(_PID)
CLIENT = "dynoconfigclient0a1b"
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
        _check_answer(data, address, is_whole, pid, Place(_Socket(), _NAMESPACE, None, bound_at=0.0))
    folder = _folder()
    # A pathname, as the kernel hands it out: up to the first NUL.
    chosen = os.fsdecode(data[:107].split(b"\0")[0])
    for name in (f"{folder}/{CLIENT}", chosen, f"{folder}/{chosen}"[:107], f"{folder}/../{folder.name}/{CLIENT}"):
        place = Place(_Socket(), None, str(folder), bound_at=0.0)
        _check_answer(data, name, True, _PID, place)


_FOLDER: list[Path] = []


def _folder() -> Path:
    """Where a client has its socket."""
    if not _FOLDER:
        _FOLDER.append(scratch_folder("ipc"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
            client.bind(str(_FOLDER[0] / CLIENT))
    return _FOLDER[0]


def _check_parser(data: bytes) -> None:
    try:
        message = datagrams.parse(data[: datagrams.MAX_DATAGRAM_BYTES])
    except datagrams.MalformedError as error:
        assert len(str(error)) < 200
        return
    if isinstance(message, datagrams.Request):
        assert len(message.pids) <= datagrams.MAX_PIDS


def _check_answer(data: bytes, address: bytes | str, is_whole: bool, pid: int, place: Place) -> None:
    endpoint = Endpoint(settling_seconds=0.0)
    handed: list[int] = []
    try:
        endpoint.offer(_PID, Offer(read_stat("/proc/self").start_ticks, lambda: _TEXT, lambda: handed.append(1)))
        datagram = Datagram(data[: datagrams.MAX_DATAGRAM_BYTES], address, pid, os.getuid(), time.time(), is_whole)
        endpoint._answer(place, datagram)
        sent: list[tuple[bytes, Any]] = place.endpoint.sent
        tallies = endpoint.tallies
        assert tallies["answered"] == len(sent)
        assert tallies["answered"] + tallies["malformed"] + tallies["unvouched"] + tallies["late"] == 1, tallies
        assert endpoint.client_count() <= CLIENTS_PER_PROCESS
        for answer, to in sent:
            # Never anybody else, and only who the kernel vouches for.
            own = address[:1] == b"\0" if place.directory is None else address == f"{place.directory}/{CLIENT}"
            assert to == address and pid == _PID and own and is_whole
            size, kind = _HEADER.unpack_from(answer)
            assert size == len(answer) - _HEADER.size and kind.rstrip(b"\0") in (b"req", b"ctxt")
        ready = any(_TEXT.encode() in answer for answer, _ in sent)
        assert bool(handed) == ready and endpoint.withdraw(_PID) == (not ready)
    finally:
        endpoint.stop()
