"""Every metric that the code exports, from the tables of the daemon and the operator: name, type, help and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from rankscope.daemon.export import metrics as daemon
from rankscope.operator import metrics as operator


@dataclass(frozen=True)
class ExportedMetric:
    name: str
    type: str
    help: str
    labels: Mapping[str, Sequence[str]]  # with its values where they are a closed set, else none


def exported_metrics() -> dict[str, ExportedMetric]:
    """By name, in the order of the tables."""
    metrics: dict[str, ExportedMetric] = {}
    for section in chain(daemon.TABLE, operator.TABLE):
        for metric in section.metrics:
            if metric.name in metrics:
                raise ValueError(f"{metric.name} is declared twice")
            labels = dict(sorted({**dict.fromkeys(section.labels, ()), **metric.labels}.items()))
            metrics[metric.name] = ExportedMetric(metric.name, metric.type, metric.help, labels)
    return metrics
