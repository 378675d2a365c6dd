"""What captures do, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class CaptureStatus:
    results: dict[str, int] = field(default_factory=dict)
    slowdowns: dict[str, float] = field(default_factory=dict)
    clients: int = 0
    malformed_total: int = 0
    unvouched_total: int = 0
    unanswered: dict[str, int] = field(default_factory=dict)
    # Of the duty cycle; None where it is off.
    duty_results: dict[str, int] | None = None
    duty_skips: dict[str, int] | None = None


def capture_metrics(status: CaptureStatus) -> Iterable[Metric]:
    ranks = CounterMetricFamily(
        "rankscope_captured_ranks", "Ranks that were asked for a capture, by what came of it.", labels=["result"]
    )
    for result, count in status.results.items():
        ranks.add_metric([result], count)
    yield ranks
    slowdown = GaugeMetricFamily(
        "rankscope_capture_step_ratio",
        "Step time after the job's last capture divided by that before it, of the rank it slowed most.",
        labels=["job"],
    )
    for job, ratio in status.slowdowns.items():
        slowdown.add_metric([job], ratio)
    yield slowdown
    yield GaugeMetricFamily(
        "rankscope_capture_clients", "Processes whose libkineto polls this daemon.", value=status.clients
    )
    refused = CounterMetricFamily(
        "rankscope_capture_datagrams_refused", "Datagrams that were not answered, by reason.", labels=["reason"]
    )
    refused.add_metric(["malformed"], status.malformed_total)
    refused.add_metric(["unvouched"], status.unvouched_total)
    yield refused
    unanswered = CounterMetricFamily(
        "rankscope_capture_datagrams_unanswered",
        "Polls in order that got no answer, and are made again: late (it would have come too late), hushed (the first "
        "on a new socket, or to set a client right), unsent (the client was gone, or its queue full).",
        labels=["reason"],
    )
    for reason, count in status.unanswered.items():
        unanswered.add_metric([reason], count)
    yield unanswered
    for name, text, label, counts in (
        ("duty_cycle_captures", "Captures of the duty cycle, by what came of them.", "result", status.duty_results),
        (
            "duty_cycle_skipped",
            "Captures of the duty cycle that were not made, by reason.",
            "reason",
            status.duty_skips,
        ),
    ):
        if counts is not None:
            family = CounterMetricFamily(f"rankscope_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
