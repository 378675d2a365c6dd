"""Is run B slower than run A? Effect, interval and significance from step times, which are neither independent nor
normal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.comparing_blocks import (
    Estimate,
    Statistic,
    correlation_steps,
    estimate,
    mean,
    median,
    warmup_steps,
)
from rankscope.analysis.comparing_student import quantile, two_sided_p
from rankscope.analysis.robust import Floats

# Two to a block. So few only tell large differences, but do not raise false alarms.
STEPS_NEEDED = 8
# What lies outside is no step time, and its ratios could overflow.
SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e9
_LARGEST_LOG = 700.0


class CompareError(ValueError):
    """The step times cannot be compared; the text says why."""


@dataclass(frozen=True)
class Shift:
    """B against A: 0.03 is three percent slower. Interval and p are None where the data cannot tell."""

    difference_ratio: float
    ci_low: float | None
    ci_high: float | None
    p_value: float | None

    def significant(self, confidence: float) -> bool:
        return self.p_value is not None and self.p_value < 1 - confidence


@dataclass(frozen=True)
class Side:
    runs: int
    steps: int  # compared, after warm-up
    warmup_steps: int  # dropped, over all runs
    median_seconds: float  # of several runs: the geometric mean of their medians, so that no long run outvotes others
    mean_seconds: float
    p90_seconds: float
    correlation_steps: float  # so many steps tell as much as one independent step


@dataclass(frozen=True)
class Comparison:
    a: Side
    b: Side
    median: Shift
    mean: Shift
    cliffs_delta: float  # chance that a step of B is slower than one of A, less the chance that it is faster
    confidence: float
    method: str  # blocks, runs, or none
    reason: str  # why nothing can be said about significance; empty where it can

    @property
    def significant(self) -> bool:
        return self.median.significant(self.confidence)


def compare(
    a: Sequence[Floats], b: Sequence[Floats], *, confidence: float = 0.95, warmup: int | None = None
) -> Comparison:
    """Each side is one or more runs of step times in seconds. With several runs on a side the runs are compared, for
    processes differ where their steps do not. `warmup` first steps are dropped of each run; None: those that look like
    it."""
    kept_a, dropped_a = _settle(a, warmup, "A")
    kept_b, dropped_b = _settle(b, warmup, "B")
    # One correlation time for both sides: of two noisy estimates the larger is the safer.
    alike = [max((correlation_steps(run) for run in runs), default=1.0) for runs in (kept_a, kept_b)]
    shifts = [_shift(kept_a, kept_b, max(alike), statistic, confidence) for statistic in (median, mean)]
    several = len(kept_a) > 1 or len(kept_b) > 1
    reason = "" if several else _too_few(kept_a[0], kept_b[0])
    return Comparison(
        a=_side(kept_a, dropped_a, alike[0]),
        b=_side(kept_b, dropped_b, alike[1]),
        median=shifts[0],
        mean=shifts[1],
        cliffs_delta=_cliffs_delta(np.concatenate(kept_a), np.concatenate(kept_b)),
        confidence=confidence,
        method="none" if reason else "runs" if several else "blocks",
        reason=reason,
    )


def _settle(runs: Sequence[Floats], warmup: int | None, name: str) -> tuple[list[Floats], int]:
    kept, dropped = [], 0
    for run in runs:
        if len(run) == 0:
            raise CompareError(f"a run of {name} has no steps")
        if not ((run >= SHORTEST_SECONDS) & (run <= LONGEST_SECONDS)).all():
            raise CompareError(
                f"a run of {name} has steps that are no step times: shorter than a nanosecond, or endless"
            )
        first = warmup_steps(run) if warmup is None else warmup
        if first >= len(run):
            raise CompareError(f"a run of {name} has {len(run)} steps, and {first} of them would be dropped as warm-up")
        kept.append(np.asarray(run[first:], dtype=np.float64))
        dropped += first
    if not kept:
        raise CompareError(f"{name} has no runs")
    return kept, dropped


def _too_few(a: Floats, b: Floats) -> str:
    for name, run in (("A", a), ("B", b)):
        if len(run) < STEPS_NEEDED:
            steps = "1 step" if len(run) == 1 else f"{len(run)} steps"
            return f"{name} has {steps} after warm-up; {STEPS_NEEDED} are needed to tell a difference from noise"
    return ""


def _shift(
    a: Sequence[Floats], b: Sequence[Floats], correlation: float, statistic: Statistic, confidence: float
) -> Shift:
    logs_a, logs_b = _logs(a, statistic), _logs(b, statistic)
    difference = float(logs_b.mean() - logs_a.mean())
    if len(a) == len(b) == 1:
        if _too_few(a[0], b[0]):
            return Shift(math.expm1(difference), None, None, None)
        one, other = (estimate(run, correlation, statistic) for run in (a[0], b[0]))
        return _interval(difference, one, other, _welch(one, other), confidence)
    one, other = _of_runs(a, logs_a, correlation, statistic), _of_runs(b, logs_b, correlation, statistic)
    if len(a) == 1:
        return _interval(difference, _borrowed(one, other, logs_b), other, other.freedom, confidence)
    if len(b) == 1:
        return _interval(difference, one, _borrowed(other, one, logs_a), one.freedom, confidence)
    return _interval(difference, one, other, _welch(one, other), confidence)


def _logs(runs: Sequence[Floats], statistic: Statistic) -> Floats:
    return np.array([math.log(float(statistic(run))) for run in runs])


def _of_runs(runs: Sequence[Floats], logs: Floats, correlation: float, statistic: Statistic) -> Estimate:
    """By how runs differ, but never surer than their own steps are."""
    within = [estimate(run, correlation, statistic).variance for run in runs if len(run) >= STEPS_NEEDED]
    floor = sum(within) / len(runs) ** 2 if len(within) == len(runs) else 0.0
    between = float(np.var(logs, ddof=1)) / len(runs) if len(runs) > 1 else 0.0
    return Estimate(max(between, floor), len(runs) - 1, len(runs))


def _borrowed(single: Estimate, several: Estimate, logs: Floats) -> Estimate:
    """A lone run is taken to vary from process to process as the other side's runs do."""
    variance = max(float(np.var(logs, ddof=1)), several.variance * len(logs), single.variance)
    return Estimate(variance, several.freedom, 1)


