"""Medians with their spread, and the ratio of two conditions that took turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """The ratio of two medians and its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    low, median, high = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75))
    return Spread(float(median), float(low), float(high))


def median_of_ratios(on: Sequence[float], off: Sequence[float], seed: int = 0) -> Ratio:
    """The median of on / off of blocks next to each other, and its 95 % bootstrap interval. What wanders more slowly
    than blocks change is not in it."""
    ratios = np.asarray(on, dtype=np.float64) / np.asarray(off, dtype=np.float64)
    if len(ratios) == 0:
        raise ValueError("at least one pair of blocks is needed")
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[drawn], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def paired_ratio(
    on: Sequence[float], off: Sequence[float], seed: int = 0, average: Callable[..., Any] = np.median
) -> Ratio:
    """median(on) / median(off) of blocks that took turns: block i of one came next to block i of the other. With the
    mean as `average`, what happens in few blocks counts too.

    Pairs are drawn together, so that a slow drift of the machine, which hits both of a pair, does not widen the
    interval more than it must."""
    ons, offs = np.asarray(on, dtype=np.float64), np.asarray(off, dtype=np.float64)
    if len(ons) != len(offs) or len(ons) == 0:
        raise ValueError(f"{len(ons)} blocks on, {len(offs)} off; as many of each are needed, and at least one")
    drawn = np.random.default_rng(seed).integers(0, len(ons), (RESAMPLES, len(ons)))
    ratios = average(ons[drawn], axis=1) / average(offs[drawn], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Ratio(float(average(ons) / average(offs)), float(low), float(high))
