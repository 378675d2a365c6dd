"""The daemon on a tree like /sys with planted errors, and a process that looks like a rank."""

from __future__ import annotations

from pathlib import Path

import grpc

from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import SOURCE_NETWORK, RankWindow
from tools.network_tree import add_ethernet, add_infiniband, write

from .daemon_process import PATIENCE_SECONDS, Serving, serving
from .test_gpu_daemon import RUN_ID, ranks


def network_windows(daemon: Serving) -> dict[int, RankWindow]:
    """The windows of one tick, by rank."""
    with grpc.insecure_channel(daemon.grpc_target) as channel:
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
        for message in stream:
            found = {one.identity.rank: one for one in message.windows if RUN_ID in one.identity.job}
            if found:
                return found
    return {}


def test_planted_errors_reach_metrics_and_the_window(tmp_path: Path) -> None:
    sys_root = tmp_path / "sys"
    port, interface = add_infiniband(sys_root, "mlx5_1"), add_ethernet(sys_root)
    add_ethernet(sys_root, "veth0", is_virtual=True)
    flags = ("--sys-root", str(sys_root), "--network-interval-seconds", "1", "--node", "node-a")
    quiet = ("--window-seconds", "0.5", "--stack-rate-hertz", "0", "--captures", "false", "--gpu", "false")
    with ranks(tmp_path), serving(tmp_path, "daemon", *flags, *quiet) as daemon:
        errors = {"device": "mlx5_1", "port": "1", "node": "node-a", "kind": "symbol"}
        daemon.wait_until(lambda: daemon.values("rankscope_network_errors_total", **errors) == [0.0])
        write(interface, operstate="down")
        write(port, counters__symbol_error=412)
        daemon.wait_until(lambda: daemon.values("rankscope_network_errors_total", **errors) == [412.0])
        assert daemon.values("rankscope_network_link_up", device="eth0") == [0.0]
        assert daemon.values("rankscope_network_link_up", device="veth0") == []
        assert daemon.values("rankscope_network_bytes_total", device="mlx5_1", direction="transmit") == [4000.0]
        # TCP is that of the real namespace, and read once the rank is known.
        daemon.wait_until(lambda: network_windows(daemon)[0].network.HasField("tcp_segments"))
        windows = network_windows(daemon)
    assert windows[0].sources["network"] == SOURCE_NETWORK and not windows[1].HasField("network")
    events = {port.device: dict(port.events) for port in windows[0].network.ports}
    assert events == {"mlx5_1": {"symbol": 412}, "eth0": {}}
