"""A run has one name: the operator tells real daemons the names of the runs in their pods."""

from __future__ import annotations

import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.free_ports import free_port
from tests.kube.api_server import ApiServer
from tests.kube.conftest import QUICK, StartOperator
from tests.kube.fleet import OPERATOR_NAMESPACE, Node, TrainingPod, delete_pod, make_namespace, make_pod
from tests.support.waiting import wait_until

StartPod = Callable[..., TrainingPod]


@pytest.fixture
def metrics_port() -> int:
    return free_port()


@pytest.fixture
def node(server: ApiServer, namespace: str, tmp_path: Path, metrics_port: int) -> Iterator[Node]:
    make_namespace(server, OPERATOR_NAMESPACE)
    flags = ("--metrics-listen", f"127.0.0.1:{metrics_port}", "--captures", "false")
    made = Node(f"{namespace}-node", tmp_path / "node", server, flags)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        delete_pod(server, OPERATOR_NAMESPACE, made.pod_name)


@pytest.fixture
def start_pod(server: ApiServer, node: Node, tmp_path: Path) -> Iterator[StartPod]:
    """Pods with one process that looks like a rank: its program has the path of a torch library."""
    program = tmp_path / "libtorch_sleep"
    shutil.copy(str(shutil.which("sleep")), program)
    started: list[TrainingPod] = []

    def start(namespace: str, job: str, **variables: str) -> TrainingPod:
        name = f"{job}-worker-0"
        uid = make_pod(server, namespace, name, node.name, {"training.kubeflow.org/job-name": job})
        pod = TrainingPod(name, uid, node)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": f"{job}-master-0"}
        pod.run({**rank, "MASTER_PORT": "23456", **variables}, tmp_path / "log", str(program), "600")
        started.append(pod)
        return pod

    yield start
    for pod in started:
        if pod.cgroup.exists():
            pod.stop()


def ranks(node: Node) -> dict[str, tuple[str, int]]:
    """Pod to the name of its run and the attempt, as the daemon tells them."""
    with grpc.insecure_channel(f"127.0.0.1:{node.port}") as channel:
        try:
            answer = RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=10)
        except grpc.RpcError:
            return {}
    return {rank.identity.pod: (rank.identity.job, rank.identity.attempt) for rank in answer.ranks}


def test_daemons_use_the_operators_names_despite_claims_and_restarts(
    server: ApiServer,
    namespace: str,
    node: Node,
    metrics_port: int,
    start_pod: StartPod,
    start_operator: StartOperator,
) -> None:
    others = f"{namespace}-others"
    make_namespace(server, others)
    run, theirs = f"{namespace}/pytorchjob-llama", f"{others}/pytorchjob-thief"
    pod = start_pod(namespace, "llama")
    thief = start_pod(others, "thief", RANKSCOPE_RUN=run)
    before: dict[str, tuple[str, int]] = {}

    def are_seen() -> bool:
        before.clear()
        before.update(ranks(node))
        return before.keys() == {pod.uid, thief.uid}

    wait_until(are_seen)
    assert before[pod.uid] == ("llama-master-0:23456", 0)
    assert "/" not in before[thief.uid][0]

    operator = start_operator("operator-0", *QUICK)
    named = {pod.uid: (run, 0), thief.uid: (theirs, 0)}
    wait_until(lambda: ranks(node) == named, lambda: f"{ranks(node)} instead of {named}")

    def is_renamed() -> bool:
        page = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60).read().decode()
        return "pytorchjob-llama" in page and not any(name in page for name, _ in before.values())

    wait_until(is_renamed)

    node.stop_daemon()
    node.start_daemon()
    wait_until(lambda: ranks(node) == named, lambda: f"{ranks(node)} instead of {named}")

    # The operator replaces the pod: the same run, another attempt.
    pod.stop()
    delete_pod(server, namespace, pod.name)
    again = start_pod(namespace, "llama", MASTER_PORT="23457")
    named = {again.uid: (run, 1), thief.uid: (theirs, 0)}
    wait_until(lambda: ranks(node) == named, lambda: f"{ranks(node)} instead of {named}")

    operator.kill()
    node.stop_daemon()
    node.start_daemon()
    wait_until(lambda: ranks(node).keys() == named.keys())
    start_operator("operator-0", *QUICK)
    wait_until(lambda: ranks(node) == named, lambda: f"{ranks(node)} instead of {named}")
