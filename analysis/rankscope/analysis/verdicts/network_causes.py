"""Why communication is slow, as far as the network shows it: a port with errors, a link that is slower than its peers,
TCP that sends again, NCCL that uses sockets.

A counter is compared with its own past since the job began: a few errors at all times explain nothing. Where the past
is too short, it is compared with the other nodes. Ports that the job does not use are left out: by NCCL's log where
there is one, else by their share of the traffic. A job on one node uses no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rankscope.analysis.verdicts.network import (
    CONGESTION_EVENTS,
    EVENT_NAMES,
    LINK_EVENTS,
    RDMA_LINKS,
    NetworkPort,
    NodeNetwork,
)
from rankscope.analysis.verdicts.thresholds import Policy

SOCKETS = "Socket"
MAX_NAMED = 2
ABOUT_A_MINUTE_SECONDS = 45.0


@dataclass(frozen=True)
class _Finding:
    text: str
    excess: float  # over the least that counts; the largest is named first


def network_evidence(nodes: Mapping[str, NodeNetwork], policy: Policy) -> str:
    """What stands out, in words; empty where nothing does. `nodes` are all nodes of one job, by name."""
    if len(nodes) < 2 and not any(((one.nccl and one.nccl.nodes) or 0) > 1 for one in nodes.values()):
        return ""
    found = [*_events(nodes, policy), *_slow_links(nodes, policy), *_retransmits(nodes, policy)]
    found = sorted(found, key=lambda one: -one.excess) or [*_sockets(nodes)]
    more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return "; ".join(one.text for one in found[:MAX_NAMED]) + more


def _events(nodes: Mapping[str, NodeNetwork], policy: Policy) -> Iterator[_Finding]:
    """Of each port the kind of event that exceeds its past most."""
    for node, network in nodes.items():
        others = [other for name, other in nodes.items() if name != node]
        for port in network.ports:
            found = []
            for kind, count in port.events.items():
                least = _least(kind, policy)
                usual, whose = port.usual_events.get(kind), "usually"
                if usual is None:
                    usual, whose = _among(others, port, kind), "on other nodes"
                if usual is None or count < least or count < policy.network_error_ratio * usual:
                    continue
                if not _is_used(port, network, policy, by_traffic=kind != "link_down"):
                    continue
                before = f"{usual:,.0f}" if usual >= 0.5 else "none"
                text = f"{node}: {port.name}: {_amount(kind, count, network.seconds)}, {whose} {before}"
                found.append(_Finding(text, count / max(least, policy.network_error_ratio * usual)))
            if found:
                yield max(found, key=lambda one: one.excess)


def _least(kind: str, policy: Policy) -> float:
    if kind in LINK_EVENTS:
        return 1.0
    return policy.network_congestion_per_minute if kind in CONGESTION_EVENTS else policy.network_errors_per_minute


def _amount(kind: str, count: int, seconds: float) -> str:
    name = LINK_EVENTS.get(kind, EVENT_NAMES[kind]) if count == 1 else EVENT_NAMES[kind]
    if seconds >= ABOUT_A_MINUTE_SECONDS and count > 1:
        return f"{count * 60 / seconds:,.0f} {name} a minute"
    return f"{count:,} {name} in {seconds:.0f} s"


def _among(others: Sequence[NodeNetwork], port: NetworkPort, kind: str) -> float | None:
    """The median count on ports of this kind of link, of each other node the largest."""
    counts = [
        max(ports)
        for other in others
        if (ports := [each.events.get(kind, 0) for each in other.ports if each.link == port.link])
    ]
    return float(median(counts)) if counts else None


def _slow_links(nodes: Mapping[str, NodeNetwork], policy: Policy) -> Iterator[_Finding]:
    rates: dict[tuple[str, int, str], dict[str, float]] = {}
    for node, network in nodes.items():
        for port in network.ports:
            if port.is_up is not False and port.rate_bits_per_second and _is_used(port, network, policy):
                rates.setdefault(port.key, {})[node] = port.rate_bits_per_second
    for (device, number, _), by_node in rates.items():
        for node, rate in by_node.items():
            peers = [other for name, other in by_node.items() if name != node]
            if peers and rate <= policy.network_rate_ratio * median(peers):
                where = f"{device} port {number}" if number else device
                text = f"{where} of {node} runs at {_rate(rate)}, its peers at {_rate(median(peers))}"
                yield _Finding(text, policy.network_rate_ratio * median(peers) / rate)


def _retransmits(nodes: Mapping[str, NodeNetwork], policy: Policy) -> Iterator[_Finding]:
    ratios = {node: ratio for node, one in nodes.items() if (ratio := _retransmit_ratio(one, policy)) is not None}
    for node, ratio in ratios.items():
        usual, whose = nodes[node].tcp_usual_retransmit_ratio, "usually"
        if usual is None:
            others = [other for name, other in ratios.items() if name != node]
            usual, whose = (median(others) if others else None), "on other nodes"
        if usual is None or ratio < max(policy.network_retransmit_ratio, policy.network_error_ratio * usual):
            continue
        text = f"TCP retransmits on {node}: {ratio:.1%} of segments, {whose} {usual:.1%}".replace("%", " %")
        yield _Finding(text, ratio / max(policy.network_retransmit_ratio, policy.network_error_ratio * usual))


def _retransmit_ratio(network: NodeNetwork, policy: Policy) -> float | None:
    """None where NCCL does not use TCP, or too little was sent."""
    segments, again = network.tcp_segments, network.tcp_retransmits
    if segments is None or again is None or segments < policy.network_segments_needed:
        return None
    is_over_tcp = network.nccl is None or network.nccl.network in ("", SOCKETS)
    return again / segments if is_over_tcp else None


def _sockets(nodes: Mapping[str, NodeNetwork]) -> Iterator[_Finding]:
    for node, network in nodes.items():
        unused = [port for port in network.ports if port.link in RDMA_LINKS and port.is_up]
        if network.nccl is None or network.nccl.network != SOCKETS or not unused or network.nccl.nodes == 1:
            continue
        why = f" ({network.nccl.no_infiniband})" if network.nccl.no_infiniband else ""
        yield _Finding(f"NCCL uses sockets on {node} although {unused[0].device} is up{why}", 1.0)


def _is_used(port: NetworkPort, network: NodeNetwork, policy: Policy, by_traffic: bool = True) -> bool:
    nccl = network.nccl
    if nccl is not None and nccl.devices:
        # In a namespace of its own, a rank has other interfaces. A bond is none of the ports, its members are.
        is_named = any(each.device in nccl.devices for each in network.ports)
        if is_named and not (nccl.network == SOCKETS and network.is_own_namespace):
            return port.device in nccl.devices
        if (port.link in RDMA_LINKS) == (nccl.network == SOCKETS):
            return False
    if not by_traffic or port.moved_bytes is None:
        return True
    total = sum(each.moved_bytes or 0 for each in network.ports)
    return port.moved_bytes > 0 and port.moved_bytes >= policy.network_used_ratio * total


def _rate(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e9:g} Gb/s"
