"""When a restarted operator may replace the verdict that it finds in a status, and how attempts are counted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UnsetType

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.resources import TrainingRunStatus
from rankscope.operator.runs.inventory import Run, RunKey
from rankscope.operator.runs.pods import Pod
from rankscope.operator.runs.status import is_premature, run_status, run_verdict

HEALTHY = Verdict(Kind.HEALTHY, "")
INCOMPLETE = Verdict(Kind.INSUFFICIENT_DATA, "")
SLOW = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,))
SUSPECTED = Verdict(Kind.SLOW_RANK, "", Severity.WARNING, culprits=(2,))


def state(verdict: Verdict) -> JobState:
    return JobState("t/r", 6, verdict, 0.0, 0.0, 6, None, None, None, ())


@pytest.mark.parametrize(
    ("standing", "found", "expected"),
    [
        (SLOW, HEALTHY, True),
        (SLOW, INCOMPLETE, True),
        (SLOW, SUSPECTED, True),
        (SLOW, None, True),
        (HEALTHY, INCOMPLETE, True),
        (HEALTHY, None, True),
        (SLOW, SLOW, False),
        (HEALTHY, SLOW, False),
        # The first status of a new run has few windows behind it; the next one is written at once.
        (INCOMPLETE, HEALTHY, False),
        (INCOMPLETE, SUSPECTED, False),
        (INCOMPLETE, INCOMPLETE, False),
        (HEALTHY, SUSPECTED, False),
    ],
)
def test_windows_that_are_still_missing_clear_no_verdict(
    standing: Verdict, found: Verdict | None, expected: bool
) -> None:
    assert is_premature(None if found is None else state(found), run_verdict(state(standing))) is expected


def pod(uid: str, name: str = "llama-worker-0", restarts: int = 0, **fields: Any) -> Pod:
    return Pod(**{"uid": uid, "name": name, "namespace": "t", "phase": "Running", "restarts": restarts, **fields})


def attempts(*moments: tuple[Pod, ...]) -> list[int | UnsetType]:
    """After each moment of a run's life, given its pods."""
    status, found = TrainingRunStatus(), []
    for pods in moments:
        run = Run(RunKey("t", "PyTorchJob", "llama"), {each.uid: each for each in pods})
        status = run_status(run, None, status, 1, 0.0)
        found.append(status.attempt)
    return found


def test_replaced_pods_and_restarted_containers_are_attempts() -> None:
    first, second = pod("a"), pod("b")
    assert attempts((first,), (first,), (), (second,), (second,)) == [0, 0, 0, 1, 1]
    assert attempts((pod("a"),), (pod("a", restarts=2),), (pod("a", restarts=2),), (pod("b"),)) == [0, 2, 2, 3]
    assert attempts((first,), (pod("a", deleting=True), second)) == [0, 1]


def test_pods_that_come_later_or_end_are_no_attempts() -> None:
    worker = pod("w", "llama-worker-0")
    assert attempts((worker,), (worker, pod("m", "llama-master-0")), (worker,)) == [0, 0, 0]
    assert attempts((worker,), (pod("w", phase="Succeeded"),)) == [0, 0]
