"""Networks of nodes on their way from a daemon's message to a verdict. Any daemon may be hostile."""

from __future__ import annotations

import pytest

from rankscope.analysis.verdicts.network import MAX_PORTS
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.operator.correlation import node_networks
from rankscope.operator.correlation.job_service import job_status, verdict_of
from rankscope.operator.correlation.node_networks import MAX_NAMES, NAME_CHARACTERS, network_of
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from rankscope.v1.window_pb2 import NcclLog, NetworkPort, NodeNetwork, RankWindow, StepStatistics
from tests.daemon_messages import job_window
from tests.unit.operator.correlation.test_correlator import SECOND, Fleet

ERRORS = NetworkPort(
    device="mlx5_1", port=1, link="infiniband", is_up=True, events={"symbol": 412}, usual_events={"symbol": 0.0}
)
HEALTHY = NetworkPort(device="mlx5_1", port=1, link="infiniband", is_up=True)


def tick(number: int, transfer: float, port: NetworkPort) -> WatchRanksResponse:
    """Two nodes of two ranks; `port` is of the second node, and in the window of its first rank."""
    windows = []
    for rank in range(4):
        ports = {0: HEALTHY, 2: port}.get(rank)
        window = RankWindow(
            identity=RankIdentity(
                job="j", rank=rank, world_size=4, node="node-a" if rank < 2 else "node-b", pid=10 + rank, incarnation=1
            ),
            start_unix_nanos=(1000 + 2 * number) * SECOND,
            end_unix_nanos=(1002 + 2 * number) * SECOND,
            steps=20,
            step_seconds=StepStatistics(mean=0.05 + transfer, p50=0.05 + transfer),
            self_seconds=StepStatistics(mean=0.05),
            wait_seconds=StepStatistics(mean=transfer, p10=transfer),
        )
        if ports is not None:
            window.network.CopyFrom(NodeNetwork(ports=[ports], seconds=60.0))
        windows.append(window)
    return WatchRanksResponse(node="a", windows=windows)


def test_errors_of_a_node_become_the_cause_of_the_verdict() -> None:
    fleet = Fleet()
    fleet.play(*(tick(number, 0.005, HEALTHY) for number in range(8)))
    state = fleet.play(*(tick(number, 0.060, ERRORS) for number in range(8, 13)))
    cause = verdict_of(job_status(state).verdict).cause
    assert (state.verdict.kind, cause.phase) == (Kind.SLOW_COMMUNICATION, "network")
    assert cause.evidence == "node-b: mlx5_1 port 1: 412 symbol errors a minute, usually none"


def test_the_first_rank_of_each_place_is_asked() -> None:
    networks = job_window(tick(0, 0.005, ERRORS).windows, 4).network()
    assert [dict(networks[place].ports[0].events) for place in sorted(networks)] == [{}, {"symbol": 412}]


def test_large_jobs_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_networks, "MAX_NODES", 1)
    seen = [job_window(tick(number, 0.005, ERRORS).windows, 4).network() for number in range(2)]
    assert [len(networks) for networks in seen] == [1, 1] and {*seen[0], *seen[1]} == {0, 1}


def test_a_window_that_cannot_be_read_has_no_network() -> None:
    window = job_window([*tick(0, 0.005, ERRORS).windows][:1], 4)
    assert len(window.network()) == 1
    unsent = job_window([*tick(0, 0.005, ERRORS).windows][1:2], 4)
    assert unsent.network() == {}


def test_what_cannot_be_measured_is_left_out() -> None:
    nan, huge = float("nan"), 2**63
    told = NodeNetwork(
        ports=[
            NetworkPort(
                device="m\x1b[31m" * 100,
                link="\n",
                rate_bits_per_second=nan,
                transmitted_bytes=huge,
                events={"symbol": huge, "receive": 5, "invented": 9},
                usual_events={"symbol": nan, "receive": -1.0},
            )
        ],
        seconds=float("inf"),
        tcp_segments=huge,
        tcp_usual_retransmit_ratio=nan,
    )
    network = network_of(told)
    (port,) = network.ports
    assert port.device.isprintable() and len(port.device) <= NAME_CHARACTERS and port.link.isprintable()
    assert (port.rate_bits_per_second, port.transmitted_bytes, dict(port.usual_events)) == (None, None, {})
    assert dict(port.events) == {"receive": 5}
    assert (network.seconds, network.tcp_segments, network.tcp_usual_retransmit_ratio) == (0.0, None, None)


def test_ports_and_names_are_bounded() -> None:
    told = NodeNetwork(ports=[HEALTHY] * 1000, nccl=NcclLog(devices=["mlx5_0"] * 1000, no_infiniband="x" * 9999))
    network = network_of(told)
    assert len(network.ports) == MAX_PORTS and network.nccl is not None
    assert len(network.nccl.devices) == MAX_NAMES and len(network.nccl.no_infiniband) <= 120
