"""Pages of metrics, by Prometheus' own linter."""

from __future__ import annotations

import subprocess

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tests.unit.operator.correlation.test_metrics import scrape_everything
from tools.daemon_samples import full_rank, scrape
from tools.exported_metrics import exported_metrics
from tools.prometheus_binaries import binary

OWNED_BY_PROMETHEUS = {"job", "instance", "namespace", "pod", "container", "service", "endpoint", "cluster", "quantile"}


def complaints(page: str) -> str:
    checked = subprocess.run(
        [str(binary("promtool")), "check", "metrics"], input=page, capture_output=True, text=True, timeout=240
    )
    return checked.stdout + checked.stderr


def test_promtool_accepts_full_pages_of_a_daemon_and_a_correlation() -> None:
    assert complaints(scrape(full_rank())) == ""
    assert complaints(scrape_everything()) == ""


def test_promtool_has_no_complaint_about_any_metric_that_is_declared() -> None:
    class Declared:
        def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
            families: list[CounterMetricFamily | GaugeMetricFamily] = []
            for metric in exported_metrics().values():
                family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.type]
                made = family(metric.name, metric.help, labels=list(metric.labels))
                made.add_metric([values[0] if values else "x" for values in metric.labels.values()], 1)
                families.append(made)
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Declared())
    assert complaints(generate_latest(registry).decode()) == ""
    assert "quantile" in complaints('# HELP x_seconds X.\n# TYPE x_seconds gauge\nx_seconds{quantile="0.5"} 1\n')


def test_no_metric_has_a_label_that_prometheus_would_rename() -> None:
    assert not {
        (name, label)
        for name, metric in exported_metrics().items()
        for label in metric.labels.keys() & OWNED_BY_PROMETHEUS
    }
