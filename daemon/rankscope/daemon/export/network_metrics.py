"""The table of network metrics: ports of the node, and TCP."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family

from rankscope.common.metric_table import ANY, FULL_ONLY, Counter, Gauge, Section
from rankscope.daemon.network.collector import NetworkStatus
from rankscope.daemon.network.ports import CONGESTION, ERRORS, LINKS, RETRANSMITS, PortReading, TcpReading

# What a healthy link does not have, and what a port sends again as packets were lost. The rest explains these.
STANDARD_ERRORS = ("symbol", "link_down", "receive", "discard")
STANDARD_RETRANSMITS = ("packet_sequence", "ack_timeout")


def _rate_text(port: PortReading) -> str:
    return "" if port.rate_bits_per_second is None else f"{port.rate_bits_per_second / 1e9:g} Gb/s"


# fmt: off
PORTS: Section[PortReading] = Section(("device", "port", "node"), (
    Gauge("rankscope_network_info", "A network port of the node, with the kind and the rate of its link; value 1.",
        lambda port: {(port.link, _rate_text(port)): 1}, {"link": LINKS, "rate": ANY}),
    Gauge("rankscope_network_link_up", "1 if the link is up.", lambda port: port.is_up),
    Gauge("rankscope_network_rate_bytes_per_second", "Rate of the link at present, in each direction.",
        lambda port: None if port.rate_bits_per_second is None else port.rate_bits_per_second / 8),
    Counter("rankscope_network_bytes_total", "Bytes since the driver was loaded.",
        lambda port: {"transmit": port.transmitted_bytes, "receive": port.received_bytes},
        {"direction": ("transmit", "receive")}),
    Counter("rankscope_network_errors_total", "Errors of the port and its link since the driver was loaded, by kind.",
        lambda port: {kind: port.events.get(kind) for kind in ERRORS}, {"kind": tuple(ERRORS)},
        standard=STANDARD_ERRORS),
    Counter("rankscope_network_retransmits_total",
        "RDMA packets that were lost, late or sent again, since the driver was loaded, by kind.",
        lambda port: {kind: port.events.get(kind) for kind in RETRANSMITS}, {"kind": tuple(RETRANSMITS)},
        standard=STANDARD_RETRANSMITS),
    Counter("rankscope_network_congestion_notices_total",
        "Congestion notices (CNP) of RoCE, sent and handled, since the driver was loaded.",
        lambda port: {kind: port.events.get(kind) for kind in CONGESTION}, {"kind": tuple(CONGESTION)},
        standard=FULL_ONLY),
))

TCP: Section[TcpReading] = Section(("node",), (
    Counter("rankscope_network_tcp_segments_total", "TCP segments that the node sent, in its own network namespace.",
        lambda tcp: tcp.segments),
    Counter("rankscope_network_tcp_retransmits_total", "TCP segments that the node has sent again, in the same.",
        lambda tcp: tcp.retransmits),
))
# fmt: on


def network_metrics(status: NetworkStatus, node: str, full: bool) -> Iterator[Family]:
    ports = (((port.device, str(port.port), node), port) for port in status.ports)
    yield from PORTS.families(ports, full=full)
    yield from TCP.families([] if status.tcp is None else [((node,), status.tcp)], full=full)
