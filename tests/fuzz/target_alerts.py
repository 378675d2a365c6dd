"""Notifications of an Alertmanager, or of anyone with its token."""

from __future__ import annotations

import json

from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.operator.alerts.alert import MAX_ALERTS, MalformedError, Wanted, read_notification
from rankscope.operator.alerts.alertmanager_webhook import _told
from rankscope.operator.alerts.decision import AlertDecisions, Result
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.capture_service_pb2 import StartCaptureRequest
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow
from tests.fuzz.checking import silence
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("alerts")
_WORDS = (
    "alerts",
    "labels",
    "status",
    "firing",
    "resolved",
    "startsAt",
    "fingerprint",
    "run",
    "run_namespace",
    "rank",
    "capture",
    "true",
    "team",
    "train",
)


def _state() -> JobState:
    identities = [RankIdentity(job="team/train", rank=rank, world_size=2, node="n") for rank in (0, 1)]
    windows = tuple(RankWindow(identity=identity) for identity in identities)
    verdict = Verdict(kind=Kind.SLOW_RANK, reason="rank 1 is slow", culprits=(1,))
    return JobState("team/train", 2, verdict, 0.0, 0.0, 2, 0.1, None, None, windows)


def run(data: bytes) -> None:
    try:
        alerts = read_notification(data)
    except MalformedError as error:
        assert len(str(error)) < 300, len(str(error))
        str(error).encode()  # it goes into the answer and the log
        return
    assert len(alerts) <= MAX_ALERTS
    asked: list[Wanted] = []

    def start(wanted: Wanted) -> str:
        asked.append(wanted)
        ranks = ",".join(map(str, wanted.ranks))
        StartCaptureRequest(job=wanted.job, ranks=ranks, reason=wanted.reason).SerializeToString()
        return "c1"

    desk = AlertDecisions(lambda: (_state(),), start, monotonic_seconds=lambda: 100.0, unix_seconds=lambda: 1.79e9)
    for _ in range(2):
        with silence():
            outcomes = desk.handle(alerts)
        assert len(outcomes) <= len(alerts) and all(outcome.result in Result for outcome in outcomes)
        json.dumps(_told(outcomes)).encode()
        for outcome in outcomes:
            assert len(outcome.text) < 2000 and len(outcome.alert) <= 256 and len(outcome.job) <= 256
    assert len(asked) <= 1, "one firing, two captures"


def mutator(plain: Mutator) -> JsonMutator:
    return JsonMutator(plain, _WORDS)
