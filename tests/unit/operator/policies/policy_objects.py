"""Policies, runs and captures as the API server has them."""

from __future__ import annotations

from typing import Any

from rankscope.operator.kube.objects import (
    CaptureObject,
    PolicyObject,
    RunObject,
    read_capture_object,
    read_policy_object,
    read_run_object,
    timestamp,
)
from rankscope.operator.runs.inventory import Run, RunKey
from rankscope.operator.runs.pods import Pod

NOW = 1_800_000_000.0
AUTOMATIC = {"on": ["slow_rank", "slow_communication"], "cooldownSeconds": 600, "perDay": 3, "concurrent": 2}


def policy(name: str = "p", namespace: str = "team", created: float = NOW - 9000, **spec: Any) -> PolicyObject:
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{namespace}-{name}", "generation": 4}
    made = read_policy_object({"metadata": {**metadata, "creationTimestamp": timestamp(created)}, "spec": spec})
    assert made is not None
    return made


def pod(name: str = "w-0", annotations: dict[str, str] | None = None, phase: str = "Running", **labels: str) -> Pod:
    return Pod(f"uid-{name}", name, "team", "node", phase=phase, labels=labels, annotations=annotations or {})


def run(*pods: Pod, name: str = "llama") -> Run:
    return Run(RunKey("team", "Run", name), {pod.uid: pod for pod in pods or (pod(),)})


def run_object(name: str = "run-llama", uid: str = "uid-run") -> RunObject:
    metadata = {"name": name, "namespace": "team", "uid": uid}
    made = read_run_object({"metadata": metadata, "spec": {"workload": {"kind": "Run", "name": "llama"}}})
    assert made is not None
    return made


def capture(
    name: str,
    age_seconds: float,
    run: str = "run-llama",
    phase: str = "Succeeded",
    ranks: str = "0,1",
    **annotations: str,
) -> CaptureObject:
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "creationTimestamp": timestamp(NOW - age_seconds),
        "annotations": {f"rankscope.dev/{key}": value for key, value in annotations.items()},
    }
    spec = {"run": run, "ranks": ranks, "steps": 3}
    made = read_capture_object({"metadata": metadata, "spec": spec, "status": {"phase": phase}})
    assert made is not None
    return made
