from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.objects import read_run_object
from rankscope.operator.kube.resources import RunVerdict, TrainingRunStatus
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.inventory import Inventory, Run, RunKey, RunNodes
from rankscope.operator.runs.pods import MFU_TARGET, Pod
from rankscope.v1.identity_pb2 import RankIdentity
from tests.unit.operator.policies.policy_objects import pod, run


@dataclass
class Cluster:
    """Everything that the controller asks or tells, as simple as can be."""

    inventory: dict[RunKey, Run] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    written: list[Any] = field(default_factory=list)
    is_new: bool = False  # the operator was just started

    def runs(self) -> dict[RunKey, Run]:
        return self.inventory

    def holds(self, key: str) -> bool:
        return True

    def is_settling(self, key: str) -> bool:
        return self.is_new

    def queue_status(self, thing: Any, status: Any) -> None:
        self.written.append(status)

    def queue(self, key: str, place: str, content: object, send: object) -> None: ...

    def emit(self, target: Any, kind: str, reason: str, message: str, change: str) -> None:
        self.told.append(target.uid)
        self.events.append((target.uid, reason, message))


def controller(cluster: Cluster, states: Mapping[str, JobState] | None = None) -> RunsController:
    fake: Any = cluster
    made = RunsController(fake, fake, fake, fake, fake, lambda: states or {})
    made.watched.listed = Event()
    made.watched.listed.set()
    return made


def test_a_mistake_is_told_once_and_forgotten_with_its_pod() -> None:
    cluster = Cluster()
    runs = controller(cluster)
    for number in range(50):
        wrong = run(pod(f"w-{number}", {MFU_TARGET: "a lot"}))
        cluster.inventory = {wrong.key: wrong}
        runs.reconcile()
        runs.reconcile()
    assert cluster.told == [f"uid-w-{number}" for number in range(50)]
    assert len(runs._reported) == 1


def verdict(kind: Kind, severity: Severity) -> RunVerdict:
    confidence = Confidence.HIGH
    return RunVerdict(kind=kind, severity=severity, confidence=confidence, reason="r", since="2026-03-01T10:00:00Z")


@pytest.mark.parametrize(
    ("kind", "severity", "is_kept"),
    [
        (Kind.SLOW_RANK, Severity.ALARM, True),
        (Kind.HEALTHY, Severity.NONE, True),
        (Kind.INSUFFICIENT_DATA, Severity.NONE, False),
    ],
)
def test_after_a_restart_only_an_unjudged_run_is_written(kind: Kind, severity: Severity, is_kept: bool) -> None:
    cluster = Cluster(is_new=True)
    runs = controller(cluster)
    known = run(pod("w-0"))
    cluster.inventory = {known.key: known}
    metadata = {"namespace": known.key.namespace, "name": known.key.object_name, "uid": "u"}
    thing = read_run_object({"metadata": metadata, "spec": {"workload": {"uid": known.key.uid}}})
    assert thing is not None
    runs.changed("u", replace(thing, status=TrainingRunStatus(verdict=verdict(kind, severity))))
    runs.reconcile()
    assert len(cluster.written) == (0 if is_kept else 1)


def test_a_hang_report_makes_an_event_and_a_status_field() -> None:
    cluster = Cluster()
    runs = controller(cluster)
    known = run(pod("w-0"))
    cluster.inventory = {known.key: known}
    namespace, name = known.key.namespace, known.key.object_name
    thing = read_run_object(
        {
            "metadata": {"namespace": namespace, "name": name, "uid": "u"},
            "spec": {"workload": {"uid": known.key.uid}},
        }
    )
    assert thing is not None
    report = HangReport(
        id=f"{namespace}/h-20260301-101500-0a1b2c",
        run=f"{namespace}/{name}#2",
        headline="rank 1 in save (ckpt.py:51)",
        verdict="it hangs",
        world_size=2,
        began_unix_seconds=1.0,
        made_unix_seconds=2.0,
    )
    runs.report_hang(report)
    assert not cluster.told, "the run has no object yet"
    runs.changed("u", thing)
    runs.report_hang(report)
    runs.reconcile()
    assert cluster.events == [("u", "HangReported", f"rank 1 in save (ckpt.py:51); next: rankscope hangs {report.id}")]
    assert cluster.written[-1].last_hang == report.id
    runs.changed("u", replace(thing, status=cluster.written[-1]))
    runs.reconcile()
    assert cluster.written[-1].last_hang == report.id


def test_a_slow_rank_event_has_the_proof_of_its_cause() -> None:
    cluster, known = Cluster(), run(pod("w-0"))
    cluster.inventory = {known.key: known}
    proof = "rank 3 spends 41 % of its time in `load_image (dataset.py:88)`, its peers 2 %"
    found = Verdict(Kind.SLOW_RANK, "rank 3: late", Severity.ALARM, culprits=(3,), cause=Cause("input", (), proof))
    place = f"{known.key.namespace}/{known.key.object_name}"
    state = JobState(place, 4, found, 0.0, 0.0, 4, None, None, None, ())
    runs = controller(cluster, {place: state})
    metadata = {"namespace": known.key.namespace, "name": known.key.object_name, "uid": "u"}
    thing = read_run_object({"metadata": metadata, "spec": {"workload": {"uid": known.key.uid}}})
    assert thing is not None
    runs.changed("u", thing)
    runs.reconcile()
    assert [message for _, _, message in cluster.events] == [f"rank 3: late; {proof}"]
    assert cluster.written[0].verdict.evidence == proof


def test_run_nodes_come_from_own_pods_and_ranks_from_correlation() -> None:
    inventory = Inventory()
    for uid, name, namespace, node in (
        ("1", "llama", "team", "a"),
        ("2", "llama", "team", "b"),
        ("3", "other", "team", "a"),
        ("4", "llama", "others", "c"),
        ("5", "llama", "team", ""),
    ):
        labels = {"training.kubeflow.org/job-name": name}
        inventory.changed(uid, Pod(uid, f"w-{uid}", namespace, node, labels=labels))
    second: Any = SimpleNamespace(identities={7: RankIdentity(rank=7, node="b")})
    fake: Any = Cluster()
    runs = RunsController(fake, fake, fake, inventory, fake, lambda: {"team/pytorchjob-llama#2": second})
    pods = {"a": frozenset({"1"}), "b": frozenset({"2"})}
    assert runs.nodes_of("team/pytorchjob-llama") == RunNodes(pods, {})
    assert runs.nodes_of("team/pytorchjob-llama#2") == RunNodes(pods, {7: "b"})
    assert runs.nodes_of("team/none") == RunNodes({}, {})
