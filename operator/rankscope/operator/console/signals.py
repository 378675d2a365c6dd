"""The table of signals: what is kept of a rank and of a run over time, with unit, definition and PromQL.

A signal of a rank has the name of the figure that a daemon sends. To add one, add the figure to `window_columns` and a
row here."""

from __future__ import annotations

import msgspec
import numpy as np

from rankscope.analysis.verdicts.window_columns import FIGURES


class Signal(msgspec.Struct, frozen=True):
    """`promql` is the same from Prometheus: $run stands for the matchers of a run, $window for a duration. Empty where
    it has none."""

    name: str
    scope: str  # "rank" or "run"
    unit: str
    promql: str
    definition: str


def _signals(scope: str, *rows: tuple[str, str, str, str]) -> tuple[Signal, ...]:
    return tuple(Signal(name, scope, unit, promql, definition) for name, unit, promql, definition in rows)


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
    selector = f'rankscope_rank_cause_seconds_total{{$run,cause="{cause}"}}'
    mean = f"{_rate(selector)} / ignoring (cause) {_STEPS}"
    return f"{mean} or on (cluster, rank) {_mean(otherwise)}" if otherwise else mean


def _of_gpu(expression: str) -> str:
    """Metrics of GPUs have no run: only GPUs of the run's own ranks are read."""
    ranks = 'group by (cluster, rank, gpu) (last_over_time(rankscope_rank_info{$run,gpu!=""}[$window]))'
    return f"{ranks} * on (cluster, gpu) group_left () max by (cluster, gpu) ({expression})"


# Of a rank, by the name of the figure that it is read from.
# fmt: off
SIGNALS = _signals("rank",
    ("self_seconds", "seconds/step", _per_step("self", "rank:rankscope_rank_self_seconds:median2m{$run}"),
        "Step time less waiting on others. Compare ranks by this one."),
    ("wait_seconds", "seconds/step", _per_step("wait", "rank:rankscope_rank_group_wait_seconds:sum{$run}"),
        "Communication that nothing hides: time in which the rank waits for others."),
    ("step_seconds", "seconds/step", _mean('rankscope_rank_step_seconds{$run,stat="p50"}'),
        "Step time, mean of the window. In synchronous training it is the same on every rank."),
    ("communication_seconds", "seconds/step", _per_step("communication"),
        "Communication, hidden behind other work or not."),
    ("input_seconds", "seconds/step", _per_step("input"), "Waiting for the data loader."),
    ("forward_seconds", "seconds/step", _per_step("forward"), "Forward pass."),
    ("backward_seconds", "seconds/step", _per_step("backward"), "Backward pass, without waiting on others."),
    ("optimizer_seconds", "seconds/step", _per_step("optimizer"), "Optimizer step."),
    ("checkpoint_seconds", "seconds/step", _per_step("checkpoint"), "Writing checkpoints."),
    ("other_seconds", "seconds/step", _per_step("other"), "The rest of self time."),
    ("host_seconds", "seconds/step", _mean("rankscope_rank_host_seconds{$run}"),
        "What a step takes on the host, where step time is the device's."),
    ("run_ahead_seconds", "seconds", _mean("rankscope_rank_run_ahead_seconds{$run}"),
        "The furthest the host is ahead of the device within a step. Near zero, the device waits for its host."),
    ("starved_seconds", "seconds/step", f"({_STARVED}) / {_STEPS}",
        "Runnable or stopped, but not running: run queue, CPU quota, stop signal."),
    ("mfu_ratio", "ratio", _mean("rankscope_rank_mfu_ratio{$run}"), "Model FLOPs utilisation."),
    ("cpu_ratio", "ratio", _rate("rankscope_rank_cpu_seconds_total{$run}"),
        "CPU time of the process by time: 2 is two cores."),
    ("resident_bytes", "bytes", _mean("rankscope_rank_resident_bytes{$run}"), "Memory of the process on the host."),
    ("memory_allocated_bytes", "bytes", _mean('rankscope_rank_device_memory_bytes{$run,kind="allocated"}'),
        "Device memory that torch's allocator has handed out."),
    ("gpu_utilization_ratio", "ratio", _of_gpu(_mean("rankscope_gpu_utilization_ratio")),
        "Time with any kernel running on the rank's GPU."),
    ("gpu_tensor_active_ratio", "ratio", _of_gpu(_mean('rankscope_gpu_tensor_active_ratio{pipe="any"}')),
        "Time with any tensor pipe of the GPU active."),
    ("gpu_sm_clock_hertz", "hertz", _of_gpu(_mean('rankscope_gpu_clock_hertz{clock="sm"}')),
        "Clock of the GPU's multiprocessors."),
    ("gpu_power_watts", "watts", _of_gpu(_mean("rankscope_gpu_power_watts")), "Power draw of the GPU."),
    ("gpu_temperature_celsius", "celsius", _of_gpu(_mean("rankscope_gpu_temperature_celsius")),
        "Temperature of the GPU."),
    ("gpu_throttled_ratio", "ratio", _of_gpu(_rate("rankscope_gpu_throttled_seconds_total")),
        "Time in which the GPU's clock is held back, by the most frequent reason."),
    ("gpu_memory_used_bytes", "bytes", _of_gpu(_mean('rankscope_gpu_memory_bytes{kind="used"}')),
        "Memory in use on the GPU, of all processes."),
)
RUN_SIGNALS = _signals("run",
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
FIGURE_ROWS = np.array([FIGURES.index(name) for name in SIGNAL_ROWS])
