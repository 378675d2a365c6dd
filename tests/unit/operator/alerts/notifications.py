"""Notifications as Alertmanager sends them, and jobs as the correlation knows them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.alerts.alert import Alert, read_notification
from rankscope.operator.correlation.correlator import JobState
from tests.unit.operator.correlation.test_metrics import SLOW, state

HEALTHY = Verdict(Kind.HEALTHY, "all is well")
SLOW_NETWORK = Verdict(Kind.SLOW_COMMUNICATION, "all wait", Severity.ALARM, impact_ratio=0.3)


def entry(
    name: str = "RankscopeStragglerRank", status: str = "firing", start: int = 0, **labels: str
) -> dict[str, Any]:
    labels = {"alertname": name, "run": "j", "capture": "true", **labels}
    return {
        "status": status,
        "labels": labels,
        "annotations": {"summary": "rank 1 is slow"},
        "startsAt": f"2026-01-01T00:00:{start:02}Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://127.0.0.1:9090/graph",
        "fingerprint": f"{abs(hash(tuple(sorted(labels.items())))):016x}",
    }


def notification(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"version": "4", "status": "firing", "receiver": "rankscope", "alerts": entries}).encode()


def alerts(*entries: dict[str, Any]) -> tuple[Alert, ...]:
    return read_notification(notification(*entries))


def job(verdict: Verdict = SLOW, name: str = "j", ranks: int = 4) -> JobState:
    return replace(state(verdict, name, ranks), evaluated_unix_seconds=1.0)
