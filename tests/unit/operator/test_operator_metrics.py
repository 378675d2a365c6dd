from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from rankscope.operator.correlation.correlator import LostSeconds
from rankscope.operator.metrics import REFUSAL_REASONS, Exporter


def scrape_everything() -> str:
    """An operator that has done everything once."""
    shown: Any = SimpleNamespace(
        leases=SimpleNamespace(held={0, 1}),
        daemons=SimpleNamespace(addresses={"node-a": "10.0.0.1:9465"}),
        streams=SimpleNamespace(connected={"node-a"}, messages_total=7),
        outbox=SimpleNamespace(waiting=2, written_total=5, failed_total=1),
        binding=SimpleNamespace(refusals=SimpleNamespace(counts=dict.fromkeys(REFUSAL_REASONS, 1))),
        webhooks=SimpleNamespace(
            admission=SimpleNamespace(counts={("inject", "allowed"): 3}), expires_unix=1_800_000_000.0
        ),
        certificates=SimpleNamespace(expires_unix=1_800_000_000.0),
        user_api=SimpleNamespace(calls=Counter({("StartCapture", "OK"): 4})),
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(lambda: (), LostSeconds(), lambda job: None, lambda job: 0, operator=shown))
    return cast(bytes, generate_latest(registry)).decode()


def test_the_operator_tells_what_it_holds_hears_and_writes() -> None:
    lines = scrape_everything().splitlines()
    assert "rankscope_operator_shards_held 2.0" in lines
    assert "rankscope_operator_daemons_connected 1.0" in lines
    assert "rankscope_operator_writes_waiting 2.0" in lines
    assert 'rankscope_operator_windows_refused_total{reason="rate"} 1.0' in lines
    assert 'rankscope_operator_reviews_total{result="allowed",webhook="inject"} 3.0' in lines
    assert 'rankscope_operator_api_calls_total{code="OK",method="StartCapture"} 4.0' in lines
