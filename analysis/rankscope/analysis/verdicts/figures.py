"""The figures of a rank in one window, a row each. The daemon's table (window_columns.py), what is
taken from a window, the bounds, the causes of step time, and the texts of metrics and of the console follow
from it."""

from __future__ import annotations

from typing import Final, NamedTuple

PER_STEP, SECONDS, RATIO, BYTES, HERTZ = "seconds/step", "seconds", "ratio", "bytes", "hertz"
WATTS, CELSIUS, STEPS, TOKENS, UNIX_SECONDS = "watts", "celsius", "steps", "tokens", "unix seconds"

# What a container or a daemon claims beyond these is no measurement, and would become infinite in a ratio or a sum. No
# step lasts longer than a day.
MAX_STEP_SECONDS: Final = 86_400.0
MAX_COUNT: Final = 2.0**53
_COUNTS = {BYTES, HERTZ, STEPS, TOKENS, UNIX_SECONDS}

# How a RankWindow holds a figure: in a field of its name, there with quantiles, or as the mean over the steps in which
# it was measured. The others are computed from several fields.
FIELD, QUANTILES, MEAN, COMPUTED = "field", "quantiles", "mean", "computed"


class Figure(NamedTuple):
    name: str
    unit: str
    held: str
    definition: str
    is_cause: bool = False  # a part of the step, counted in rankscope_rank_cause_seconds_total

    @property
    def maximum(self) -> float:
        return MAX_COUNT if self.unit in _COUNTS else MAX_STEP_SECONDS


def _cause(name: str, held: str, definition: str) -> Figure:
    return Figure(f"{name}_seconds", PER_STEP, held, definition, is_cause=True)


# Of usual steps are self time, waiting, transfer and checkpoints: what the few long steps took beyond them is in
# `long_seconds`. Rules read these: fields of RankColumns.
OF_RULES: Final = (
    Figure("steps", STEPS, FIELD, "Steps that ended in the window."),
    Figure("step_seconds", PER_STEP, QUANTILES, "Step time. In synchronous training it is the same on every rank."),
    _cause("self", QUANTILES, "Step time less waiting on others. Compare ranks by this one."),
    _cause("wait", QUANTILES, "Communication that nothing hides: time in which the rank waits for others."),
    Figure("transfer_seconds", PER_STEP, COMPUTED, "A low quantile of waiting: what even the rank that is last needs."),
    Figure("self_steps", STEPS, COMPUTED, "Steps that self time is the mean of. Absent: all."),
    Figure("self_spread_ratio", RATIO, COMPUTED, "The rank's own slow steps (p90) against its own fast ones (p10)."),
    _cause("input", MEAN, "Waiting for the data loader."),
    _cause("forward", MEAN, "Forward pass."),
    _cause("backward", MEAN, "Backward pass, without waiting on others."),
    _cause("optimizer", MEAN, "Optimizer step."),
    _cause("checkpoint", MEAN, "Writing checkpoints."),
    _cause("other", FIELD, "The rest of self time."),
    Figure(
        "starved_seconds",
        PER_STEP,
        COMPUTED,
        "Runnable or stopped, but not running: run queue, CPU quota, stop signal.",
    ),
    Figure(
        "host_seconds",
        PER_STEP,
        MEAN,
        "What a step takes on the host, where step time is the device's. It says nothing about the step by itself.",
    ),
    Figure(
        "run_ahead_seconds",
        SECONDS,
        MEAN,
        "The furthest the host is ahead of the device within a step. Near zero, the device waits for its host.",
    ),
    Figure("mfu_ratio", RATIO, FIELD, "Model FLOPs utilisation. Absent unless the FLOPs and the peak are known."),
    Figure("long_seconds", PER_STEP, COMPUTED, "In steps of at least twice the usual length, beyond the usual."),
    Figure("late_seconds", PER_STEP, COMPUTED, "Of that, by this rank: neither waiting for others nor a checkpoint."),
    Figure("long_ratio", RATIO, COMPUTED, "Share of the steps that were long."),
    Figure("late_ratio", RATIO, COMPUTED, "Share of the steps that were long because of this rank."),
    Figure("late_ahead_seconds", PER_STEP, COMPUTED, "By how much its host got further ahead while it was late."),
    Figure(
        "tokens_per_step",
        TOKENS,
        FIELD,
        "Tokens that the rank works on in a step, as its program counts them: those of its experts.",
    ),
)
OF_CORRELATION: Final = (
    Figure("steps_total", STEPS, FIELD, "Steps since the process began."),
    Figure("last_step_unix_seconds", UNIX_SECONDS, COMPUTED, "When the last step ended."),
    Figure("is_captured", RATIO, COMPUTED, "1 where steps are known from captures only."),
    Figure("host_quick_seconds", PER_STEP, FIELD, "What the quickest steps took on the host."),
    Figure("host_gained_steps", STEPS, FIELD, "By how many steps the host got further ahead of the device, at most."),
)
# Shown to people; no rule reads them. Those of a GPU are there for ranks that use exactly one.
SHOWN: Final = (
    _cause("communication", MEAN, "Communication, hidden behind other work or not."),
    Figure("cpu_ratio", RATIO, COMPUTED, "CPU time of the process by time: 2 is two cores."),
    Figure("resident_bytes", BYTES, COMPUTED, "Memory of the process on the host."),
    Figure("memory_allocated_bytes", BYTES, COMPUTED, "Device memory that torch's allocator has handed out."),
    Figure("gpu_utilization_ratio", RATIO, COMPUTED, "Time with any kernel running on the rank's GPU."),
    Figure("gpu_tensor_active_ratio", RATIO, COMPUTED, "Time with any tensor pipe of the GPU active."),
    Figure("gpu_sm_clock_hertz", HERTZ, COMPUTED, "Clock of the GPU's multiprocessors."),
    Figure("gpu_power_watts", WATTS, COMPUTED, "Power draw of the GPU."),
    Figure("gpu_temperature_celsius", CELSIUS, COMPUTED, "Temperature of the GPU."),
    Figure(
        "gpu_throttled_ratio",
        RATIO,
        COMPUTED,
        "Time in which the GPU's clock is held back, by the most frequent reason.",
    ),
    Figure("gpu_memory_used_bytes", BYTES, COMPUTED, "Memory in use on the GPU, of all processes."),
)
FIGURES: Final = {figure.name: figure for figure in (*OF_RULES, *OF_CORRELATION, *SHOWN)}


def held(*forms: str) -> tuple[str, ...]:
    """Names of the figures that a window holds in one of these forms."""
    return tuple(name for name, figure in FIGURES.items() if figure.held in forms)


# Causes of step time by their label, and the figures that self time consists of.
CAUSES: Final = {name.removesuffix("_seconds"): name for name, figure in FIGURES.items() if figure.is_cause}
PARTS_OF_SELF: Final = tuple(figure.name for figure in OF_RULES if figure.is_cause and figure.held == MEAN)
