"""`python -m benchmarks.fleet_pods PODS`: what the operator's copy of a cluster's pods takes. Prints bytes as JSON."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from benchmarks.fleet_operator import resident_bytes
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod, read_pod


def document(number: int) -> dict[str, Any]:
    """As an API server sends it, of a PyTorchJob's pod: parsed each time, so that no two share a string."""
    job = number // 16
    made = {
        "metadata": {
            "uid": f"6f1c2a34-0000-4000-8000-{number:012d}",
            "name": f"llama-pretrain-{job}-worker-{number % 16}",
            "namespace": f"team-{job % 50}",
            "creationTimestamp": "2026-11-15T08:00:00Z",
            "labels": {
                "training.kubeflow.org/job-name": f"llama-pretrain-{job}",
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-index": str(number % 16),
                "training.kubeflow.org/replica-type": "worker",
                "kueue.x-k8s.io/queue-name": "research",
                "app.kubernetes.io/part-of": "pretraining",
                "cost-centre": "4711",
                "owner": "somebody",
            },
            "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "x" * 2000,
                "rankscope.dev/mfu-target": "0.4",
            },
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": f"llama-pretrain-{job}",
                    "uid": f"job-uid-{job}",
                    "controller": True,
                }
            ],
        },
        "spec": {"nodeName": f"gpu-node-{number // 8}.example.internal"},
        "status": {
            "phase": "Running",
            "podIP": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    parsed: dict[str, Any] = json.loads(json.dumps(made))
    return parsed


def main() -> None:
    inventory = Inventory()
    copy: dict[str, Pod] = {}  # what the watch keeps
    gc.collect()
    before = resident_bytes()
    for number in range(int(sys.argv[1])):
        pod = read_pod(document(number))
        assert pod is not None
        copy[pod.uid] = pod
        inventory.changed(pod.uid, pod)
    gc.collect()
    print(json.dumps({"pods": len(copy), "runs": len(inventory.runs()), "bytes": resident_bytes() - before}))


if __name__ == "__main__":
    main()
