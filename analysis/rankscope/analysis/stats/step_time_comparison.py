"""Compares the step times of two runs: effect, confidence interval and significance, for times that are neither
independent nor normal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Floats

# Blocks of a run count as independent if they are this many correlation times long.
BLOCK_CORRELATION_TIMES = 6
MIN_BLOCKS, MAX_BLOCKS = 4, 16
# In a run of fewer correlation times the blocks are correlated too, and the error is increased. The numbers are from
# simulation (AR(1) from 0 to 0.95, spikes, 20 to 1000 steps): at most 7 % false alarms at a level of 5 %.
RUN_CORRELATION_TIMES = 12
# Enough to measure the correlation; more would only take longer.
MAX_STEPS_EXAMINED = 1 << 17
Statistic = Callable[[Floats], Floats]  # over the last axis
# Two per block. So few show only large differences, but raise no false alarms.
STEPS_NEEDED = 8
# Values outside are not step times, and their ratios could overflow.
MIN_STEP_SECONDS, MAX_STEP_SECONDS = 1e-9, 1e9
_MAX_LOG = 700.0
# What a summary keeps of a run: 300 KB of JSON.
MAX_KEPT_STEPS = 1 << 15


class StepTimes:
    """The step times of a run in bounded memory, oldest first.

    A run longer than `max_steps` keeps one random step of every `stride` consecutive steps. The kept steps have the
    distribution of all steps and a correlation of their own, which `compare` measures. A fixed step of each group would
    see a checkpoint in every hundredth step always or never."""

    def __init__(self, max_steps: int = MAX_KEPT_STEPS) -> None:
        self._max_steps = max_steps
        self.clear()

    def clear(self) -> None:
        self.stride = 1
        self.seconds: Floats = np.zeros(0)
        self._group: Floats = np.zeros(0)  # the newest steps, fewer than `stride`
        self._random = np.random.default_rng(0)

    def add(self, seconds: Floats) -> None:
        """NaN: the step was not measured."""
        steps = np.concatenate((self._group, seconds[~np.isnan(seconds)]))
        whole = len(steps) // self.stride * self.stride
        self._group = steps[whole:]
        self.seconds = np.concatenate((self.seconds, self._one_of_each(steps[:whole], self.stride)))
        while len(self.seconds) > self._max_steps:
            self.seconds = self._one_of_each(self.seconds[: len(self.seconds) // 2 * 2], 2)
            self.stride *= 2

    def _one_of_each(self, steps: Floats, size: int) -> Floats:
        groups = steps.reshape(-1, size)
        return groups[np.arange(len(groups)), self._random.integers(size, size=len(groups))]

    @property
    def median_seconds(self) -> float | None:
        return float(np.median(self.seconds)) if len(self.seconds) else None

    def rounded(self) -> list[float]:
        """To a millionth, for files."""
        return [float(f"{seconds:.6g}") for seconds in self.seconds]


class CompareError(ValueError):
    """The step times cannot be compared; the message gives the reason."""


@dataclass(frozen=True)
class Shift:
    """B relative to A: 0.03 is three per cent slower. Interval and p are None if the data is insufficient."""

    difference_ratio: float
    ci_low: float | None
    ci_high: float | None
    p_value: float | None

    def significant(self, confidence: float) -> bool:
        return self.p_value is not None and self.p_value < 1 - confidence


@dataclass(frozen=True)
class Side:
    runs: int
    steps: int  # after warm-up
    warmup_steps: int  # dropped, over all runs
    median_seconds: float  # of several runs: the geometric mean of their medians, so that a long run does not dominate
    mean_seconds: float
    p90_seconds: float
    correlation_steps: float  # this many steps carry as much information as one independent step


@dataclass(frozen=True)
class Comparison:
    a: Side
    b: Side
    median: Shift
    mean: Shift
    cliffs_delta: float  # probability that a step of B is slower than one of A, minus the probability that it is faster
    confidence: float
    method: str  # blocks, runs, or none
    reason: str  # why significance is unknown; empty if it is known

    @property
    def significant(self) -> bool:
        return self.median.significant(self.confidence)


def compare(
    a: Sequence[Floats], b: Sequence[Floats], *, confidence: float = 0.95, warmup: int | None = None
) -> Comparison:
    """Each side is one or more runs of step times in seconds. With several runs on a side, the runs are compared,
    because processes differ even where their steps do not. The first `warmup` steps of each run are dropped; None:
    detected."""
    kept_a, dropped_a = _drop_warmup(a, warmup, "A")
    kept_b, dropped_b = _drop_warmup(b, warmup, "B")
    # One correlation time for both sides: of two noisy estimates, the larger is safer.
    correlations = [max((correlation_steps(run) for run in runs), default=1.0) for runs in (kept_a, kept_b)]
    shifts = [_shift(kept_a, kept_b, max(correlations), statistic, confidence) for statistic in (median, mean)]
    several = len(kept_a) > 1 or len(kept_b) > 1
    reason = "" if several else _too_few(kept_a[0], kept_b[0])
    return Comparison(
        a=_side(kept_a, dropped_a, correlations[0]),
        b=_side(kept_b, dropped_b, correlations[1]),
        median=shifts[0],
        mean=shifts[1],
        cliffs_delta=_cliffs_delta(np.concatenate(kept_a), np.concatenate(kept_b)),
        confidence=confidence,
        method="none" if reason else "runs" if several else "blocks",
        reason=reason,
    )


def _drop_warmup(runs: Sequence[Floats], warmup: int | None, name: str) -> tuple[list[Floats], int]:
    kept, dropped = [], 0
    for run in runs:
        if len(run) == 0:
            raise CompareError(f"a run of {name} has no steps")
        if not ((run >= MIN_STEP_SECONDS) & (run <= MAX_STEP_SECONDS)).all():
            raise CompareError(
                f"a run of {name} has invalid step times: shorter than a nanosecond or longer than 30 years"
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
            return f"{name} has {steps} after warm-up; {STEPS_NEEDED} are needed to distinguish a difference from noise"
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
    one, other = _estimate_runs(a, logs_a, correlation, statistic), _estimate_runs(b, logs_b, correlation, statistic)
    if len(a) == 1:
        return _interval(difference, _single_run(one, other, logs_b), other, other.freedom, confidence)
    if len(b) == 1:
        return _interval(difference, one, _single_run(other, one, logs_a), one.freedom, confidence)
    return _interval(difference, one, other, _welch(one, other), confidence)


def _logs(runs: Sequence[Floats], statistic: Statistic) -> Floats:
    return np.array([math.log(float(statistic(run))) for run in runs])


def _estimate_runs(runs: Sequence[Floats], logs: Floats, correlation: float, statistic: Statistic) -> Estimate:
    """From the variation between runs, but at least the uncertainty within them."""
    within = [estimate(run, correlation, statistic).variance for run in runs if len(run) >= STEPS_NEEDED]
    floor = sum(within) / len(runs) ** 2 if len(within) == len(runs) else 0.0
    between = float(np.var(logs, ddof=1)) / len(runs) if len(runs) > 1 else 0.0
    return Estimate(max(between, floor), len(runs) - 1, len(runs))


def _single_run(single: Estimate, several: Estimate, logs: Floats) -> Estimate:
    """A single run is assumed to vary between processes as the other side's runs do."""
    variance = max(float(np.var(logs, ddof=1)), several.variance * len(logs), single.variance)
    return Estimate(variance, several.freedom, 1)


