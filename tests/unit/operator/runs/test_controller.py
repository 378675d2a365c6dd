from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import pytest

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity
from rankscope.operator.kube.objects import read_run_object
from rankscope.operator.kube.resources import RunVerdict, TrainingRunStatus
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.inventory import Run
from rankscope.operator.runs.pods import MFU_TARGET
from rankscope.operator.runs.run_grouping import RunKey
from tests.unit.operator.policies.policy_objects import pod, run


@dataclass
class Cluster:
    """Everything that the controller asks or tells, as simple as can be."""

    inventory: dict[RunKey, Run] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
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


def controller(cluster: Cluster) -> RunsController:
    fake: Any = cluster
    made = RunsController(fake, fake, fake, fake, fake, dict)
    made.watched.listed = Event()
    made.watched.listed.set()
    return made


def test_a_mistake_is_told_once_a_pod_and_those_of_pods_that_are_gone_are_not_remembered() -> None:
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
def test_after_a_restart_a_finding_stands_and_a_run_that_was_not_judged_yet_is_written_at_once(
    kind: Kind, severity: Severity, is_kept: bool
) -> None:
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
