"""ProfilingPolicies in force: captures by themselves, thresholds, and rates that reach a real daemon."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankscope.v1.policy_service_pb2 import ListPoliciesRequest
from rankscope.v1.policy_service_pb2_grpc import PolicyServiceStub
from tests.kube.api_server import ApiServer
from tests.kube.conftest import StartDaemon, StartOperator
from tests.kube.fleet import Node, make_pod
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_run import BASE, ScriptedRun
from tests.support.waiting import wait_until

AUTOMATIC = {"on": ["slow_rank", "hang"], "steps": 2}


def make_policy(server: ApiServer, namespace: str, name: str, **spec: Any) -> str:
    """Its path."""
    body = {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "ProfilingPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }
    path = f"{BASE}/{namespace}/profilingpolicies"
    server.admin.create(path, body)
    return f"{path}/{name}"


def conditions(server: ApiServer, path: str) -> dict[str, str]:
    status = server.admin.get(path).get("status", {})
    return {condition["type"]: condition["status"] for condition in status.get("conditions", ())}


def captures_of(server: ApiServer, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.admin.get(f"{BASE}/{namespace}/captures")["items"]
    return found


def started_run(server: ApiServer, namespace: str, start_daemon: StartDaemon, name: str) -> ScriptedRun:
    run = ScriptedRun(server, namespace, name, [start_daemon(f"{namespace}-{name}")], ranks_per_pod=4)
    run.start()
    return run


def test_a_finding_makes_one_capture_despite_restarts_and_several_policies(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    older = make_policy(server, namespace, "older", automaticCaptures=AUTOMATIC)
    newer = make_policy(server, namespace, "newer", automaticCaptures={"on": ["slow_rank"]})
    # The older one holds; of two that were created in the same second, the first by name.
    holding, losing = sorted(
        [older, newer], key=lambda path: (server.admin.get(path)["metadata"]["creationTimestamp"], path)
    )
    run = started_run(server, namespace, start_daemon, "llama")
    twin = started_run(server, namespace, start_daemon, "healthy")
    operator = start_operator()
    run.wait_for_verdict("healthy")
    run.slow(2)
    wait_until(lambda: captures_of(server, namespace))
    (capture,) = captures_of(server, namespace)
    metadata, spec = capture["metadata"], capture["spec"]
    owner = server.admin.get(run.path)["metadata"]
    assert [(o["kind"], o["name"], o["uid"]) for o in metadata["ownerReferences"]] == [
        ("TrainingRun", run.object_name, owner["uid"])
    ]
    assert metadata["annotations"]["rankscope.dev/policy"] == holding.rpartition("/")[2]
    assert spec["run"] == run.object_name
    ranks = [int(text) for text in spec["ranks"].split(",")]
    assert 2 in ranks and len(ranks) == 2
    path = f"{BASE}/{namespace}/captures/{metadata['name']}"
    assert run.finished_capture(path)["phase"] == "Succeeded"

    def is_told() -> bool:
        status = server.admin.get(holding).get("status", {})
        return bool(status.get("capturesToday") == 1 and status.get("runs") == 2)

    wait_until(is_told)
    assert conditions(server, holding) == {"Accepted": "True", "Conflict": "False", "CapturesLeft": "True"}
    wait_until(lambda: conditions(server, losing).get("Conflict") == "True")

    operator.kill()
    again = start_operator()
    refusal = f"no capture by policy {holding.rpartition('/')[2]}: the run was captured recently"
    wait_until(lambda: f"{run.object_name}: slow_rank 2: {refusal}" in again.log)
    # Nor of another rank, within the cooldown.
    run.slow(1)
    wait_until(lambda: f"{run.object_name}: slow_rank 1: {refusal}" in again.log)
    assert [c["metadata"]["uid"] for c in captures_of(server, namespace)] == [metadata["uid"]]
    assert len(run.daemons[0].captures) == 1
    assert twin.daemons[0].captures == {}
    events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    assert [e["involvedObject"]["name"] for e in events if e["reason"] == "CaptureStarted"] == [run.object_name]


def test_a_policys_thresholds_apply_to_selected_runs_while_it_exists(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    plain = started_run(server, namespace, start_daemon, "plain")
    lenient = started_run(server, namespace, start_daemon, "lenient")
    pod = f"/api/v1/namespaces/{namespace}/pods/{lenient.pod_name(0)}"
    server.admin.merge(pod, {"metadata": {"labels": {"team": "research"}}})
    selector = {"matchLabels": {"team": "research"}}
    policy = make_policy(server, namespace, "lenient", selector=selector, thresholds={"ratio": 5})
    start_operator()
    for run in (plain, lenient):
        run.slow(2)
    plain.wait_for_verdict("slow_rank", (2,))
    lenient.wait_for_verdict("healthy")
    wait_until(lambda: server.admin.get(policy).get("status", {}).get("runs") == 1)
    server.admin.delete(policy)
    lenient.wait_for_verdict("slow_rank", (2,))
    assert captures_of(server, namespace) == []


@pytest.fixture
def node(server: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Node]:
    made = Node(f"{namespace}-node", tmp_path / "node", server)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        server.admin.delete(f"/api/v1/namespaces/rankscope/pods/{made.pod_name}?gracePeriodSeconds=0")


def test_rates_reach_a_restarted_daemon_and_end_with_their_policy(
    server: ApiServer, namespace: str, node: Node, start_operator: StartOperator
) -> None:
    labels = {"training.kubeflow.org/job-name": "llama", "training.kubeflow.org/replica-type": "worker"}
    pod = make_pod(server, namespace, "llama-worker-0", node.name, labels)
    make_pod(server, namespace, "llama-worker-1", "elsewhere", labels)
    policy = make_policy(
        server,
        namespace,
        "gentle",
        sampling={"stackRateHertz": 2.5},
        dutyCycle={"steps": 3, "everySeconds": 900},
    )
    start_operator()

    def held() -> list[tuple[str, list[str], float, int, float]]:
        with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
            try:
                answer = PolicyServiceStub(channel).ListPolicies(ListPoliciesRequest(), timeout=10)
            except grpc.RpcError:
                return []
        policies = [entry.policy for entry in answer.policies]
        return [(p.run, list(p.pods), p.stack_rate_hertz, p.duty_cycle_steps, p.duty_cycle_seconds) for p in policies]

    wanted = [(f"{namespace}/pytorchjob-llama", [pod], 2.5, 3, 900.0)]
    wait_until(lambda: held() == wanted)
    node.stop_daemon()
    assert held() == []
    node.start_daemon()
    wait_until(lambda: held() == wanted)
    server.admin.delete(policy)
    wait_until(lambda: "withdrawn" in node.log)
    assert held() == []


def test_an_alert_makes_one_capture_despite_an_operator_restart(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator, tmp_path: Path
) -> None:
    run = started_run(server, namespace, start_daemon, "llama")
    run.slow(2)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    token.chmod(0o600)
    flags = ("--alerts-token", str(token), "--alerts-listen", "127.0.0.1:0")
    labels = {
        "alertname": "RankscopeStragglerRank",
        "capture": "true",
        "run_namespace": namespace,
        "run": run.object_name,
    }
    alert = {"status": "firing", "labels": labels, "startsAt": "2026-01-01T00:00:00Z", "fingerprint": "f1"}
    body = json.dumps({"version": "4", "alerts": [alert]}).encode()

    def notify(operator: OperatorProcess) -> tuple[str, str]:
        url = operator.log.rpartition(" alerts ")[2].split()[0]
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            (outcome,) = json.loads(answer.read())["outcomes"]
        return outcome["result"], outcome["text"]

    def seen_by(operator: OperatorProcess) -> None:
        metric = f'run="{run.object_name}",run_namespace="{namespace}",severity="alarm",verdict="slow_rank"'
        wait_until(lambda: metric in operator.get("/metrics"))

    first = start_operator("operator-0", *flags)
    seen_by(first)
    result, text = notify(first)
    assert result == "started", text
    (capture,) = captures_of(server, namespace)
    assert text == f"capture {capture['metadata']['name']}"
    assert "2" in capture["spec"]["ranks"].split(",")
    assert notify(first)[0] == "duplicate"
    assert run.finished_capture(f"{BASE}/{namespace}/captures/{capture['metadata']['name']}")["phase"] == "Succeeded"
    first.kill()
    second = start_operator("operator-0", *flags)
    seen_by(second)
    assert notify(second) == ("started", text)
    assert [c["metadata"]["uid"] for c in captures_of(server, namespace)] == [capture["metadata"]["uid"]]
    assert len(run.daemons[0].captures) == 1