def _welch(a: Estimate, b: Estimate) -> float:
    """Degrees of freedom of a difference of sides with different variances."""
    largest = max(a.variance, b.variance)
    if largest == 0:
        return a.freedom + b.freedom
    shares = a.variance / largest, b.variance / largest
    return sum(shares) ** 2 / (shares[0] ** 2 / a.freedom + shares[1] ** 2 / b.freedom)


def _interval(difference: float, a: Estimate, b: Estimate, freedom: float, confidence: float) -> Shift:
    ratio = math.expm1(difference)
    error = math.sqrt(a.variance + b.variance)
    if error == 0:
        # Constant times: only that the blocks did not fall this way by chance.
        p = 1.0 if difference == 0 else min(1.0, 2 / math.comb(a.blocks + b.blocks, a.blocks))
        return Shift(ratio, ratio, ratio, p)
    reach = quantile(confidence, freedom) * error
    low, high = math.expm1(difference - reach), math.expm1(min(difference + reach, _MAX_LOG))
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
    # Both sorted, although one would do: ten million lookups in order are many times faster.
    ordered, b = np.sort(a), np.sort(b)
    slower = np.searchsorted(ordered, b, "left").sum(dtype=np.float64)
    faster = (len(a) - np.searchsorted(ordered, b, "right")).sum(dtype=np.float64)
    return float((slower - faster) / len(a) / len(b))


