"""Leases as a real API server keeps them. Who may hold what, and when, is tried in the unit tests of the same name."""

from __future__ import annotations

from pathlib import Path

from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.leader_election import ShardLeases
from tests.kube.api_server import ApiServer
from tests.support.waiting import wait_until


def leases(server: ApiServer, namespace: str, folder: Path, identity: str, shards: int) -> ShardLeases:
    api = Api(server.admin.kubeconfig(folder / identity))
    return ShardLeases(api, namespace, identity, shards)


def test_shards_spread_over_replicas_and_go_back_when_one_leaves(
    server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    first = leases(server, namespace, tmp_path, "first", 4)
    second = leases(server, namespace, tmp_path, "second", 4)
    first.start()
    wait_until(lambda: len(first.held) == 4)
    second.start()
    wait_until(lambda: len(first.held) == len(second.held) == 2)
    assert first.held | second.held == {0, 1, 2, 3}
    assert not first.held & second.held
    second.stop()
    wait_until(lambda: len(first.held) == 4)
    keys = [f"team/run-{number}" for number in range(400)]
    assert {first.shard_of(key) for key in keys} == {0, 1, 2, 3}
    first.stop()
