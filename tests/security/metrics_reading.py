"""One value of the bystander's daemon, as Prometheus would read it."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.security.bystander import Bystander


def value(bystander: Bystander, name: str, **labels: str) -> float | None:
    """The sum of all samples of that name and those labels; None if there are none."""
    with urllib.request.urlopen(bystander.metrics_url, timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    values = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    return sum(values) if values else None
