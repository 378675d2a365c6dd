from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from rankscope.operator.access.token_review import MetricsGuard, Reviews
from rankscope.operator.kube.api_client import Api, UnreachableError


class Cluster:
    """One token, one who may."""

    def __init__(self) -> None:
        self.is_away = False
        self.asked: list[dict[str, Any]] = []

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.is_away:
            raise UnreachableError("away")
        self.asked.append(body["spec"])
        if path.endswith("tokenreviews"):
            known = {"prometheus-token": "prometheus", "tenant-token": "tenant"}.get(body["spec"]["token"])
            if known is None:
                return {"status": {"authenticated": False}}
            user = {"username": known, "groups": ["system:authenticated"]}
            return {"status": {"authenticated": True, "user": user, "audiences": ["https://kubernetes.default.svc"]}}
        return {"status": {"allowed": body["spec"]["user"] == "prometheus"}}


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def guard(cluster: Cluster) -> MetricsGuard:
    return MetricsGuard(Reviews(cast(Api, cluster), audience=""))


def status(guard: MetricsGuard, authorization: str) -> int:
    refusal = guard.refusal(authorization, "192.0.2.1")
    return 200 if refusal is None else refusal.status


def test_a_token_that_may_get_the_path_reads_metrics(guard: MetricsGuard, cluster: Cluster) -> None:
    assert status(guard, "Bearer prometheus-token") == 200
    assert cluster.asked[1]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
    assert "audiences" not in cluster.asked[0]


def test_others_are_refused_and_logged_once_each(guard: MetricsGuard, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert status(guard, "Bearer tenant-token") == 403
            for wrong in ("", "Bearer", "Bearer ", "Bearer x y", "Basic prometheus-token", "Bearer stolen"):
                assert status(guard, wrong) == 401
    told = [record.getMessage() for record in caplog.records if record.name == MetricsGuard.__module__]
    assert len(told) == 2
    assert not any("token" in text.replace("tenant", "") for text in told)


def test_nobody_is_let_in_while_the_api_server_is_away(guard: MetricsGuard, cluster: Cluster) -> None:
    cluster.is_away = True
    assert status(guard, "Bearer prometheus-token") == 503
