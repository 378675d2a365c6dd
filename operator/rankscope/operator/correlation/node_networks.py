"""The networks of a job's nodes, from the windows of their first ranks. A daemon may send anything: what cannot be is
left out, and names are made printable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import numpy as np
from google.protobuf.message import Message

from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.verdicts.network import EVENT_NAMES, MAX_PORTS, NcclFacts, NetworkPort, NodeNetwork
from rankscope.common.text import printable
from rankscope.operator.correlation.daemon_windows import HeldWindow
from rankscope.v1 import window_pb2

# Reading one takes 0.16 ms. In a larger job, each window shows another part of its nodes.
MAX_NODES = 1024
MAX_NAMES = 64
NAME_CHARACTERS = 64
REASON_CHARACTERS = 120
MAX_COUNT = 1 << 53
MAX_RATE_BITS_PER_SECOND = 1e14
MAX_SPAN_SECONDS = 3600.0


def node_networks(windows: Sequence[HeldWindow], place: Ints) -> dict[int, NodeNetwork]:
    """By place. Rows of `place` are those of `windows`, which are in the order of their ranks."""
    places, rows = np.unique(place, return_index=True)
    parts = -(-len(places) // MAX_NODES)
    turn = round(windows[0].end_unix_nanos / 1e9 / max(windows[0].window_seconds, 0.1)) % max(parts, 1)
    found: dict[int, NodeNetwork] = {}
    for at, row in zip(places[turn::parts].tolist(), rows[turn::parts].tolist(), strict=True):
        told = windows[row].network()
        if told is not None:
            found[at] = network_of(told)
    return found


def network_of(told: window_pb2.NodeNetwork) -> NodeNetwork:
    ratio = _number(told, "tcp_usual_retransmit_ratio", MAX_COUNT)
    return NodeNetwork(
        tuple(map(_port, told.ports[:MAX_PORTS])),
        told.seconds if 0 <= told.seconds <= MAX_SPAN_SECONDS else 0.0,
        _number(told, "tcp_segments", MAX_COUNT),
        _number(told, "tcp_retransmits", MAX_COUNT),
        ratio,
        told.is_own_namespace,
        _facts(told.nccl) if told.HasField("nccl") else None,
    )


def _port(told: window_pb2.NetworkPort) -> NetworkPort:
    return NetworkPort(
        printable(told.device, NAME_CHARACTERS),
        told.port,
        printable(told.link, NAME_CHARACTERS),
        told.is_up if told.HasField("is_up") else None,
        _number(told, "rate_bits_per_second", MAX_RATE_BITS_PER_SECOND),
        _number(told, "transmitted_bytes", MAX_COUNT),
        _number(told, "received_bytes", MAX_COUNT),
        {kind: count for kind, count in told.events.items() if kind in EVENT_NAMES and count <= MAX_COUNT},
        {kind: count for kind, count in told.usual_events.items() if kind in EVENT_NAMES and 0 <= count <= MAX_COUNT},
    )


def _facts(told: window_pb2.NcclLog) -> NcclFacts:
    return NcclFacts(
        version=printable(told.version, NAME_CHARACTERS),
        network=printable(told.network, NAME_CHARACTERS),
        devices=_names(told.devices),
        transports=_names(told.transports),
        no_infiniband=printable(told.no_infiniband, REASON_CHARACTERS),
        nodes=_number(told, "nodes", MAX_COUNT),
        ranks=_number(told, "ranks", MAX_COUNT),
        channels=_number(told, "channels", MAX_COUNT),
        algorithms=_names(told.algorithms),
    )


def _names(told: Iterable[str]) -> tuple[str, ...]:
    return tuple(printable(name, NAME_CHARACTERS) for name, _ in zip(told, range(MAX_NAMES), strict=False))


def _number(message: Message, name: str, most: float) -> Any:
    """None where it was not sent, or cannot be."""
    value = getattr(message, name)
    return value if message.HasField(name) and isfinite(value) and 0 <= value <= most else None
