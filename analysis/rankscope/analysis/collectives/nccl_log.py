"""What NCCL says about itself in its log (NCCL_DEBUG=INFO): version, network, transports, topology.

The lines are those that NCCL 2.4 to 2.28 and RCCL write. A line that is not known says nothing. The log belongs to the
training process, so everything that is kept has bounds, and names have the characters of names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from rankscope.analysis.verdicts.network import NcclFacts
from rankscope.common.text import printable

MAX_LINE_CHARACTERS: Final = 4096
MAX_NAMES: Final = 64  # devices, transports, algorithms
MAX_RINGS: Final = 8
MAX_WARNINGS: Final = 8
RING_CHARACTERS: Final = 200
WARNING_CHARACTERS: Final = 200
NAME_CHARACTERS: Final = 32
MAX_RANKS: Final = 10_000_000

SOCKET: Final = "Socket"
NO_DEVICE: Final = "NCCL found no InfiniBand device"

_MARK: Final = re.compile(r"(?:^|\s)(?:NCCL|RCCL) (INFO|WARN|TRACE|ABORT) ", re.ASCII)
_VERSION: Final = re.compile(r"(?:NCCL|RCCL) version (\d{1,3}(?:\.\d{1,3}){1,3})", re.ASCII)
_NETWORK: Final = re.compile(r"Using network ([\w./ -]{1,32})", re.ASCII)
_IB_DEVICE: Final = re.compile(r"\[\d{1,4}\]([\w.+-]{1,64}):\d{1,3}/\w", re.ASCII)
_SOCKET_DEVICE: Final = re.compile(r"\[\d{1,4}\]([\w.@+-]{1,64}):", re.ASCII)
_SET: Final = re.compile(r"(NCCL_[A-Z0-9_]{1,40}) set (?:by environment )?to (\S{1,64})", re.ASCII)
_COMMUNICATOR: Final = re.compile(r"comm 0x[0-9a-f]{1,16} rank \d{1,8} nRanks (\d{1,8}) nNodes (\d{1,8}) ", re.ASCII)
_CHANNELS: Final = re.compile(r"(\d{1,5}) coll channels,", re.ASCII)
_RING: Final = re.compile(r"Channel \d{1,5}/\d{1,5} : (\d[\d ]*)$", re.ASCII)
_CONNECTION: Final = re.compile(r"Channel \d{1,5}(?:/\d{1,5})? : .{1,80}? via (\S{1,64})", re.ASCII)
_ALGORITHM: Final = re.compile(r"Bytes -> Algo (\w{1,20}) proto (\w{1,20})", re.ASCII)
# Older versions write numbers.
_ALGORITHMS: Final = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS: Final = ("LL", "LL128", "SIMPLE")


class NcclLog:
    """Facts of a log that is read in parts. Add whole lines."""

    def __init__(self) -> None:
        self._version = ""
        self._network = ""
        self._infiniband: dict[str, None] = {}
        self._sockets: dict[str, None] = {}
        self._transports: dict[str, None] = {}
        self._algorithms: dict[str, None] = {}
        self._rings: dict[str, None] = {}
        self._warnings: dict[str, None] = {}
        self._no_infiniband = ""
        self._largest: tuple[int, int] | None = None  # ranks and nodes
        self._is_largest = False  # the communicator that lines are about
        self._channels: int | None = None
        self.lines = 0  # of NCCL

    def add(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._add(line[:MAX_LINE_CHARACTERS].rstrip())

    @property
    def facts(self) -> NcclFacts:
        ranks, nodes = self._largest or (None, None)
        return NcclFacts(
            version=self._version,
            network=self._network,
            devices=tuple(self._sockets if self._is_over_sockets else self._infiniband),
            transports=tuple(sorted(self._transports)),
            no_infiniband=self._no_infiniband if self._is_over_sockets else "",
            nodes=nodes,
            ranks=ranks,
            channels=self._channels,
            algorithms=tuple(sorted(self._algorithms)),
            rings=tuple(self._rings),
            warnings=tuple(self._warnings),
        )

    @property
    def _is_over_sockets(self) -> bool:
        return self._network == SOCKET or (not self._network and "NET/Socket" in self._transports)

    def _add(self, line: str) -> None:
        version = _VERSION.search(line)
        if version:
            self._version = version.group(1)
        mark = _MARK.search(line)
        self.lines += mark is not None or version is not None
        if mark is None:
            return
        text = line[mark.end() :]
        if mark.group(1) == "WARN":
            _keep(self._warnings, printable(text, WARNING_CHARACTERS), MAX_WARNINGS)
        elif text.startswith("Channel "):
            self._channel(text)
        elif text.startswith("NET/"):
            self._net(text)
        elif found := _ALGORITHM.search(text):
            names = (_named(found.group(1), _ALGORITHMS), _named(found.group(2), _PROTOCOLS))
            _keep(self._algorithms, "/".join(names), MAX_NAMES)
        else:
            self._other(text)

    def _channel(self, text: str) -> None:
        if found := _CONNECTION.match(text):
            _keep(self._transports, _transport(found.group(1)), MAX_NAMES)
        elif found := _RING.match(text):
            _keep(self._rings, printable(found.group(1).strip(), RING_CHARACTERS), MAX_RINGS)

    def _net(self, text: str) -> None:
        if text.startswith("NET/IB : No device found"):
            self._no_infiniband = self._no_infiniband or NO_DEVICE
        elif text.startswith("NET/IB : Using "):
            # What follows is the interface for connections out of band.
            for name in _IB_DEVICE.findall(text.partition("; OOB")[0]):
                for part in name.split("+"):  # ports that NCCL uses as one
                    _keep(self._infiniband, part[:NAME_CHARACTERS], MAX_NAMES)
        elif text.startswith("NET/Socket : Using "):
            for name in _SOCKET_DEVICE.findall(text):
                _keep(self._sockets, name[:NAME_CHARACTERS], MAX_NAMES)

    def _other(self, text: str) -> None:
        if found := _NETWORK.match(text):
            self._network = found.group(1).strip()
        elif found := _SET.match(text):
            name, value = found.group(1), found.group(2).rstrip(".")
            if (name == "NCCL_IB_DISABLE" and value != "0") or (name == "NCCL_NET" and value == SOCKET):
                self._no_infiniband = f"{name}={printable(value, NAME_CHARACTERS)}"
        elif found := _COMMUNICATOR.match(text):
            shape = int(found.group(1)), int(found.group(2))
            self._is_largest = max(shape) <= MAX_RANKS and shape >= (self._largest or (0, 0))
            if self._is_largest:
                self._largest = shape
        elif found := _CHANNELS.match(text):
            if self._is_largest:
                self._channels = int(found.group(1))
        elif text.startswith("Connected NVLS tree"):
            _keep(self._transports, "NVLS", MAX_NAMES)


def _keep(names: dict[str, None], name: str, most: int) -> None:
    if name and (name in names or len(names) < most):
        names[name] = None


def _named(text: str, names: tuple[str, ...]) -> str:
    return names[int(text)] if text.isdecimal() and int(text) < len(names) else text


def _transport(text: str) -> str:
    """`NET/IB/0/GDRDMA` is NET/IB/GDRDMA, `SHM/direct/direct` SHM, `P2P/CUMEM/read` P2P/CUMEM."""
    kind, *parts = text.split("/")
    first = re.sub(r"\W.*", "", parts[0])[:NAME_CHARACTERS] if parts else ""
    if kind == "NET" and first:
        return f"NET/{first}/GDRDMA" if any(part.startswith("GDRDMA") for part in parts) else f"NET/{first}"
    if kind == "P2P" and first:
        return f"P2P/{first}"
    return kind if kind in ("P2P", "SHM", "COLLNET", "CollNet") else "other"
