"""The table of signals: what is kept of a rank and of a run over time, with unit, definition and PromQL.

A signal of a rank is a figure that a daemon sends (analysis/verdicts/figures.py), with its query."""

from __future__ import annotations

import msgspec
import numpy as np

from rankscope.analysis.verdicts import window_columns
from rankscope.analysis.verdicts.figures import CAUSE, CAUSES, FIGURES


class Signal(msgspec.Struct, frozen=True):
    """`promql` is the same from Prometheus: $run stands for the matchers of a run, $window for a duration. Empty where
    it has none."""

    name: str
    scope: str  # "rank" or "run"
    unit: str
    promql: str
    definition: str


def _of_run(*rows: tuple[str, str, str, str]) -> tuple[Signal, ...]:
    return tuple(Signal(name, "run", unit, promql, definition) for name, unit, promql, definition in rows)


def _mean(selector: str) -> str:
    return f"avg_over_time({selector}[$window])"


def _rate(selector: str) -> str:
    return f"rate({selector}[$window])"


_STEPS = f"({_rate('rankscope_rank_steps_total{$run}')} > 0)"
_STARVED = (
    f"({_rate('rankscope_rank_run_delay_seconds_total{$run}')}"
    f" or {_rate('rankscope_rank_throttled_seconds_total{$run}')})"
    f" + {_rate('rankscope_rank_stopped_seconds_total{$run}')}"
)


def _per_step(cause: str, otherwise: str = "") -> str:
    selector = f'{CAUSE}{{$run,cause="{cause}"}}'
    mean = f"{_rate(selector)} / ignoring (cause) {_STEPS}"
    return f"{mean} or on (cluster, rank) {_mean(otherwise)}" if otherwise else mean


def _of_gpu(expression: str) -> str:
    """Metrics of GPUs have no run: only GPUs of the run's own ranks are read."""
    ranks = 'group by (cluster, rank, gpu) (last_over_time(rankscope_rank_info{$run,gpu!=""}[$window]))'
    return f"{ranks} * on (cluster, gpu) group_left () max by (cluster, gpu) ({expression})"


# Of a rank: the query, by the name of the figure that it is read from.
# fmt: off
_PROMQL = {
    "self_seconds": _per_step("self", "rank:rankscope_rank_self_seconds:median2m{$run}"),
    "wait_seconds": _per_step("wait", "rank:rankscope_rank_group_wait_seconds:sum{$run}"),
    "step_seconds": _mean('rankscope_rank_step_seconds{$run,stat="p50"}'),
    **{name: _per_step(cause) for cause, name in CAUSES.items() if cause not in ("self", "wait")},
    **{name: _mean(f"{one.metric}{{$run}}") for name, one in FIGURES.items() if one.metric and not one.is_cause},
    "starved_seconds": f"({_STARVED}) / {_STEPS}",
    "cpu_ratio": _rate("rankscope_rank_cpu_seconds_total{$run}"),
    "resident_bytes": _mean("rankscope_rank_resident_bytes{$run}"),
    "memory_allocated_bytes": _mean('rankscope_rank_device_memory_bytes{$run,kind="allocated"}'),
    "gpu_utilization_ratio": _of_gpu(_mean("rankscope_gpu_utilization_ratio")),
    "gpu_tensor_active_ratio": _of_gpu(_mean('rankscope_gpu_tensor_active_ratio{pipe="any"}')),
    "gpu_sm_clock_hertz": _of_gpu(_mean('rankscope_gpu_clock_hertz{clock="sm"}')),
    "gpu_power_watts": _of_gpu(_mean("rankscope_gpu_power_watts")),
    "gpu_temperature_celsius": _of_gpu(_mean("rankscope_gpu_temperature_celsius")),
    "gpu_throttled_ratio": _of_gpu(_rate("rankscope_gpu_throttled_seconds_total")),
    "gpu_memory_used_bytes": _of_gpu(_mean('rankscope_gpu_memory_bytes{kind="used"}')),
}
SIGNALS = tuple(
    Signal(name, "rank", FIGURES[name].unit, promql, FIGURES[name].definition) for name, promql in _PROMQL.items()
)
RUN_SIGNALS = _of_run(
    ("step_seconds", "seconds/step", _mean("rankscope_job_step_seconds{$run}"), "Step time, median of the ranks."),
    ("mfu_ratio", "ratio", _mean("rankscope_job_mfu_ratio{$run}"), "Model FLOPs utilisation, median of the ranks."),
    ("exposed_communication_ratio", "ratio", _mean("rankscope_job_exposed_communication_ratio{$run}"),
        "Share of the step spent waiting on others, mean of the ranks."),
    ("impact_ratio", "ratio", _mean("rankscope_job_impact_ratio{$run}"),
        "Share of the run's time that the current finding costs."),
    ("lost_gpu_seconds", "GPU seconds", "", "What the current finding has cost: its impact times ranks and time."),
    ("lost_today_gpu_seconds", "GPU seconds", "", "What findings have cost since midnight UTC."),
)
# fmt: on
PACE = tuple(signal.name for signal in RUN_SIGNALS[:3])
SIGNAL_ROWS = {signal.name: row for row, signal in enumerate(SIGNALS)}
FIGURE_ROWS = np.array([window_columns.FIGURES.index(name) for name in SIGNAL_ROWS])
