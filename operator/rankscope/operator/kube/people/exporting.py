"""What the API for people says of itself in /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class PeopleExporter(Collector):
    """`counts` are by method and gRPC's name for how a call ended."""

    def __init__(self, counts: Counter[tuple[str, str]]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily(
            "rankscope_operator_api_calls",
            "Calls of the API for people, by method and gRPC's code; the log tells of refused callers once.",
            labels=["method", "code"],
        )
        for (method, code), number in sorted(self._counts.copy().items()):
            calls.add_metric([method, code], number)
        yield calls

    def describe(self) -> Iterable[Metric]:
        return ()
