"""Finds ranks with own work that takes longer than that of ranks with the same role, consistently over steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Bools, Floats
from rankscope.analysis.timelines.replay import Model
from rankscope.analysis.verdicts.thresholds import Policy


@dataclass(frozen=True)
class Outliers:
    ratio: Floats  # [stage, data, tensor] own work ÷ median of the others of its stage; NaN without others
    score: Floats
    slow_steps_ratio: Floats  # share of steps in which it is slow
    outlier: Bools


def self_seconds(model: Model, durations: list[Floats] | None = None) -> Floats:
    """[step, stage, data, tensor]: each rank's own work, without waiting; as recorded, or with the durations
    `durations`."""
    made = []
    for part, seconds in zip(model.parts, durations or [part.net_seconds for part in model.parts], strict=True):
        own = np.zeros((model.layout.lanes.stages, *seconds.shape[1:]))
        np.add.at(own, part.stage[part.own_work], seconds[part.own_work])
        made.append(own.swapaxes(0, 1))
    return np.concatenate(made)


def find_outliers(own: Floats, policy: Policy) -> Outliers:
    """Compare whole workers first (the ranks of a tensor-parallel group run in lockstep), then single ranks."""
    steps, stages, replicas, tensors = own.shape
    worker = _compare(own.max(axis=3), policy)
    single = _compare(own.reshape(steps, stages, replicas * tensors), policy)
    if tensors == 1:
        return _shaped(single, own.shape[1:])
    single = _shaped(single, own.shape[1:])
    worker = _shaped(worker, (stages, replicas, 1))
    # Within an outlying worker, the ranks that are as slow as the worker.
    with np.errstate(invalid="ignore"):
        near = own.mean(axis=0) >= own.mean(axis=0).max(axis=2, keepdims=True) / policy.rank_ratio
    outlier = single.outlier | (worker.outlier & near)
    ratio = np.where(worker.outlier & near, worker.ratio, single.ratio)
    score = np.where(worker.outlier & near, worker.score, single.score)
    return Outliers(ratio, score, np.maximum(single.slow_steps_ratio, worker.slow_steps_ratio), outlier)


def _shaped(found: Outliers, shape: tuple[int, ...]) -> Outliers:
    return Outliers(
        found.ratio.reshape(shape),
        found.score.reshape(shape),
        found.slow_steps_ratio.reshape(shape),
        found.outlier.reshape(shape),
    )


def _compare(own: Floats, policy: Policy) -> Outliers:
    """`own` is [step, stage, rank]."""
    if own.shape[2] < 2:
        nothing = np.full(own.shape[1:], np.nan)
        return Outliers(nothing, nothing, np.zeros(own.shape[1:]), np.zeros(own.shape[1:], dtype=bool))
    relative = relative_to_step(own)
    means = relative.mean(axis=0)
    centre = np.median(means, axis=1, keepdims=True)
    spread = MAD_TO_SIGMA * np.median(np.abs(means - centre), axis=1, keepdims=True) if own.shape[2] > 2 else 0.0
    ratio, score = mean_excess(relative, policy.spread_floor_ratio, spread)
    slow = (own >= policy.rank_ratio * median_of_others(own)).mean(axis=0)
    outlier = (ratio >= policy.rank_ratio) & (score >= policy.rank_score)
    outlier &= stays_slow(relative, policy.rank_ratio, policy)
    return Outliers(ratio, score, slow, outlier)


def relative_to_step(own: Floats) -> Floats:
    """Own work relative to the step's usual, along the last axis: a step that is long for all ranks is no one's fault.

    The usual is the lower median: of two, the faster."""
    usual = np.sort(own, axis=-1)[..., (own.shape[-1] - 1) // 2, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative: Floats = np.where(usual > 0, own / usual, 1.0)
    return relative


def mean_excess(relative: Floats, floor: float, spread: Floats | float = 0.0) -> tuple[Floats, Floats]:
    """Mean over steps (first axis) relative to the median of the others' means: the ratio, and the difference in
    spreads.

    If all have occasional bad steps, means differ by chance; that counts as spread too."""
    steps = len(relative)
    means = relative.mean(axis=0)
    reference = median_of_others(means)
    # Relative to the mean of the others, not their median, which would ignore their bad steps.
    excess = relative - (relative.sum(axis=-1, keepdims=True) - relative) / (relative.shape[-1] - 1)
    chance = excess.std(axis=0, ddof=1) / np.sqrt(steps) if steps > 1 else np.zeros(means.shape)
    apart = (means - reference) / np.maximum(np.maximum(spread, chance), floor * reference)
    return means / reference, apart


def stays_slow(relative: Floats, ratio: float, policy: Policy) -> Bools:
    """Whether it is slower than the others by that ratio in three of five sections of the recording."""
    stretches = np.array_split(relative, min(policy.windows_kept, len(relative)))
    means = [stretch.mean(axis=0) for stretch in stretches]
    slow = np.stack([mean >= ratio * median_of_others(mean) for mean in means])
    keeps: Bools = slow.mean(axis=0) >= policy.windows_for_alarm / policy.windows_kept
    return keeps


def median_of_others(values: Floats) -> Floats:
    """For each entry along the last axis (at least two), the median of the others."""
    count = values.shape[-1]
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), order.shape), axis=-1)
    low, high = (count - 2) // 2, (count - 1) // 2  # positions among the others, in order
    below = np.take_along_axis(ordered, low + (place <= low), axis=-1)
    above = np.take_along_axis(ordered, high + (place <= high), axis=-1)
    middle: Floats = (below + above) / 2
    return middle
