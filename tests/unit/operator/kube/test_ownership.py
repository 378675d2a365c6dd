from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.operator.kube.api_client import owners
from rankscope.operator.kube.leader_election import ShardLeases
from tests.unit.operator.kube.test_leader_election import Leases

ACCOUNT = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "rankscope-operator", "uid": "u-1"}


def token(path: Path, claims: Any) -> Path:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    path.write_text(f"e30.{payload}.c2lnbmF0dXJl")
    return path


def test_a_pods_own_token_tells_whose_its_things_are(tmp_path: Path) -> None:
    account = {"name": "rankscope-operator", "uid": "u-1"}
    claims = {"iss": "x", "kubernetes.io": {"namespace": "rankscope", "serviceaccount": account}}
    assert owners(token(tmp_path / "token", claims)) == [ACCOUNT]


@pytest.mark.parametrize("claims", [{}, [], {"kubernetes.io": {"serviceaccount": {"name": "a", "uid": 7}}}])
def test_without_a_token_that_says_so_they_are_nobodys(tmp_path: Path, claims: Any) -> None:
    assert owners(token(tmp_path / "token", claims)) == []
    assert owners(tmp_path / "missing") == []
    (tmp_path / "opaque").write_text("no token at all")
    assert owners(tmp_path / "opaque") == []


def test_leases_go_with_their_owner() -> None:
    server = Leases()

    class Connection:
        def pages(self, path: str, **query: Any) -> list[dict[str, Any]]:
            return [{"items": list(server.stored.values())}]

        def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return server.write(body["metadata"]["name"], body, is_new=True)

        def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return server.write(body["metadata"]["name"], body, is_new=False)

    api: Any = Connection()
    leases = ShardLeases(api, "n", "a", owners=[ACCOUNT])
    leases.round()
    leases.round()
    assert leases.held == {0}
    assert all(lease["metadata"]["ownerReferences"] == [ACCOUNT] for lease in server.stored.values())
    assert len(server.stored) == 2
