"""Pods as the makers of training jobs create them, and the runs that the operator sees in them. Their ranks are told by
scripted daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.kube.api_server import ApiServer
from tests.kube.conftest import StartDaemon, StartOperator
from tests.kube.scripted_daemon import Spoken
from tests.support.waiting import wait_until

MANIFESTS = Path(__file__).parents[1] / "data" / "kube"
RANKS_PER_POD = 2
# File to the TrainingRun's name, what it is a run of, and which pods train.
RUNS = {
    "pytorchjob": ("pytorchjob-gpt2", ("kubeflow.org/v1", "PyTorchJob", "gpt2"), 3),
    "jobset": ("jobset-vit", ("jobset.x-k8s.io/v1alpha2", "JobSet", "vit"), 2),
    "trainjob": ("trainjob-llama", ("trainer.kubeflow.org/v1alpha1", "TrainJob", "llama"), 2),
    "job": ("job-resnet", ("batch/v1", "Job", "resnet"), 2),
    "volcano": ("volcanojob-bert", ("batch.volcano.sh/v1alpha1", "VolcanoJob", "bert"), 2),
    "raycluster": ("raycluster-tune", ("ray.io/v1", "RayCluster", "tune"), 2),
    "labelled": ("run-mixture", (None, "Run", "mixture"), 2),
    "statefulset": ("statefulset-diffusion", ("apps/v1", "StatefulSet", "diffusion"), 2),
}


def make(server: ApiServer, namespace: str, pod: dict[str, Any], node: str) -> str:
    path = f"/api/v1/namespaces/{namespace}/pods"
    pod["spec"]["nodeName"] = node
    made = server.admin.create(path, pod)
    server.admin.merge(f"{path}/{pod['metadata']['name']}/status", {"status": {"phase": "Running"}})
    return str(made["metadata"]["uid"])


def trains(pod: dict[str, Any]) -> bool:
    labels = pod["metadata"]["labels"]
    is_initializer = "initializer" in labels.get("jobset.sigs.k8s.io/replicatedjob-name", "")
    return not is_initializer and labels.get("ray.io/node-type") != "head"


def test_runs_of_every_kind_are_recognised_with_their_ranks(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    daemon = start_daemon("node-of-all")
    for port, name in enumerate([*RUNS, "bystanders"]):
        pods = list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))
        uids = [make(server, namespace, pod, daemon.node) for pod in pods if trains(pod)]
        for pod in pods:
            if not trains(pod):
                make(server, namespace, pod, daemon.node)
        if name in RUNS:
            world_size = RANKS_PER_POD * len(uids)
            job = f"10.0.0.1:{29500 + port}"
            ranks = [Spoken(uids[rank // RANKS_PER_POD], rank, world_size, job) for rank in range(world_size)]
            daemon.ranks = [*daemon.ranks, *ranks]
    start_operator()

    def runs() -> dict[str, dict[str, Any]]:
        found = server.admin.get(f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/trainingruns")["items"]
        return {run["metadata"]["name"]: run for run in found}

    def seen() -> dict[str, str]:
        return {name: run.get("status", {}).get("ranks", {}).get("summary", "") for name, run in runs().items()}

    expected = {name: f"{RANKS_PER_POD * pods}/{RANKS_PER_POD * pods}" for name, _, pods in RUNS.values()}
    wait_until(lambda: seen() == expected, seen)
    for name, (api_version, kind, workload_name), _ in RUNS.values():
        workload = runs()[name]["spec"]["workload"]
        assert (workload.get("apiVersion"), workload["kind"], workload["name"]) == (api_version, kind, workload_name)
        # What is named as owner is what has that uid: the cluster deletes at once what names another.
        owners = runs()[name]["metadata"].get("ownerReferences", [])
        owner_kind = {"VolcanoJob": "Job", "TrainJob": "JobSet"}.get(kind, kind)
        assert [owner["kind"] for owner in owners] == ([owner_kind] if api_version else [])
