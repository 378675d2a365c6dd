from __future__ import annotations

import time
from pathlib import Path

from rankscope.operator.kube.api import Api
from rankscope.operator.kube.electing import ACT_SECONDS, DURATION_SECONDS, ShardLeases
from tests.kube.api_server import ApiServer


def leases(server: ApiServer, namespace: str, folder: Path, identity: str, shards: int) -> ShardLeases:
    api = Api(server.admin.kubeconfig(folder / identity))
    return ShardLeases(api, namespace, identity, shards)


def test_one_of_two_replicas_leads_and_the_other_takes_over_when_it_dies(
    server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    first = leases(server, namespace, tmp_path, "first", 1)
    second = leases(server, namespace, tmp_path, "second", 1)
    first.start()
    server.wait_for(lambda: first.held == {0})
    second.start()
    first._stopping.set()  # killed: it gives nothing back
    died_at = time.monotonic()
    overlap = []
    while not second.held:
        time.sleep(0.05)
        assert time.monotonic() - died_at < 120
    overlap.append(first.held)
    assert overlap == [frozenset()]  # whoever is taken over from has stopped acting before
    second.stop()
    assert DURATION_SECONDS + 2.5 < 15 and ACT_SECONDS < DURATION_SECONDS


def test_shards_spread_over_replicas_and_go_back_when_one_leaves(
    server: ApiServer, namespace: str, tmp_path: Path
) -> None:
    first = leases(server, namespace, tmp_path, "first", 4)
    second = leases(server, namespace, tmp_path, "second", 4)
    first.start()
    server.wait_for(lambda: len(first.held) == 4)
    second.start()
    server.wait_for(lambda: len(first.held) == len(second.held) == 2)
    assert first.held | second.held == {0, 1, 2, 3}
    assert not first.held & second.held
    second.stop()
    server.wait_for(lambda: len(first.held) == 4)
    keys = [f"team/run-{number}" for number in range(400)]
    assert {first.shard_of(key) for key in keys} == {0, 1, 2, 3}
    first.stop()
