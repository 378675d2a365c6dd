"""The figures of a rank in one window, a row each: unit, text, and the metric that shows it, if it is a plain one.

A row is the field of the columns that hold the figure. From the rows follow the daemon's samples, the figures of its
windows and their table (window_columns.py), the columns of the rules (windows.py), the bounds, the causes of step time,
gauges of ranks, and signals of the console."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Final, NamedTuple, TypeVar, get_type_hints

from rankscope.analysis.stats.robust import Bools, Floats, Ints

PER_STEP, SECONDS, RATIO, BYTES, HERTZ = "seconds/step", "seconds", "ratio", "bytes", "hertz"
WATTS, CELSIUS, STEPS, TOKENS, UNIX_SECONDS = "watts", "celsius", "steps", "tokens", "unix seconds"

# What a container or a daemon claims beyond these is no measurement, and would become infinite in a ratio or a sum. No
# step lasts longer than a day.
MAX_STEP_SECONDS: Final = 86_400.0
MAX_COUNT: Final = 2.0**53
_COUNTS = {BYTES, HERTZ, STEPS, TOKENS, UNIX_SECONDS}

CAUSE: Final = "rankscope_rank_cause_seconds_total"  # of the parts of a step, by the label `cause`
FULL: Final = False  # exported with `metrics_detail = full` only


class Figure(NamedTuple):
    unit: str
    definition: str
    metric: str = ""  # CAUSE, or the name of a gauge
    is_standard: bool = True

    @property
    def maximum(self) -> float:
        return MAX_COUNT if self.unit in _COUNTS else MAX_STEP_SECONDS

    @property
    def is_cause(self) -> bool:
        return self.metric == CAUSE


_Columns = TypeVar("_Columns", bound="StepFigures")


@dataclass(frozen=True)
class StepFigures:
    """Measured in each step, and read by rules. A window has the means over the steps in which they were measured."""

    step_seconds: Annotated[Floats, PER_STEP, "Step time. In synchronous training it is the same on every rank."]
    self_seconds: Annotated[Floats, PER_STEP, "Step time less waiting on others. Compare ranks by this one.", CAUSE]
    wait_seconds: Annotated[
        Floats, PER_STEP, "Communication that nothing hides: time in which the rank waits for others.", CAUSE
    ]
    input_seconds: Annotated[Floats, PER_STEP, "Waiting for the data loader.", CAUSE]
    forward_seconds: Annotated[Floats, PER_STEP, "Forward pass.", CAUSE]
    backward_seconds: Annotated[Floats, PER_STEP, "Backward pass, without waiting on others.", CAUSE]
    optimizer_seconds: Annotated[Floats, PER_STEP, "Optimizer step.", CAUSE]
    checkpoint_seconds: Annotated[Floats, PER_STEP, "Writing checkpoints.", CAUSE]
    host_seconds: Annotated[
        Floats,
        PER_STEP,
        "What a step takes on the host, where step time is the device's. It says nothing about the step by itself.",
        "rankscope_rank_host_seconds",
        FULL,
    ]
    run_ahead_seconds: Annotated[
        Floats,
        SECONDS,
        "The furthest the host is ahead of the device within a step. Near zero, the device waits for its host.",
        "rankscope_rank_run_ahead_seconds",
    ]

    def take(self: _Columns, rows: Ints | Bools | slice) -> _Columns:
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class StepColumns(StepFigures):
    """All that is measured in each step: a value per step, oldest first. NaN where that step was not measured (DDP
    figures are sampled)."""

    communication_seconds: Annotated[Floats, PER_STEP, "Communication, hidden behind other work or not.", CAUSE]


@dataclass(frozen=True)
class RuleFigures(StepFigures):
    """What rules read: a value per rank. Of usual steps are self time, waiting, transfer and checkpoints: what the few
    long steps took beyond them is in `long_seconds`."""

    steps: Annotated[Floats, STEPS, "Steps that ended in the window."]
    transfer_seconds: Annotated[Floats, PER_STEP, "A low quantile of waiting: what even the rank that is last needs."]
    self_steps: Annotated[Floats, STEPS, "Steps that self time is the mean of. Absent: all."]
    self_spread_ratio: Annotated[Floats, RATIO, "The rank's own slow steps (p90) against its own fast ones (p10)."]
    other_seconds: Annotated[Floats, PER_STEP, "The rest of self time.", CAUSE]
    starved_seconds: Annotated[
        Floats, PER_STEP, "Runnable or stopped, but not running: run queue, CPU quota, stop signal."
    ]
    mfu_ratio: Annotated[
        Floats,
        RATIO,
        "Model FLOPs utilisation. Absent unless the FLOPs and the peak are known.",
        "rankscope_rank_mfu_ratio",
    ]
    long_seconds: Annotated[Floats, PER_STEP, "In steps of at least twice the usual length, beyond the usual."]
    late_seconds: Annotated[Floats, PER_STEP, "Of that, by this rank: neither waiting for others nor a checkpoint."]
    long_ratio: Annotated[Floats, RATIO, "Share of the steps that were long."]
    late_ratio: Annotated[Floats, RATIO, "Share of the steps that were long because of this rank."]
    late_ahead_seconds: Annotated[Floats, PER_STEP, "By how much its host got further ahead while it was late."]
    tokens_per_step: Annotated[
        Floats,
        TOKENS,
        "Tokens that the rank works on in a step, as its program counts them: those of its experts.",
        "rankscope_rank_tokens_per_step",
        FULL,
    ]


@dataclass(frozen=True)
class WindowFigures(StepColumns, RuleFigures):
    """What a daemon sends: a value per rank. Those of a GPU are there for ranks that use exactly one."""

    # Read by the correlation.
    steps_total: Annotated[Floats, STEPS, "Steps since the process began."]
    last_step_unix_seconds: Annotated[Floats, UNIX_SECONDS, "When the last step ended."]
    is_captured: Annotated[Floats, RATIO, "1 where steps are known from captures only."]
    host_quick_seconds: Annotated[Floats, PER_STEP, "What the quickest steps took on the host."]
    host_gained_steps: Annotated[Floats, STEPS, "By how many steps the host got further ahead of the device, at most."]
    # Shown to people; no rule reads them.
    cpu_ratio: Annotated[Floats, RATIO, "CPU time of the process by time: 2 is two cores."]
    resident_bytes: Annotated[Floats, BYTES, "Memory of the process on the host."]
    memory_allocated_bytes: Annotated[Floats, BYTES, "Device memory that torch's allocator has handed out."]
    gpu_utilization_ratio: Annotated[Floats, RATIO, "Time with any kernel running on the rank's GPU."]
    gpu_tensor_active_ratio: Annotated[Floats, RATIO, "Time with any tensor pipe of the GPU active."]
    gpu_sm_clock_hertz: Annotated[Floats, HERTZ, "Clock of the GPU's multiprocessors."]
    gpu_power_watts: Annotated[Floats, WATTS, "Power draw of the GPU."]
    gpu_temperature_celsius: Annotated[Floats, CELSIUS, "Temperature of the GPU."]
    gpu_throttled_ratio: Annotated[
        Floats, RATIO, "Time in which the GPU's clock is held back, by the most frequent reason."
    ]
    gpu_memory_used_bytes: Annotated[Floats, BYTES, "Memory in use on the GPU, of all processes."]


def _figures_of(columns: type[StepFigures]) -> dict[str, Figure]:
    hints = get_type_hints(columns, include_extras=True)
    return {field.name: Figure(*hints[field.name].__metadata__) for field in fields(columns)}


FIGURES: Final = _figures_of(WindowFigures)
OF_RULES: Final = tuple(_figures_of(RuleFigures))
OF_STEPS: Final = tuple(_figures_of(StepColumns))
# Causes of step time by their label, and the figures that self time consists of.
CAUSES: Final = {name.removesuffix("_seconds"): name for name, figure in FIGURES.items() if figure.is_cause}
PARTS_OF_SELF: Final = tuple(
    name
    for name, figure in _figures_of(StepFigures).items()
    if figure.is_cause and name not in ("self_seconds", "wait_seconds")
)
