"""Counters over a rank's life, summed from its windows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.daemon.samples import Problem
from rankscope.daemon.windows.window import measured, step_means
from rankscope.v1.window_pb2 import RankWindow

CAUSES = ("self", "wait", "communication", "input", "forward", "backward", "optimizer", "checkpoint", "other")
PROCESS_COUNTERS = (
    "cpu_seconds",
    "run_delay_seconds",
    "throttled_seconds",
    "stopped_seconds",
    "involuntary_switches",
    "voluntary_switches",
)


@dataclass(frozen=True)
class RankTotals:
    """Since the daemon first saw this incarnation. A missing name was never measured."""

    cause_seconds: Mapping[str, float] = field(default_factory=dict)
    process: Mapping[str, float] = field(default_factory=dict)
    steps_lost: int | None = None
    stack_samples: int | None = None
    stack_errors: int | None = None


@dataclass(frozen=True)
class RankReport:
    """One rank as the exporter shows it."""

    window: RankWindow
    totals: RankTotals
    problems: tuple[Problem, ...] = ()


def add_window(totals: RankTotals, window: RankWindow) -> RankTotals:
    has_stacks = window.HasField("stacks")
    return RankTotals(
        cause_seconds=_added(totals.cause_seconds, _cause_seconds(window)),
        process=_added(totals.process, measured(window.process, PROCESS_COUNTERS)),
        steps_lost=_sum(totals.steps_lost, window.steps_lost if window.HasField("steps_lost") else None),
        stack_samples=_sum(totals.stack_samples, window.stacks.samples if has_stacks else None),
        stack_errors=_sum(totals.stack_errors, window.stacks.errors if has_stacks else None),
    )


def _cause_seconds(window: RankWindow) -> Mapping[str, float]:
    """Of all steps of the window: the window holds means per step."""
    means = step_means(window)
    names = {cause: f"{cause}_seconds" for cause in CAUSES}
    return {cause: means[name] * window.steps for cause, name in names.items() if name in means}


def _added(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {**before, **{name: before.get(name, 0.0) + value for name, value in more.items()}}


def _sum(before: int | None, value: int | None) -> int | None:
    return before if value is None else (before or 0) + value
