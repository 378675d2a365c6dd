"""Seeds that need no job: objects as the API server hands them out, reviews as it sends them, notifications.

`python -m tests.fuzz.made_seeds` writes them; they are committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rankscope.v1 import capture_service_pb2 as pb
from tests.fuzz.targets import SEEDS

KUBE = Path(__file__).resolve().parent.parent / "data" / "kube"
UID = "0a1b2c3d-1111-2222-3333-444455556666"
CREATED = "2026-01-31T12:00:00Z"
CAPTURE = {
    "apiVersion": "rankscope.dev/v1alpha1",
    "kind": "Capture",
    "metadata": {
        "name": "slow",
        "namespace": "team",
        "uid": UID,
        "creationTimestamp": CREATED,
        "generation": 1,
        "annotations": {"rankscope.dev/requested-by": "ann"},
        "finalizers": ["rankscope.dev/capture"],
    },
    "spec": {"run": "pytorchjob-train", "ranks": "0,3-5", "steps": 3, "options": {"shapes": True}, "reason": "slow"},
    "status": {
        "phase": "Running",
        "captureId": "c1",
        "startUnixMs": 1790000000000,
        "ranks": [{"rank": 0, "node": "node-a", "state": "running"}],
        "conditions": [],
    },
}
POLICY = {
    "apiVersion": "rankscope.dev/v1alpha1",
    "kind": "ProfilingPolicy",
    "metadata": {"name": "p", "namespace": "team", "uid": UID, "creationTimestamp": CREATED, "generation": 2},
    "spec": {
        "selector": {"matchLabels": {"team": "vision"}},
        "priority": 5,
        "sampling": {"stackRateHertz": 5.0},
        "thresholds": {"ratio": 1.2, "score": 4.0, "impactRatio": 0.05, "mfuTarget": 0.4},
        "automaticCaptures": {"on": ["slow_rank"], "steps": 3, "cooldownSeconds": 600, "perDay": 5},
        "dutyCycle": {"steps": 2, "everySeconds": 600},
    },
    "status": {"observedGeneration": 2, "runs": 1},
}
ALERT = {
    "status": "firing",
    "labels": {
        "alertname": "RankscopeStragglerRank",
        "run_namespace": "team",
        "run": "train",
        "rank": "1",
        "capture": "true",
    },
    "annotations": {"summary": "rank 1 is slow"},
    "startsAt": "2026-01-01T00:00:00Z",
    "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "http://127.0.0.1:9090/graph",
    "fingerprint": "8f0c3d1a2b4c5d6e",
}
RESOURCES = {"Pod": ("", "pods"), "Capture": ("rankscope.dev", "captures")}
RESOURCES |= {
    "ProfilingPolicy": ("rankscope.dev", "profilingpolicies"),
    "TrainingRun": ("rankscope.dev", "trainingruns"),
}


def main() -> None:
    pods = {path.stem: _pod(path) for path in sorted(KUBE.glob("*.yaml"))}
    _write("objects", {**{f"pod_{name}": pod for name, pod in pods.items()}, "capture": CAPTURE, "policy": POLICY})
    trainer = pods["pytorchjob"]
    trainer["metadata"].setdefault("labels", {})["rankscope.dev/inject"] = "true"
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": "trainer:1",
        "env": [{"name": "RANK", "value": "0"}, {"name": "PYTHONPATH", "value": "/app"}],
        "envFrom": [{"configMapRef": {"name": "x"}}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "1Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {"runAsUser": 1000},
    }
    helper = {"name": "helper", "image": "busybox"}
    trainer["spec"] = {"containers": [container, helper], "volumes": [{"name": "data", "emptyDir": {}}]}
    run = {
        "kind": "TrainingRun",
        "metadata": {"name": "r", "namespace": "team", "uid": UID},
        "spec": {"workload": {"kind": "Job", "name": "train"}},
    }
    reviews = {"pod": _review(trainer), "capture": _review(CAPTURE), "policy": _review(POLICY)}
    _write("admission", {**reviews, "run": _review(run, old=run)})
    lines = ("POST /inject?timeout=10s HTTP/1.1", "Host: x", "Content-Length: 1024", "Content-Type: application/json")
    (SEEDS / "admission" / "head").write_bytes("".join(f"{line}\r\n" for line in (*lines, "")).encode())
    (SEEDS / "answers").mkdir(exist_ok=True)
    (SEEDS / "answers" / "two_ranks").write_bytes(_capture().SerializeToString())
    (SEEDS / "trace" / "pipeline.json").write_text(json.dumps(_pipeline(), separators=(",", ":")))
    resolved = {**ALERT, "status": "resolved", "fingerprint": "1"}
    _write("alerts", {"two": {"version": "4", "status": "firing", "receiver": "r", "alerts": [ALERT, resolved]}})


def _capture() -> pb.Capture:
    capture = pb.Capture(id="c1", job="j", state=pb.CAPTURE_STATE_ANALYSED, start_skew_millis=1.5, requested_by="ann")
    for rank in (0, 1):
        summary = pb.TraceSummary(
            span_seconds=0.3,
            compute_seconds=0.2,
            step_seconds=0.1,
            collectives={"all_reduce": 3},
            top_kernels=["gemm"],
            findings=["rank 1 works longer", "copies are small"],
            each_step_seconds=[0.1, 0.1 + 0.05 * rank],
            each_communication_seconds=[0.02, 0.02],
            each_exposed_communication_seconds=[0.01, 0.01],
            events=5000,
        )
        entry = capture.ranks.add(rank=rank, node="node-a", backend="kineto", state=pb.CAPTURE_STATE_ANALYSED)
        entry.artifact, entry.bytes, entry.start_unix_millis, entry.steps = "rank.json.gz", 4096, 1790000000000, 3
        entry.summary.CopyFrom(summary)
    capture.join.CopyFrom(
        pb.JoinSummary(verdict="slow_rank", culprits=[1], reason="rank 1 comes last", last_arrivals={1: 5})
    )
    return capture


def _pipeline() -> dict[str, Any]:
    """A stage that waits for its neighbour, computes and sends, as NCCL's kernels show it."""
    note = {
        "Process Group Name": "5",
        "Process Group Description": "pipeline_parallel",
        "Group size": 4,
        "dtype": "Float",
    }
    note |= {"Process Group Ranks": "[0, 1, 2, 3]", "In msg nelems": 4096, "Out msg nelems": 4096, "device": 0}
    events: list[dict[str, Any]] = []
    for number in range(12):
        start, correlation = 1000.0 + 100 * number, 10 + number
        kinds = {"kernel": ("ncclDevKernel_SendRecv(args)", "gemm"), "cuda_runtime": ("cudaLaunchKernel",) * 2}
        for category, (transfer, compute) in kinds.items():
            early = 5.0 if category == "cuda_runtime" else 0.0
            host = {"pid": 7, "tid": 7} if early else {"pid": 0, "tid": 20}
            side = (
                {"Collective name": "send", "Dst Rank": 1} if number % 2 else {"Collective name": "recv", "Src Rank": 1}
            )
            args = {"correlation": correlation, "stream": 20, **({} if early else {**note, **side, "Seq": number})}
            events.append(
                {"ph": "X", "cat": category, "name": transfer, "ts": start - early, "dur": 40.0, "args": args} | host
            )
            args = {"correlation": correlation + 100, "stream": 7, "device": 0}
            events.append(
                {"ph": "X", "cat": category, "name": compute, "ts": start + 41 - early, "dur": 50, "args": args} | host
            )
    for step in range(3):
        host = {"pid": 7, "tid": 7, "ts": 990.0 + 400 * step, "dur": 399.0}
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", **host})
        events.append(
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **host, "dur": 9.0, "args": {"External id": step}}
        )
    return {"schemaVersion": 1, "baseTimeNanoseconds": 1790857026000000000, "traceEvents": events}


def _pod(path: Path) -> dict[str, Any]:
    """The first pod in it, or the first template of one."""
    for document in yaml.safe_load_all(path.read_text()):
        for found in document.get("items", [document]):
            if found.get("kind") == "Pod":
                metadata = {"uid": UID, "creationTimestamp": CREATED, "namespace": "team", **found["metadata"]}
                status = {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]}
                spec = {"nodeName": "node-a", **found.get("spec", {})}
                return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": found.get("status") or status}
    raise ValueError(f"no pod in {path}")


def _review(document: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    group, resource = RESOURCES[document["kind"]]
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "operation": "CREATE" if old is None else "UPDATE",
            "resource": {"group": group, "version": "v1alpha1" if group else "v1", "resource": resource},
            "userInfo": {"username": "ann", "groups": ["system:authenticated"]},
            "namespace": "team",
            "object": document,
            "oldObject": old,
        },
    }


def _write(name: str, documents: dict[str, dict[str, Any]]) -> None:
    folder = SEEDS / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, document in documents.items():
        (folder / file).write_text(json.dumps(document))


if __name__ == "__main__":
    main()