def _welch(a: Estimate, b: Estimate) -> float:
    """Degrees of freedom of a difference whose sides vary differently."""
    largest = max(a.variance, b.variance)
    if largest == 0:
        return a.freedom + b.freedom
    shares = a.variance / largest, b.variance / largest
    return sum(shares) ** 2 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)


def _interval(difference: float, a: Estimate, b: Estimate, freedom: float, confidence: float) -> Shift:
    ratio = math.expm1(difference)
    error = math.sqrt(a.variance + b.variance)
    if error == 0:
        # Constant times: all that can be claimed is that chance did not deal the blocks out this way.
        p = 1.0 if difference == 0 else min(1.0, 2 / math.comb(a.blocks + b.blocks, a.blocks))
        return Shift(ratio, ratio, ratio, p)
    reach = quantile(confidence, freedom) * error
    low, high = math.expm1(difference - reach), math.expm1(min(difference + reach, _LARGEST_LOG))
    return Shift(ratio, low, high, two_sided_p(difference / error, freedom))


def _side(runs: Sequence[Floats], dropped: int, correlation: float) -> Side:
    steps = np.concatenate(runs)
    return Side(
        runs=len(runs),
        steps=len(steps),
        warmup_steps=dropped,
        median_seconds=math.exp(float(_logs(runs, median).mean())) if len(runs) > 1 else float(np.median(steps)),
        mean_seconds=math.exp(float(_logs(runs, mean).mean())) if len(runs) > 1 else float(steps.mean()),
        p90_seconds=float(np.quantile(steps, 0.9)),
        correlation_steps=correlation,
    )


def _cliffs_delta(a: Floats, b: Floats) -> float:
    # Both sorted, though one would do: ten million lookups in order are many times quicker.
    ordered, b = np.sort(a), np.sort(b)
    slower = np.searchsorted(ordered, b, "left").sum(dtype=np.float64)
    faster = (len(a) - np.searchsorted(ordered, b, "right")).sum(dtype=np.float64)
    return float((slower - faster) / len(a) / len(b))
