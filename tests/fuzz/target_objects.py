"""Objects of the API server: a user who may create pods writes their labels and annotations, a user who may ask for
captures the Captures. The API server vouches for the shape of metadata and for nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.operator.kube.objects import read_capture_object, read_policy_object
from rankscope.operator.kube.resources import TrainingRunStatus
from rankscope.operator.policies.policy import match, mfu_target_of, thresholds
from rankscope.operator.runs.daemon_streams import DaemonPods, read_daemon_pod
from rankscope.operator.runs.inventory import NAME_CHARACTERS, Inventory, run_of
from rankscope.operator.runs.pods import MAX_LABELS, TEXT_CHARACTERS, read_annotations, read_pod
from rankscope.operator.runs.status import run_status
from tests.fuzz.checking import check_number
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("objects")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_WORDS = (
    *(
        "rankscope.dev/run",
        "rankscope.dev/mfu-target",
        "rankscope.dev/watch",
        "training.kubeflow.org/job-name",
        "job-name",
    ),
    *(
        "jobset.sigs.k8s.io/jobset-name",
        "jobset.sigs.k8s.io/jobset-uid",
        "volcano.sh/job-name",
        "ray.io/cluster",
        "false",
    ),
    *(
        "batch.kubernetes.io/job-name",
        "trainer.kubeflow.org/trainjob-ancestor-step",
        "dataset-initializer",
        "0.4",
        "-1",
    ),
    *(
        "metadata",
        "labels",
        "annotations",
        "ownerReferences",
        "controller",
        "spec",
        "status",
        "containers",
        "ports",
        "name",
    ),
    *(
        "steps",
        "seconds",
        "ranks",
        "0,3-5",
        "all",
        "straggler",
        "options",
        "matchLabels",
        "priority",
        "thresholds",
        "ratio",
    ),
    *(
        "conditions",
        "phase",
        "captureId",
        "generation",
        "finalizers",
        "deletionTimestamp",
        "creationTimestamp",
        "TRAIN-É",
    ),
)
_VOUCHED = {
    "uid": "0a1b2c3d-1111-2222-3333-444455556666",
    "name": "x",
    "namespace": "team",
    "creationTimestamp": "2026-01-31T12:00:00Z",
}


def run(data: bytes) -> None:
    try:
        document = msgspec.json.decode(data)  # as the API's client does
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    _check_pod(document)
    _check_ours(_vouched(document))


def _vouched(document: dict[str, Any]) -> dict[str, Any]:
    """As the API server would hand it out: names are names, and annotations are texts."""
    metadata = document.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    annotations = metadata.get("annotations")
    texts = {k: v for k, v in annotations.items() if isinstance(v, str)} if isinstance(annotations, dict) else {}
    finalizers = metadata.get("finalizers")
    generation = metadata.get("generation")
    return {
        **document,
        "metadata": {
            **metadata,
            **_VOUCHED,
            "annotations": texts,
            "finalizers": [f for f in finalizers if isinstance(f, str)] if isinstance(finalizers, list) else None,
            "generation": generation if isinstance(generation, int) and abs(generation) < 2**63 else None,
        },
    }


def _check_pod(document: dict[str, Any]) -> None:
    pod = read_pod(document)
    if pod is None:
        return
    assert len(pod.labels) <= MAX_LABELS and len(pod.annotations) <= MAX_LABELS
    assert all(len(text) <= TEXT_CHARACTERS for text in (pod.name, pod.namespace, pod.uid, pod.node, pod.address))
    wishes = read_annotations(pod.annotations)
    check_number(wishes.mfu_target)
    assert all(len(mistake) < 300 for mistake in wishes.mistakes)
    key = run_of(pod)
    if key is not None:
        # It becomes an object's name, or the object can never be written.
        assert _NAME.fullmatch(key.object_name) and len(key.object_name) <= NAME_CHARACTERS, key.object_name
    inventory = Inventory()
    inventory.changed(pod.uid, pod)
    inventory.ranks_seen_in([pod.uid])
    for found in inventory.runs().values():
        check_number(mfu_target_of(found))
        status = run_status(found, None, TrainingRunStatus(), 1, 1.79e9)
        msgspec.convert(msgspec.to_builtins(status), TrainingRunStatus)
    inventory.deleted(pod.uid)
    assert not inventory.runs()


def _check_ours(document: dict[str, Any]) -> None:
    capture = read_capture_object(document)
    if capture is not None:
        assert (capture.spec is None) == bool(capture.mistake) and len(capture.requested_by) <= 256
        if capture.spec is not None:
            json.dumps(msgspec.to_builtins(capture.spec))
    policy = read_policy_object(document)
    if policy is None:
        return
    assert (policy.spec is None) == bool(policy.mistake)
    found = thresholds(DEFAULT_POLICY, policy, None)
    for value in (found.rank_ratio, found.rank_score, found.impact_ratio):
        check_number(value)
    pod = read_pod({"metadata": {**_VOUCHED, "labels": {"rankscope.dev/run": "x"}}})
    assert pod is not None
    inventory = Inventory()
    inventory.changed(pod.uid, pod)
    for run_found in inventory.runs().values():
        match([policy], run_found)
    daemon = read_daemon_pod({**document, "spec": {"containers": []}})
    if daemon is not None:
        pods = DaemonPods()
        pods.changed(daemon.uid, daemon)
        assert pods.addresses


def mutator(plain: Mutator) -> JsonMutator:
    return JsonMutator(plain, _WORDS)
