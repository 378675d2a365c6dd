"""What became of alerts that ask for captures, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.operator.alerts.deciding import Result


class AlertExporter(Collector):
    def __init__(self, totals: Callable[[], Mapping[Result, int]]) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "rankscope_alert_captures",
            "Alerts received that ask for a capture, by what came of them.",
            labels=["result"],
        )
        for result, count in self._totals().items():
            family.add_metric([result.value], count)
        yield family

    def describe(self) -> Iterable[Metric]:
        return ()
