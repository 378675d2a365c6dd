"""What the webhooks say of themselves in /metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.operator.kube.webhooks.wiring import Webhooks


class WebhookExporter(Collector):
    def __init__(self, webhooks: Webhooks) -> None:
        self._webhooks = webhooks

    def collect(self) -> Iterable[Metric]:
        reviews = CounterMetricFamily(
            "rankscope_operator_reviews",
            "Reviews that the API server asked for, by webhook (inject, stamp, validate) and result.",
            labels=["webhook", "result"],
        )
        for (webhook, result), number in sorted(self._webhooks.admission.counts.copy().items()):
            reviews.add_metric([webhook, result], number)
        yield reviews
        expires_unix = self._webhooks.expires_unix
        if expires_unix is not None:
            yield GaugeMetricFamily(
                "rankscope_operator_certificate_expiry_timestamp_seconds",
                "When the certificate that the webhooks are served with ends.",
                value=expires_unix,
            )

    def describe(self) -> Iterable[Metric]:
        return ()
