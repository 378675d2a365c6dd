from __future__ import annotations

from typing import Any

import pytest

from rankscope.operator.runs.inventory import NAME_CHARACTERS, RunKey, run_of
from rankscope.operator.runs.pods import MAX_LABELS, Pod, read_pod


def pod(labels: dict[str, str], owner: tuple[str, str, str] | None = None, **metadata: Any) -> Pod:
    document: dict[str, Any] = {
        "metadata": {"uid": "u-1", "name": "pod-0", "namespace": "team", "labels": labels, **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running"},
    }
    if owner is not None:
        api_version, kind, name = owner
        reference = {"apiVersion": api_version, "kind": kind, "name": name, "uid": "o-1", "controller": True}
        document["metadata"]["ownerReferences"] = [reference]
    read = read_pod(document)
    assert read is not None
    return read


KUBEFLOW = {"training.kubeflow.org/job-name": "llama"}
JOB_SET = {"jobset.sigs.k8s.io/jobset-name": "llama"}
TRAIN_JOB = {
    "jobset.sigs.k8s.io/jobset-uid": "s-1",
    "jobset.sigs.k8s.io/replicatedjob-name": "node",
    "batch.kubernetes.io/job-name": "llama-node-0",
    "trainer.kubeflow.org/trainjob-ancestor-step": "trainer",
}
WORKERS = {"batch.kubernetes.io/job-name": "llama-workers-0"}
WORKER = {"training.kubeflow.org/replica-type": "worker"}


@pytest.mark.parametrize(
    ("labels", "owner", "run"),
    [
        (KUBEFLOW | WORKER, "kubeflow.org/v1 PyTorchJob llama", "PyTorchJob llama o-1"),
        (KUBEFLOW | {"job-name": "llama-worker-0"}, "kubeflow.org/v1 MPIJob llama", "MPIJob llama o-1"),
        (JOB_SET | TRAIN_JOB, "batch/v1 Job llama-node-0", "TrainJob llama s-1"),
        (JOB_SET | WORKERS, "batch/v1 Job llama-workers-0", "JobSet llama "),
        ({"volcano.sh/job-name": "llama"}, "batch.volcano.sh/v1alpha1 Job llama", "VolcanoJob llama o-1"),
        ({"ray.io/cluster": "llama"}, "ray.io/v1 RayCluster llama", "RayCluster llama o-1"),
        ({"batch.kubernetes.io/job-name": "llama"}, "batch/v1 Job llama", "Job llama o-1"),
        ({"job-name": "llama"}, "batch/v1 Job llama", "Job llama o-1"),
        ({"rankscope.dev/run": "mine", "job-name": "llama"}, "batch/v1 Job llama", "Run mine "),
        ({"app": "x"}, "apps/v1 StatefulSet trainer", "StatefulSet trainer o-1"),
    ],
)
def test_a_pod_belongs_to_what_a_person_calls_the_job(labels: dict[str, str], owner: str, run: str) -> None:
    version, kind, name = owner.split()
    key = run_of(pod(labels, (version, kind, name)))
    assert key is not None
    assert (key.namespace, f"{key.kind} {key.name} {key.uid}") == ("team", run)


def test_a_data_set_initializer_pod_is_no_rank() -> None:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "llama",
        "jobset.sigs.k8s.io/replicatedjob-name": "dataset-initializer",
        "trainer.kubeflow.org/trainjob-ancestor-step": "dataset-initializer",
    }
    assert run_of(pod(labels, ("batch/v1", "Job", "llama-dataset-initializer-0"))) is None


def test_a_pod_of_nobody_belongs_to_no_run() -> None:
    assert run_of(pod({"app": "shell"})) is None


def test_two_workloads_never_share_an_object_name() -> None:
    long = "x" * 200
    keys = [
        RunKey("n", "Job", "a"),
        RunKey("n", "JobSet", "a"),
        RunKey("n", "Job", "a.b"),
        RunKey("n", "Job", "a-b"),
        RunKey("n", "Job", long + "1"),
        RunKey("n", "Job", long + "2"),
    ]
    names = [key.object_name for key in keys]
    assert len(set(names)) == len(names)
    assert all(len(name) <= NAME_CHARACTERS and name == name.lower() for name in names)
    assert names[0] == "job-a"


def test_a_pod_with_thousands_of_labels_keeps_its_run() -> None:
    labels = {f"noise{i}": "x" for i in range(5000)}
    read = pod({**labels, "training.kubeflow.org/job-name": "llama"})
    assert len(read.labels) == MAX_LABELS
    assert run_of(read) == RunKey("team", "PyTorchJob", "llama", "kubeflow.org/v1")


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"metadata": None},
        {"metadata": {"uid": 5, "name": "a", "namespace": "b"}},
        {"metadata": {"uid": "u", "name": "a", "namespace": "b" * 5000}},
    ],
)
def test_what_is_no_pod_is_left_alone(document: dict[str, Any]) -> None:
    assert read_pod(document) is None


def test_odd_fields_of_a_pod_count_as_missing() -> None:
    document = {
        "metadata": {
            "uid": "u",
            "name": "a",
            "namespace": "b",
            "labels": {"x": 1, "job-name": "j"},
            "ownerReferences": [None, {"kind": "Job"}],
        },
        "spec": None,
        "status": {"conditions": [None, "x"]},
    }
    read = read_pod(document)
    assert read is not None
    assert (read.labels, read.owner) == ({"job-name": "j"}, None)


@pytest.mark.parametrize(
    ("containers", "image"),
    [
        ([{"image": "proxy"}, {"image": "train", "resources": {"limits": {"nvidia.com/gpu": 8}}}], "train"),
        ([{"image": "train"}, {"image": "proxy"}], "train"),
        ([{"image": 5, "resources": {"limits": "many"}}], ""),
        ([{"image": "x" * 5000}], ""),
        ([None], ""),
        ("none", ""),
        ([], ""),
    ],
)
def test_the_image_is_that_of_the_container_with_gpus(containers: object, image: str) -> None:
    document = {"metadata": {"uid": "u", "name": "a", "namespace": "b"}, "spec": {"containers": containers}}
    read = read_pod(document)
    assert read is not None and read.image == image
