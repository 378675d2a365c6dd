"""Every metric that the code exports, asked of the exporters themselves: name, type, help and labels.

They are given the fullest samples there are, the ones that their tests use as well. A metric that those leave out would
be missing here; the test of the dashboards holds a real `rankscope up` against this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity
from rankscope.daemon.gpu.readings import SourceState
from tools import daemon_samples, operator_samples

# Closed sets of values that a snapshot cannot show all at once.
_CLOSED_SETS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("rankscope_job_verdict", "verdict"): tuple(kind.value for kind in Kind),
    ("rankscope_job_verdict", "severity"): tuple(severity.value for severity in Severity),
    ("rankscope_job_verdict", "confidence"): tuple(confidence.value for confidence in Confidence),
    ("rankscope_gpu_source_state", "state"): tuple(state.value for state in SourceState),
}
# Labels of which a snapshot shows every value; elsewhere they may be anything.
_CLOSED = {
    "cause",
    "clock",
    "counter",
    "direction",
    "kind",
    "part",
    "phase",
    "pipe",
    "quantile",
    "reason",
    "result",
    "state",
}
_OPEN = {
    ("rankscope_rank_problem", "kind"),
    ("rankscope_job_culprit", "phase"),
    ("rankscope_operator_reviews_total", "result"),
}


@dataclass(frozen=True)
class ExportedMetric:
    name: str
    type: str
    help: str
    labels: Mapping[str, tuple[str, ...]]  # its values where the set is closed, else nothing


def exported_metrics() -> dict[str, ExportedMetric]:
    """By name, in the order of the exporters."""
    metrics: dict[str, ExportedMetric] = {}
    for text in (
        daemon_samples.scrape_everything(),
        operator_samples.scrape_jobs(),
        operator_samples.scrape_operator(),
    ):
        for family in text_string_to_metric_families(text):
            for name in dict.fromkeys(sample.name for sample in family.samples):
                samples = [sample.labels for sample in family.samples if sample.name == name]
                names = dict.fromkeys(label for labels in samples for label in labels)
                values = {label: _values(name, label, samples) for label in names}
                metrics[name] = ExportedMetric(name, family.type, family.documentation, values)
    return metrics


def _values(name: str, label: str, samples: list[dict[str, str]]) -> tuple[str, ...]:
    if (name, label) in _OPEN:
        return ()
    if (name, label) in _CLOSED_SETS:
        return _CLOSED_SETS[name, label]
    return tuple(dict.fromkeys(labels[label] for labels in samples)) if label in _CLOSED else ()
