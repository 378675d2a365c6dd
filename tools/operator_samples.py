"""A job and an operator of which everything is known: each metric that the operator exports has a value here."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.operator.access.api_server import PeopleExporter
from rankscope.operator.alerts.decision import AlertExporter, Result
from rankscope.operator.certificates.fleet_secrets import FleetCertificateExporter
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.metrics import JobExporter
from rankscope.operator.http_endpoints import OperatorExporter
from rankscope.operator.webhooks.webhooks import WebhookExporter
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow

REASONS = ("jobs", "other_node", "rank", "rank_taken", "ranks", "rate", "size", "unknown_pod", "unreadable")


def scrape_jobs() -> str:
    """A job with a finding."""
    verdict = Verdict(
        Kind.SLOW_RANK,
        "rank 1 is slow",
        Severity.ALARM,
        Confidence.HIGH,
        (1,),
        impact_ratio=0.3,
        lost_gpu_seconds=12.0,
        cause=Cause("forward"),
        stage=1,
    )
    windows = tuple(RankWindow(identity=RankIdentity(rank=rank, node="a", namespace="team")) for rank in range(4))
    state = JobState("j", 4, verdict, 0, 0, 4, 0.1, 0.4, 0.2, windows)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobExporter(lambda: (state,), LostSeconds(), 0.4))
    registry.register(AlertExporter(lambda: dict.fromkeys(Result, 1)))
    return generate_latest(registry).decode()


def scrape_operator() -> str:
    """An operator that has done everything once."""
    shown: Any = SimpleNamespace(
        leases=SimpleNamespace(held={0, 1}),
        daemons=SimpleNamespace(addresses={"node-a": "10.0.0.1:9465"}),
        streams=SimpleNamespace(connected={"node-a"}, messages_total=7),
        outbox=SimpleNamespace(waiting=2, written_total=5, failed_total=1),
        binding=SimpleNamespace(refusals=SimpleNamespace(counts=dict.fromkeys(REASONS, 1))),
    )
    webhooks: Any = SimpleNamespace(
        admission=SimpleNamespace(counts={("inject", "allowed"): 3}), expires_unix=1_800_000_000.0
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(OperatorExporter(shown))
    registry.register(WebhookExporter(webhooks))
    certificates: Any = SimpleNamespace(expires_unix=1_800_000_000.0)
    registry.register(FleetCertificateExporter(certificates))
    registry.register(PeopleExporter(Counter({("StartCapture", "OK"): 4})))
    return generate_latest(registry).decode()