def median(values: Floats) -> Floats:
    return np.asarray(np.median(values, axis=-1))


def mean(values: Floats) -> Floats:
    return np.asarray(np.mean(values, axis=-1))


@dataclass(frozen=True)
class Estimate:
    """The uncertainty of the logarithm of a statistic; differences of logarithms are ratios."""

    variance: float
    freedom: float
    blocks: int


def estimate(seconds: Floats, correlation_steps: float, statistic: Statistic) -> Estimate:
    """From consecutive blocks: the variation between blocks shows how well the whole run determines the statistic."""
    count = len(seconds)
    longest = math.ceil(BLOCK_CORRELATION_TIMES * correlation_steps)
    blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, count // longest))
    size = count // blocks
    of_blocks = np.log(statistic(seconds[count - blocks * size :].reshape(blocks, size)))
    variance = float(np.var(of_blocks, ddof=1)) / blocks
    variance *= max(1.0, RUN_CORRELATION_TIMES * correlation_steps / count) ** 2
    middle = float(statistic(seconds))
    # If times form two groups, the median of all may lie in the gap between them, unlike those of the blocks.
    variance += (math.log(middle) - float(of_blocks.mean())) ** 2
    # The median of rounded times may be off by half the resolution.
    variance += (resolution(seconds) / middle / 2) ** 2
    return Estimate(variance, blocks - 1, blocks)


def correlation_steps(seconds: Floats) -> float:
    """The number of steps that carry as much information as one independent step (integrated autocorrelation time).
    From ranks, so that a few slow steps do not mask the correlation of the others."""
    begin = max(0, (len(seconds) - MAX_STEPS_EXAMINED) // 2)
    seconds = seconds[begin : begin + MAX_STEPS_EXAMINED]
    count = len(seconds)
    # Equal values get the same rank.
    ranks = np.unique(seconds, return_inverse=True)[1].reshape(-1).astype(np.float64)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    if power == 0 or count < 4:
        return 1.0
    spectrum = np.fft.rfft(ranks, 2 * count)
    correlations = np.fft.irfft(spectrum * spectrum.conj())[:count] / power
    # Both are biased by about -1/n in a short run.
    neighbour = min(float(correlations[1]) + (1 + 3 * float(correlations[1])) / count, 0.99)
    geometric = (1 + neighbour) / (1 - neighbour)
    sums = 1 + 2 * np.cumsum(correlations[1 : count // 2] + 1 / count)
    enough = np.flatnonzero(np.arange(1, len(sums) + 1) >= 5 * sums)
    summed = float(sums[enough[0]] if len(enough) else sums[-1]) if len(sums) else 1.0
    return max(1.0, geometric, summed)


def resolution(seconds: Floats) -> float:
    """The resolution of a coarse clock; 0 if times do not appear rounded."""
    values = np.unique(seconds[:MAX_STEPS_EXAMINED])
    if len(values) < 2 or len(values) > len(seconds[:MAX_STEPS_EXAMINED]) / 4:
        return 0.0
    return float(np.diff(values).min())


def warmup_steps(seconds: Floats) -> int:
    """The number of first steps that differ from the rest (compilation, caches, first allocations): consecutive slow
    steps, at most a quarter of the run."""
    most = len(seconds) // 4
    settled = seconds[most:]
    if most == 0:
        return 0
    middle = float(np.median(settled))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(settled - middle)))
    slow = seconds[:most] > max(middle + 6 * spread, 1.1 * middle)
    return most if slow.all() else int(np.argmin(slow))


def two_sided_p(t: float, freedom: float) -> float:
    """The probability of a value of Student's t at least as far from zero."""
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) if math.isfinite(t) else 0.0


def quantile(confidence: float, freedom: float) -> float:
    """The t that encloses this share of Student's distribution on both sides of zero."""
    low, high = 0.0, 1.0
    while two_sided_p(high, freedom) > 1 - confidence and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if two_sided_p(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges quickly only below the mean.
    if x < (a + 1) / (a + b + 2):
        return scale * _fraction(a, b, x) / a
    return 1 - scale * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, evaluated from the front (Lentz)."""
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            lower = 1 / (1 + term * lower)
            upper = 1 + term / upper
            value *= lower * upper
        if abs(lower * upper - 1) < 1e-15:
            break
    return value
