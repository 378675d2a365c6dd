"""The network ports of the node and their counters, as the kernel shows them: InfiniBand and RoCE under
/sys/class/infiniband, Ethernet under /sys/class/net, TCP in /proc/<pid>/net/snmp.

An interface without a device is virtual (lo, veth, bridges, bonds, VLANs) and left out: what it carries goes through
ports that are listed. Representors of virtual functions are left out too. Standard library only: `rankscope doctor`
reads ports where the daemon's packages are missing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs

MAX_PORTS: Final = 64
MAX_ENTRIES: Final = 4096  # of a folder: representors and virtual interfaces are skipped, but looked at
MAX_FILE_BYTES: Final = 4096
MAX_SNMP_BYTES: Final = 64 << 10
MAX_COUNT: Final = 1 << 63
MAX_RATE_BITS_PER_SECOND: Final = 1e14
WORD_BYTES: Final = 4  # the unit of InfiniBand's data counters

INFINIBAND: Final = "infiniband"
ROCE: Final = "roce"
ETHERNET: Final = "ethernet"
IPOIB: Final = "ipoib"
OTHER: Final = "other"  # as AWS EFA
LINKS: Final = (INFINIBAND, ROCE, ETHERNET, IPOIB, OTHER)

# Files by the kind of event that they count. Several files of one kind are added up.
ERRORS: Final[Mapping[str, tuple[str, ...]]] = {
    "symbol": ("counters/symbol_error",),
    "link_down": ("counters/link_downed", "carrier_down_count"),
    "link_recovery": ("counters/link_error_recovery",),
    "receive": ("counters/port_rcv_errors", "statistics/rx_errors"),
    "transmit": ("statistics/tx_errors",),
    "discard": ("counters/port_xmit_discards", "statistics/tx_dropped", "hw_counters/rx_drops"),
    "link_integrity": ("counters/local_link_integrity_errors",),
    "overrun": ("counters/excessive_buffer_overrun_errors",),
    "out_of_buffer": ("hw_counters/out_of_buffer", "statistics/rx_missed_errors"),
    "icrc": ("hw_counters/rx_icrc_encapsulated",),
}
RETRANSMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "out_of_sequence": ("hw_counters/out_of_sequence",),
    "packet_sequence": ("hw_counters/packet_seq_err",),
    "ack_timeout": ("hw_counters/local_ack_timeout_err", "hw_counters/retrans_timeout_events"),
    "receiver_not_ready": ("hw_counters/rnr_nak_retry_err",),
    "adaptive": ("hw_counters/roce_adp_retrans",),
    "packet": ("hw_counters/retrans_pkts",),
}
CONGESTION: Final[Mapping[str, tuple[str, ...]]] = {
    "congestion_sent": ("hw_counters/np_cnp_sent",),
    "congestion_handled": ("hw_counters/rp_cnp_handled",),
}
EVENTS: Final = {**ERRORS, **RETRANSMITS, **CONGESTION}
_SENT: Final = (("counters/port_xmit_data", WORD_BYTES), ("hw_counters/tx_bytes", 1), ("statistics/tx_bytes", 1))
_RECEIVED: Final = (("counters/port_rcv_data", WORD_BYTES), ("hw_counters/rx_bytes", 1), ("statistics/rx_bytes", 1))
_LINK_LAYERS: Final = {"InfiniBand": INFINIBAND, "Ethernet": ROCE}
_INTERFACE_TYPES: Final = {"1": ETHERNET, "32": IPOIB}
_IS_UP: Final = {"up": True, "down": False, "lowerlayerdown": False, "dormant": False, "notpresent": False}
_RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec")
_REPRESENTOR: Final = re.compile(r"(c\d+)?pf\d+(vf|sf)\d+")


@dataclass(frozen=True)
class PortReading:
    """A port at one moment. Counters are the kernel's own, since the driver was loaded; what is not counted is
    missing."""

    device: str
    port: int  # 0 for an interface
    link: str  # one of LINKS
    is_up: bool | None = None
    rate_bits_per_second: float | None = None
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    events: Mapping[str, int] = field(default_factory=dict)  # by kind, of EVENTS

    @property
    def key(self) -> tuple[str, int, str]:
        return (self.device, self.port, self.link)


@dataclass(frozen=True)
class TcpReading:
    """Of a network namespace, since it was made."""

    segments: int  # sent, without those that were sent again
    retransmits: int


def read_ports(sys_root: Path) -> tuple[PortReading, ...]:
    """All ports, in the order of their names; those of InfiniBand first. A port that vanishes is left out."""
    found = (*_infiniband_ports(sys_root / "class/infiniband"), *_interfaces(sys_root / "class/net"))
    return found[:MAX_PORTS]


def read_tcp(process: str) -> TcpReading | None:
    """Of the network namespace of a process, by its folder in /proc. None where it cannot be read."""
    try:
        lines = procfs.read_bounded(f"{process}/net/snmp", MAX_SNMP_BYTES).splitlines()
    except OSError:
        return None
    tables = [line.split() for line in lines if line.startswith(b"Tcp:")]
    if len(tables) < 2:
        return None
    values = dict(zip(tables[0], tables[1], strict=False))
    segments, retransmits = (procfs.whole_number(values.get(name, b"")) for name in (b"OutSegs", b"RetransSegs"))
    return None if segments is None or retransmits is None else TcpReading(segments, retransmits)


def _infiniband_ports(folder: Path) -> Iterator[PortReading]:
    for device in _entries(folder):
        for number in _entries(f"{folder}/{device}/ports"):
            path = f"{folder}/{device}/ports/{number}"
            state = _text(f"{path}/state")
            if not number.isdecimal() or len(number) > 3 or state is None:
                continue
            rate = _RATE.match(_text(f"{path}/rate") or "")
            link = _LINK_LAYERS.get(_text(f"{path}/link_layer") or "", OTHER)
            yield _reading(
                path, device, int(number), link, "ACTIVE" in state, float(rate.group(1)) * 1e9 if rate else None
            )


def _interfaces(folder: Path) -> Iterator[PortReading]:
    for name in _entries(folder):
        path = f"{folder}/{name}"
        link = _INTERFACE_TYPES.get(_text(f"{path}/type") or "")
        is_real = Path(path, "device").is_dir()
        if link is None or not is_real or _REPRESENTOR.fullmatch(_text(f"{path}/phys_port_name") or ""):
            continue
        megabits = _number(f"{path}/speed")
        is_up = _IS_UP.get(_text(f"{path}/operstate") or "")
        yield _reading(path, name, 0, link, is_up, megabits * 1e6 if megabits else None)


def _reading(path: str, device: str, port: int, link: str, is_up: bool | None, rate: float | None) -> PortReading:
    events = {}
    for kind, files in EVENTS.items():
        counted = [number for file in files if (number := _number(f"{path}/{file}")) is not None]
        if counted and sum(counted) < MAX_COUNT:
            events[kind] = sum(counted)
    is_plausible = rate is not None and 0 < rate < MAX_RATE_BITS_PER_SECOND
    sent, received = (_bytes(path, counters) for counters in (_SENT, _RECEIVED))
    return PortReading(device, port, link, is_up, rate if is_plausible else None, sent, received, events)


def _bytes(path: str, counters: tuple[tuple[str, int], ...]) -> int | None:
    """By the first of the files that there is."""
    found = ((_number(f"{path}/{file}"), unit) for file, unit in counters)
    return next((n * unit for n, unit in found if n is not None and n * unit < MAX_COUNT), None)


def _entries(folder: Path | str) -> list[str]:
    """Names in an order that stays: mlx5_2 before mlx5_10."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES)]
    except OSError:
        return []
    return sorted(names, key=lambda name: [part.zfill(8) for part in re.split(r"(\d+)", name)])


def _text(path: str) -> str | None:
    """None where it is not there, or the driver does not support it."""
    try:
        return procfs.read_bounded(path, MAX_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None


def _number(path: str) -> int | None:
    """None also for a value that a driver writes in place of one: "-1", "N/A"."""
    text = _text(path)
    return None if text is None else procfs.whole_number(text.encode())
