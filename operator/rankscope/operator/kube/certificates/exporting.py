"""What the fleet's certificates say of themselves in /metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.operator.kube.certificates.fleet_keeping import FleetCertificates


class FleetCertificateExporter(Collector):
    def __init__(self, certificates: FleetCertificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterable[Metric]:
        expires_unix = self._certificates.expires_unix
        if expires_unix is not None:
            yield GaugeMetricFamily(
                "rankscope_operator_fleet_certificate_expiry_timestamp_seconds",
                "When the first of the certificates that this replica shows to daemons and callers ends.",
                value=expires_unix,
            )

    def describe(self) -> Iterable[Metric]:
        return ()
