"""The network of a node as a job on it has it: its ports against their own past, TCP, and what NCCL logged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of a node, that a daemon sends.
MAX_PORTS = 64

RDMA_LINKS = frozenset({"infiniband", "roce"})

# How events read, by kind. The daemon counts these (daemon/network/ports.py).
EVENT_NAMES: Mapping[str, str] = {
    "symbol": "symbol errors",
    "link_down": "losses of the link",
    "link_recovery": "link recoveries",
    "receive": "receive errors",
    "transmit": "transmit errors",
    "discard": "discarded packets",
    "link_integrity": "link integrity errors",
    "overrun": "buffer overruns",
    "out_of_buffer": "packets dropped for want of a buffer",
    "icrc": "checksum errors",
    "out_of_sequence": "packets out of sequence",
    "packet_sequence": "sequence errors",
    "ack_timeout": "acknowledgements timed out",
    "receiver_not_ready": "retries as the receiver was not ready",
    "adaptive": "adaptive retransmits",
    "packet": "packets sent again",
    "congestion_sent": "congestion notices sent",
    "congestion_handled": "congestion notices received",
}
# Of these, one is enough to be named.
LINK_EVENTS: Mapping[str, str] = {"link_down": "loss of the link", "link_recovery": "link recovery"}
CONGESTION_EVENTS = frozenset({"congestion_sent", "congestion_handled"})


@dataclass(frozen=True)
class NetworkPort:
    """Counters are their growth over `NodeNetwork.seconds`."""

    device: str
    port: int  # 0 for an interface
    link: str  # "infiniband", "roce", "ethernet", "ipoib", "other"
    is_up: bool | None = None
    rate_bits_per_second: float | None = None
    transmitted_bytes: int | None = None
    received_bytes: int | None = None
    events: Mapping[str, int] = field(default_factory=dict)  # by kind; one that is missing was 0, or is not counted
    usual_events: Mapping[str, float] = field(default_factory=dict)  # in the median minute before; missing: not known

    @property
    def name(self) -> str:
        return f"{self.device} port {self.port}" if self.port else self.device

    @property
    def key(self) -> tuple[str, int, str]:
        return (self.device, self.port, self.link)

    @property
    def moved_bytes(self) -> int | None:
        known = [count for count in (self.transmitted_bytes, self.received_bytes) if count is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class NcclFacts:
    """What NCCL writes with NCCL_DEBUG=INFO. Empty or None where it is not told."""

    version: str = ""  # "2.28.9"
    network: str = ""  # "Socket", "IB", or a plugin's name
    devices: tuple[str, ...] = ()  # of that network: "mlx5_0", "eth0"
    transports: tuple[str, ...] = ()  # of channels: "P2P/CUMEM", "SHM", "NET/Socket", "NET/IB/GDRDMA"
    no_infiniband: str = ""  # why InfiniBand is not used
    nodes: int | None = None  # of the largest communicator, like the next two
    ranks: int | None = None
    channels: int | None = None  # for collectives
    algorithms: tuple[str, ...] = ()  # "RING/SIMPLE", where operations are logged
    rings: tuple[str, ...] = ()  # "0 1 2 3", distinct ones
    warnings: tuple[str, ...] = ()  # the first, without time and process


@dataclass(frozen=True)
class NodeNetwork:
    ports: tuple[NetworkPort, ...] = ()
    seconds: float = 0.0  # a minute, or less after a start
    # Of the network namespace of the job's first rank on the node.
    tcp_segments: int | None = None
    tcp_retransmits: int | None = None
    tcp_usual_retransmit_ratio: float | None = None
    is_own_namespace: bool = False  # or not known: names of its interfaces may not be those of the ports
    nccl: NcclFacts | None = None
