"""Slow communication with a network that explains it, and the healthy twins of such jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rankscope.analysis.verdicts.network import NcclFacts, NetworkPort, NodeNetwork
from rankscope.analysis.verdicts.network_causes import network_evidence
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict, explanation, gist, headline
from tests.unit.analysis.synthetic import SyntheticJob, watch

GIGABIT = 1e9
HEALTHY_PORT = NetworkPort("mlx5_0", 1, "infiniband", True, 400 * GIGABIT, 10**10, 10**10)
HEALTHY_NODE = NodeNetwork((HEALTHY_PORT,), 60.0, 50_000, 10, 0.0002)
SYMBOLS = replace(HEALTHY_PORT, events={"symbol": 412}, usual_events={"symbol": 3.0})
ETHERNET = NetworkPort("eth0", 0, "ethernet", True, 25 * GIGABIT, 10**10, 10**10)
OVER_IB = NcclFacts("2.28.9", "IB", ("mlx5_0",), ("NET/IB/GDRDMA",), nodes=3)
OVER_SOCKETS = NcclFacts("2.28.9", "Socket", ("eth0",), ("NET/Socket",), "NCCL_IB_DISABLE=1", nodes=3)


def node(*ports: NetworkPort, **changes: Any) -> NodeNetwork:
    return replace(HEALTHY_NODE, ports=ports, **changes)


def evidence_of(*nodes: NodeNetwork) -> str:
    """Of a job of three nodes, of which the last ones are healthy."""
    named = [*nodes, *(HEALTHY_NODE,) * (3 - len(nodes))]
    return network_evidence({f"node-{number}": one for number, one in enumerate(named)}, DEFAULT_POLICY)


def test_errors_are_named_with_node_port_and_past() -> None:
    assert evidence_of(node(SYMBOLS)) == "node-0: mlx5_0 port 1: 412 symbol errors a minute, usually 3"


def test_a_constant_history_of_errors_is_no_cause() -> None:
    assert evidence_of(node(replace(SYMBOLS, usual_events={"symbol": 300.0}))) == ""


def test_few_errors_are_no_cause() -> None:
    assert evidence_of(node(replace(SYMBOLS, events={"symbol": 9}, usual_events={"symbol": 0.0}))) == ""


def test_without_a_past_other_nodes_are_compared() -> None:
    young = replace(SYMBOLS, usual_events={})
    assert evidence_of(node(young)).endswith("412 symbol errors a minute, on other nodes none")
    assert evidence_of(node(young), node(young), node(young)) == ""


def test_a_lost_link_counts_once_and_without_traffic() -> None:
    lost = replace(
        HEALTHY_PORT,
        is_up=False,
        transmitted_bytes=0,
        received_bytes=0,
        events={"link_down": 1},
        usual_events={"link_down": 0.0},
    )
    text = evidence_of(node(lost, replace(HEALTHY_PORT, device="mlx5_1")))
    assert text == "node-0: mlx5_0 port 1: 1 loss of the link in 60 s, usually none"


def test_a_port_without_traffic_of_the_job_is_no_cause() -> None:
    idle = replace(SYMBOLS, device="mlx5_9", transmitted_bytes=10, received_bytes=0)
    assert evidence_of(node(idle, HEALTHY_PORT)) == ""


def test_a_port_that_nccl_does_not_use_is_no_cause() -> None:
    other = replace(SYMBOLS, device="mlx5_9")
    assert evidence_of(node(other, HEALTHY_PORT)) != ""
    assert evidence_of(node(other, HEALTHY_PORT, nccl=OVER_IB)) == ""
    assert evidence_of(node(SYMBOLS, HEALTHY_PORT, nccl=OVER_IB)) != ""


def test_names_in_a_pods_namespace_are_not_the_nodes() -> None:
    errors = replace(ETHERNET, device="ens5", events={"receive": 90}, usual_events={"receive": 0.0})
    assert evidence_of(node(errors, ETHERNET, nccl=OVER_SOCKETS, is_own_namespace=True)) != ""
    assert evidence_of(node(errors, ETHERNET, nccl=OVER_SOCKETS)) == ""


def test_members_of_a_bond_that_nccl_names_are_used() -> None:
    errors = replace(ETHERNET, device="ens5", events={"receive": 90}, usual_events={"receive": 0.0})
    bond = replace(OVER_SOCKETS, devices=("bond0",), no_infiniband="")
    assert evidence_of(node(errors, nccl=bond)) != ""
    assert "symbol" not in evidence_of(node(ETHERNET, SYMBOLS, nccl=bond))


def test_a_link_slower_than_its_peers_is_named() -> None:
    nodes = [node(ETHERNET), node(ETHERNET), node(replace(ETHERNET, rate_bits_per_second=GIGABIT))]
    assert evidence_of(*nodes) == "eth0 of node-2 runs at 1 Gb/s, its peers at 25 Gb/s"
    assert evidence_of(*[node(replace(ETHERNET, rate_bits_per_second=GIGABIT))] * 3) == ""


def test_tcp_retransmits_are_compared_with_their_past() -> None:
    lossy = node(ETHERNET, tcp_retransmits=1550)
    assert evidence_of(lossy) == "TCP retransmits on node-0: 3.1 % of segments, usually 0.0 %"
    assert evidence_of(replace(lossy, tcp_usual_retransmit_ratio=0.02)) == ""
    assert evidence_of(replace(lossy, tcp_segments=900, tcp_retransmits=28)) == ""
    assert evidence_of(replace(lossy, tcp_usual_retransmit_ratio=None)).endswith("on other nodes 0.0 %")
    assert evidence_of(replace(lossy, nccl=OVER_IB, ports=(HEALTHY_PORT,))) == ""


def test_sockets_beside_infiniband_are_named_with_the_reason() -> None:
    text = evidence_of(node(HEALTHY_PORT, ETHERNET, nccl=OVER_SOCKETS))
    assert text == "NCCL uses sockets on node-0 although mlx5_0 is up (NCCL_IB_DISABLE=1)"
    assert evidence_of(node(ETHERNET, nccl=OVER_SOCKETS)) == ""


def test_congestion_needs_far_more_notices_than_errors() -> None:
    def notices(count: int) -> NodeNetwork:
        return node(replace(HEALTHY_PORT, events={"congestion_handled": count}, usual_events={"congestion_handled": 5}))

    assert evidence_of(notices(900)) == "" and "congestion notices received" in evidence_of(notices(52_000))


def test_a_job_on_one_node_uses_no_network() -> None:
    assert network_evidence({"node-0": node(SYMBOLS)}, DEFAULT_POLICY) == ""


def test_the_worst_ports_are_named_and_the_rest_counted() -> None:
    bad = [node(replace(SYMBOLS, events={"symbol": count})) for count in (100, 3000, 200)]
    text = evidence_of(*bad)
    assert text.startswith("node-1: mlx5_0 port 1: 3,000 symbol errors") and text.endswith("; and 1 more")


JOB = SyntheticJob(data=8, nodes=2, network={0: HEALTHY_NODE, 1: HEALTHY_NODE})
PLANTED = {0: HEALTHY_NODE, 1: node(SYMBOLS)}


def test_a_slow_network_with_errors_has_them_as_its_cause() -> None:
    verdict = watch((JOB, 8), (JOB.but(transfer_seconds=0.060, network=PLANTED), 5))[-1]
    assert (verdict.kind, verdict.culprits, verdict.cause.phase) == (Kind.SLOW_COMMUNICATION, (), "network")
    assert verdict.cause.evidence == "node-1: mlx5_0 port 1: 412 symbol errors a minute, usually 3"


def test_the_cause_stays_while_communication_is_slow() -> None:
    slow = JOB.but(transfer_seconds=0.060)
    verdicts = watch((JOB, 8), (slow.but(network=PLANTED), 5), (slow, 20))
    assert {verdict.cause.phase for verdict in verdicts[-21:]} == {"network"}


@pytest.mark.parametrize(("transfer_seconds", "network"), [(0.005, PLANTED), (0.060, JOB.network)])
def test_healthy_twins_have_no_network_cause(transfer_seconds: float, network: dict[int, NodeNetwork]) -> None:
    """Errors without slow communication are no finding; slow communication without errors has no such cause."""
    verdicts = watch((JOB, 8), (JOB.but(transfer_seconds=transfer_seconds, network=network), 8))
    assert all(verdict.cause.phase != "network" for verdict in verdicts)
    assert verdicts[-1].kind is (Kind.HEALTHY if network is PLANTED else Kind.SLOW_COMMUNICATION)


def test_headline_names_the_network_and_its_gist_has_no_figures() -> None:
    cause = Cause("network", (), "node-1: mlx5_0 port 1: 412 symbol errors a minute, usually 3")
    verdict = Verdict(Kind.SLOW_COMMUNICATION, "it takes 60 ms instead of 5", Severity.ALARM, cause=cause)
    assert headline(verdict) == f"communication is slow because of the network ({cause.evidence})"
    assert explanation(verdict) == "it takes 60 ms instead of 5"
    assert gist(verdict) == "communication is slow because of the network"
