"""How far the median or mean of a run of step times can be trusted, though neighbouring steps are alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import MAD_TO_SIGMA, Floats

# Blocks of a run are taken for independent when they are this many correlation times long.
BLOCK_CORRELATION_TIMES = 6
FEWEST_BLOCKS, MOST_BLOCKS = 4, 16
# Of a run shorter than this many correlation times the blocks are alike too, and the error is raised to match.
# The numbers are from simulation (AR(1) from 0 to 0.95, spikes, 20 to 1000 steps): at most 7 false alarms at 5 %.
RUN_CORRELATION_TIMES = 12
# Enough to see how long steps stay alike; more would cost only time.
MOST_STEPS_LOOKED_AT = 1 << 17

Statistic = Callable[[Floats], Floats]  # over the last axis


def median(values: Floats) -> Floats:
    return np.asarray(np.median(values, axis=-1))


def mean(values: Floats) -> Floats:
    return np.asarray(np.mean(values, axis=-1))


@dataclass(frozen=True)
class Estimate:
    """How sure the logarithm of a statistic is; differences of logarithms are ratios."""

    variance: float
    freedom: float
    blocks: int


def estimate(seconds: Floats, correlation_steps: float, statistic: Statistic) -> Estimate:
    """By consecutive blocks: how the statistic varies from block to block says how well the whole run pins it down."""
    count = len(seconds)
    longest = math.ceil(BLOCK_CORRELATION_TIMES * correlation_steps)
    blocks = min(MOST_BLOCKS, max(FEWEST_BLOCKS, count // longest))
    size = count // blocks
    of_blocks = np.log(statistic(seconds[count - blocks * size :].reshape(blocks, size)))
    variance = float(np.var(of_blocks, ddof=1)) / blocks
    variance *= max(1.0, RUN_CORRELATION_TIMES * correlation_steps / count) ** 2
    middle = float(statistic(seconds))
    # Where times fall into two groups the median of all may stand in the gap, and what blocks say is not of it.
    variance += (math.log(middle) - float(of_blocks.mean())) ** 2
    # The median of rounded times may be half a grain off.
    variance += (resolution(seconds) / middle / 2) ** 2
    return Estimate(variance, blocks - 1, blocks)


def correlation_steps(seconds: Floats) -> float:
    """Over how many steps one step is worth as much as one independent step (integrated autocorrelation time), from
    ranks, so that a few slow steps do not hide that the others go up and down together."""
    begin = max(0, (len(seconds) - MOST_STEPS_LOOKED_AT) // 2)
    seconds = seconds[begin : begin + MOST_STEPS_LOOKED_AT]
    count = len(seconds)
    # Equal values get the same rank.
    ranks = np.unique(seconds, return_inverse=True)[1].reshape(-1).astype(np.float64)
    ranks -= ranks.mean()
    power = float(ranks @ ranks)
    if power == 0 or count < 4:
        return 1.0
    spectrum = np.fft.rfft(ranks, 2 * count)
    alike = np.fft.irfft(spectrum * spectrum.conj())[:count] / power
    # Both are too small by about 1/n in a short run.
    neighbour = min(float(alike[1]) + (1 + 3 * float(alike[1])) / count, 0.99)
    geometric = (1 + neighbour) / (1 - neighbour)
    sums = 1 + 2 * np.cumsum(alike[1 : count // 2] + 1 / count)
    enough = np.flatnonzero(np.arange(1, len(sums) + 1) >= 5 * sums)
    summed = float(sums[enough[0]] if len(enough) else sums[-1]) if len(sums) else 1.0
    return max(1.0, geometric, summed)


def resolution(seconds: Floats) -> float:
    """The grain of a coarse clock: 0 where times are not seen to be rounded."""
    values = np.unique(seconds[:MOST_STEPS_LOOKED_AT])
    if len(values) < 2 or len(values) > len(seconds[:MOST_STEPS_LOOKED_AT]) / 4:
        return 0.0
    return float(np.diff(values).min())


def warmup_steps(seconds: Floats) -> int:
    """How many first steps are unlike the rest (compilation, caches, first allocations): an unbroken row of slow ones,
    at most a quarter of the run."""
    most = len(seconds) // 4
    settled = seconds[most:]
    if most == 0:
        return 0
    middle = float(np.median(settled))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(settled - middle)))
    slow = seconds[:most] > max(middle + 6 * spread, 1.1 * middle)
    return most if slow.all() else int(np.argmin(slow))
