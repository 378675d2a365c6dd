from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import Any

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

    def runs(self) -> dict[RunKey, Run]:
        return self.inventory

    def holds(self, key: str) -> bool:
        return True

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
