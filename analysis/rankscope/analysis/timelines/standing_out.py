"""Ranks whose own work takes longer than that of the ranks with the same role, step after step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import MAD_TO_SIGMA, Bools, Floats
from rankscope.analysis.timelines.modelling import Model


@dataclass(frozen=True)
class StandingOut:
    ratio: Floats  # [stage, data, tensor] own work against the median of the others of its stage; NaN: there are none
    score: Floats
    slow_steps_ratio: Floats  # share of the steps in which it is slow
    outlier: Bools


def own_seconds(model: Model, taken: list[Floats] | None = None) -> Floats:
    """[step, stage, data, tensor]: what each rank worked itself, waiting for nobody; as recorded, or as `taken`."""
    made = []
    for part, seconds in zip(model.parts, taken or [part.taken_seconds for part in model.parts], strict=True):
        own = np.zeros((model.layout.lanes.stages, *seconds.shape[1:]))
        np.add.at(own, part.stage[part.own_work], seconds[part.own_work])
        made.append(own.swapaxes(0, 1))
    return np.concatenate(made)


def stand_out(own: Floats, policy: Policy) -> StandingOut:
    """Compares whole workers first (a tensor-parallel group walks in step), then single ranks of it."""
    steps, stages, replicas, tensors = own.shape
    worker = _compare(own.max(axis=3), policy)
    single = _compare(own.reshape(steps, stages, replicas * tensors), policy)
    if tensors == 1:
        return _shaped(single, own.shape[1:])
    single = _shaped(single, own.shape[1:])
    worker = _shaped(worker, (stages, replicas, 1))
    # Within a worker that stands out, those that are as slow as it is.
    with np.errstate(invalid="ignore"):
        near = own.mean(axis=0) >= own.mean(axis=0).max(axis=2, keepdims=True) / policy.rank_ratio
    outlier = single.outlier | (worker.outlier & near)
    ratio = np.where(worker.outlier & near, worker.ratio, single.ratio)
    score = np.where(worker.outlier & near, worker.score, single.score)
    return StandingOut(ratio, score, np.maximum(single.slow_steps_ratio, worker.slow_steps_ratio), outlier)


def _shaped(found: StandingOut, shape: tuple[int, ...]) -> StandingOut:
    return StandingOut(
        found.ratio.reshape(shape),
        found.score.reshape(shape),
        found.slow_steps_ratio.reshape(shape),
        found.outlier.reshape(shape),
    )


def _compare(own: Floats, policy: Policy) -> StandingOut:
    """`own` is [step, stage, rank]."""
    steps, _, ranks = own.shape
    if ranks < 2:
        nothing = np.full(own.shape[1:], np.nan)
        return StandingOut(nothing, nothing, np.zeros(own.shape[1:]), np.zeros(own.shape[1:], dtype=bool))
    others = median_of_others(own)
    excess = own - others
    mean, reference = excess.mean(axis=0), others.mean(axis=0)
    # Chance makes ranks of uneven data differ in the mean, too: that is how much it may.
    chance = excess.std(axis=0, ddof=1) / np.sqrt(steps) if steps > 1 else np.abs(mean)
    means = own.mean(axis=0)
    centre = np.median(means, axis=1, keepdims=True)
    spread = MAD_TO_SIGMA * np.median(np.abs(means - centre), axis=1, keepdims=True) if ranks > 2 else 0.0
    spread = np.maximum(np.maximum(spread, chance), policy.spread_floor_ratio * reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(reference > 0, 1 + mean / reference, np.nan)
        score = np.where(spread > 0, mean / spread, 0.0)
    slow = (own >= policy.rank_ratio * others).mean(axis=0)
    outlier = (ratio >= policy.rank_ratio) & (score >= policy.rank_score)
    outlier &= keeps_slow(own, others, policy.rank_ratio, policy)
    return StandingOut(ratio, score, slow, outlier)


def keeps_slow(own: Floats, others: Floats, ratio: float, policy: Policy) -> Bools:
    """Whether `own` [step, …] is slower than `others` by that ratio in three of five stretches of the recording."""
    stretches = [
        piece for piece in np.array_split(np.arange(len(own)), min(policy.windows_kept, len(own))) if len(piece)
    ]
    slow = np.stack([own[piece].mean(axis=0) >= ratio * others[piece].mean(axis=0) for piece in stretches])
    keeps: Bools = slow.mean(axis=0) >= policy.windows_for_alarm / policy.windows_kept
    return keeps


def median_of_others(values: Floats) -> Floats:
    """For each entry along the last axis (at least two), the median of the other ones."""
    count = values.shape[-1]
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(count), order.shape), axis=-1)
    low, high = (count - 2) // 2, (count - 1) // 2  # of the others, in order
    below = np.take_along_axis(ordered, low + (place <= low), axis=-1)
    above = np.take_along_axis(ordered, high + (place <= high), axis=-1)
    middle: Floats = (below + above) / 2
    return middle
