"""A real job over two nodes with real daemons, and the operator that joins them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube.api_server import ApiServer, User
from tests.kube.conftest import QUICK
from tests.kube.fleet import OPERATOR_NAMESPACE, Node, TrainingJob, make_namespace
from tests.kube.operator_process import OperatorProcess
from tests.support.waiting import wait_until


@pytest.fixture
def nodes(server: ApiServer, tmp_path: Path) -> Iterator[list[Node]]:
    make_namespace(server, OPERATOR_NAMESPACE)
    made = [Node(name, tmp_path / name, server) for name in ("node-a", "node-b")]
    try:
        for node in made:
            node.start()
        yield made
    finally:
        for node in made:
            node.stop()
            server.admin.delete(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{node.pod_name}?gracePeriodSeconds=0")


def run_of(server: ApiServer, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.admin.get(f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/trainingruns/{name}")
    return found


def shown(server: ApiServer, path: str) -> list[dict[str, Any]]:
    """What `kubectl get` prints: the API server makes the table."""
    accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
    table = server.admin.request("GET", path, accept=accept)
    names = [column["name"] for column in table["columnDefinitions"]]
    return [dict(zip(names, row["cells"], strict=True)) for row in table["rows"]]


def test_status_and_events_name_the_slow_ranks_pod_and_node(
    server: ApiServer, namespace: str, operator_user: User, nodes: list[Node], tmp_path: Path
) -> None:
    job = TrainingJob(server, namespace, "llama", nodes, tmp_path / "job", slow_rank=2)
    operator = OperatorProcess(operator_user, tmp_path, flags=QUICK)
    operator.start()
    path = f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/trainingruns"
    try:
        job.start()
        wait_until(lambda: server.admin.is_served(f"{path}/pytorchjob-llama"))

        status: dict[str, Any] = {}

        def is_alarm() -> bool:
            """With all ranks: a node that is late for a moment is missing in that status."""
            status.clear()
            status.update(run_of(server, namespace, "pytorchjob-llama").get("status", {}))
            is_whole = status.get("ranks", {}).get("summary") == "4/4"
            return is_whole and status.get("verdict", {}).get("severity") == "alarm"

        try:
            wait_until(is_alarm)
        except AssertionError:
            raise AssertionError(
                f"{run_of(server, namespace, 'pytorchjob-llama')}\n{operator.log}\n{operator.get('/metrics')}\n"
                + "\n".join(node.log for node in nodes)
            ) from None
        found = status["verdict"]
        assert found["kind"] == "slow_rank"
        assert [(c["rank"], c["pod"], c["node"]) for c in found["culprits"]] == [(2, "llama-worker-1", "node-b")]
        assert {c["type"]: c["status"] for c in status["conditions"]} == {"RanksSeen": "True", "Healthy": "False"}

        def accused() -> set[tuple[str, str, str]]:
            events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
            return {(e["involvedObject"]["kind"], e["involvedObject"]["name"], e["reason"]) for e in events}

        wanted = {("TrainingRun", "pytorchjob-llama", "SlowRank"), ("Pod", "llama-worker-1", "SlowRank")}
        wait_until(lambda: wanted <= accused())
        assert accused() == wanted

        row: dict[str, Any] = {}

        def is_shown() -> bool:
            (found,) = shown(server, path)
            row.update(found)
            return (row["Ranks"], row["Verdict"]) == ("4/4", "slow_rank")

        wait_until(is_shown)
        assert list(row) == ["Name", "Job", "Ranks", "Step", "MFU", "Exposed", "Verdict", "Age"]
        assert row["Job"] == "llama"
        assert row["Step"].endswith("ms") and row["Exposed"].endswith("%")

        captures = f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/captures"
        spec = {"run": "pytorchjob-llama", "ranks": "straggler+peer", "steps": 3, "deleteArtifacts": True}
        body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": "c"}, "spec": spec}
        server.admin.create(captures, body)

        def captured() -> dict[str, Any]:
            capture: dict[str, Any] = server.admin.get(f"{captures}/c").get("status", {})
            return capture if capture.get("phase") in ("Succeeded", "Failed", "Cancelled") else {}

        result = wait_until(captured, seconds=240.0)
        assert result["phase"] == "Succeeded", f"{result.get('message')} {result}"
        delivered = {rank["rank"]: rank for rank in result["ranks"]}
        assert 2 in delivered
        assert len(delivered) == 2
        assert {rank["steps"] for rank in delivered.values()} == {3}
        assert delivered[2]["node"] == "node-b"
        assert "rank 2" in result["findings"][0], result["findings"]
        folder = nodes[1].folder / "captures"
        assert list(folder.rglob("*.json.gz"))
        server.admin.delete(f"{captures}/c")
        wait_until(lambda: not server.admin.is_served(f"{captures}/c"))
        assert not list(folder.rglob("*.json.gz"))

        nodes[1].stop_daemon()
        wait_until(lambda: shown(server, path)[0]["Ranks"] == "2/4")
        nodes[1].start_daemon()
        wait_until(lambda: shown(server, path)[0]["Ranks"] == "4/4")
        # What windows without half of the ranks showed may stand for a moment.
        wait_until(lambda: is_alarm() and [culprit["rank"] for culprit in status["verdict"]["culprits"]] == [2])
    finally:
        operator.stop()
        job.stop()
