"""Finds ranks whose self time is longer than that of ranks with the same role, consistently over steps, and
replays what the job would gain if slow ranks, a slow stage, imbalance or slow transfers were fixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Bools, Floats
from rankscope.analysis.timelines.replay import Model, replay_durations
from rankscope.analysis.verdicts.thresholds import Policy

# The slowest rank of a step relative to the usual one. Of many noisy ranks, one is always slow by a few per cent.
IMBALANCE_RATIO = 1.15
# Share of steps; one bad step in twenty is not a pattern.
PATTERN_STEPS_RATIO = 0.25
ONE_PLACE_SHARE = 0.8


@dataclass(frozen=True)
class Outliers:
    ratio: Floats  # [stage, data, tensor] self time ÷ median of the others of its stage; NaN without others
    score: Floats
    slow_steps_ratio: Floats  # share of steps in which it is slow
    outlier: Bools


def self_seconds(model: Model, durations: list[Floats] | None = None) -> Floats:
    """[step, stage, data, tensor]: each rank's self time, without waiting; as recorded, or with the durations
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
    """Self time relative to the step's usual, along the last axis: a step that is long for all ranks is no one's fault.

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


@dataclass(frozen=True)
class SlowStage:
    stage: int
    self_seconds: float
    others_seconds: float
    impact_ratio: float

    @property
    def ratio(self) -> float:
        return self.self_seconds / self.others_seconds


@dataclass(frozen=True)
class Imbalance:
    spread_ratio: float  # slowest rank of a step relative to the usual one
    slowest_often_ratio: float  # share of steps in which the most frequent slowest rank is slowest
    impact_ratio: float


@dataclass(frozen=True)
class SlowTransfer:
    family: str
    stage: int | None  # the stage that is slow, if only one
    ratio: float
    impact_ratio: float


def like_peers(model: Model, culprits: Bools) -> list[Floats]:
    """Durations with the self time of the culprits [stage, data, tensor] replaced by the median of their cohort."""
    made = []
    for part in model.parts:
        durations = part.net_seconds.copy()
        for stage in np.flatnonzero(culprits.any(axis=(1, 2))):
            healthy = ~culprits[stage]
            for node in np.flatnonzero((part.stage == stage) & part.own_work):
                rest = np.median(durations[node][:, healthy], axis=1, keepdims=True)
                durations[node][:, culprits[stage]] = rest
        made.append(durations)
    return made


def peers_of_each(model: Model) -> list[Floats]:
    """Durations with each rank's self time replaced by the median of the others of its stage."""
    made = []
    for part in model.parts:
        durations = part.net_seconds.copy()
        lanes = durations.shape[2] * durations.shape[3]
        if lanes > 1:
            own = durations[part.own_work]
            durations[part.own_work] = median_of_others(own.reshape(*own.shape[:2], lanes)).reshape(own.shape)
        made.append(durations)
    return made


def stages_like_others(model: Model, durations: list[Floats], level: Floats) -> list[Floats]:
    """Durations with each stage's self time scaled to the median of the other stages; `level` is per stage."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = median_of_others(level) / level
    factor = np.where(np.isfinite(factor), factor, 1.0)
    return [
        seconds * np.where(part.own_work, factor[part.stage], 1.0)[:, None, None, None]
        for part, seconds in zip(model.parts, durations, strict=True)
    ]


def stage_levels(own: Floats) -> Floats:
    """The self time of a typical rank of each stage in each step, from [step, stage, data, tensor].

    The lower median: of two ranks, one with a bad step does not make its stage slow."""
    ordered = np.sort(own.reshape(*own.shape[:2], -1), axis=2)
    level: Floats = ordered[:, :, (ordered.shape[2] - 1) // 2]
    return level


def find_slow_stage(model: Model, durations: list[Floats], own: Floats, policy: Policy) -> SlowStage | None:
    """`own` is [step, stage, data, tensor] of the same durations."""
    levels = stage_levels(own)
    usual = np.median(levels, axis=0)
    if len(usual) < 2:
        return None
    others = median_of_others(usual)
    slow = (others > 0) & (usual >= policy.stage_ratio * others) & _persistent(levels, policy)
    balanced = stages_like_others(model, durations, usual)
    whole = replay_durations(model, durations).mean()
    found: list[SlowStage] = []
    for stage in np.flatnonzero(slow).tolist():
        fixed = [
            np.where((part.stage == stage)[:, None, None, None], better, seconds)
            for part, better, seconds in zip(model.parts, balanced, durations, strict=True)
        ]
        impact = 1 - float(replay_durations(model, fixed).mean() / whole)
        if impact >= policy.impact_ratio:
            found.append(SlowStage(stage, float(usual[stage]), float(others[stage]), impact))
    return max(found, key=lambda slow: slow.impact_ratio, default=None)


def _persistent(levels: Floats, policy: Policy) -> Bools:
    """Stages that stay slower than the others by more than occasional bad steps explain; `levels` is [step, stage]."""
    relative = relative_to_step(levels)
    _, apart = mean_excess(relative, policy.spread_floor_ratio)
    return stays_slow(relative, policy.stage_ratio, policy) & (apart >= policy.rank_score)


def find_imbalance(model: Model, durations: list[Floats], own: Floats, policy: Policy) -> Imbalance | None:
    """In many steps a rank takes much longer than usual for its stage, and a different one each time."""
    usual = own.mean(axis=(0, 2, 3), keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(usual > 0, own / usual, 1.0).reshape(len(own), -1)  # [step, rank]
    if relative.shape[1] < 2:
        return None
    ordered = np.sort(relative, axis=1)
    middle = ordered[:, (relative.shape[1] - 1) // 2]
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.where(middle > 0, ordered[:, -1] / middle, 1.0)
    if (spread >= IMBALANCE_RATIO).mean() < PATTERN_STEPS_RATIO:
        return None
    factor = relative.mean(axis=1)  # the total work of the step stays the same
    even, at = [], 0
    for part, seconds in zip(model.parts, durations, strict=True):
        steps = slice(at, at + len(part.table.steps))
        at += len(part.table.steps)
        made = seconds.copy()
        for key in np.unique(part.stage * len(model.families) + part.family):
            nodes = (part.stage * len(model.families) + part.family == key) & part.own_work
            if nodes.any():
                made[nodes] = seconds[nodes].mean() * factor[steps][None, :, None, None]
        even.append(made)
    impact = 1 - float(replay_durations(model, even).mean() / replay_durations(model, durations).mean())
    if impact < policy.impact_ratio:
        return None
    _, times = np.unique(np.argmax(relative, axis=1), return_counts=True)
    return Imbalance(float(np.median(spread)), float(times.max() / len(relative)), impact)


def find_slow_transfer(model: Model, durations: list[Floats], policy: Policy) -> SlowTransfer | None:
    """Transfers that take longer than usual for their type and delay the job."""
    whole = replay_durations(model, durations)
    best: SlowTransfer | None = None
    for family, name in enumerate(model.families):
        fixed, excess, usual = [], np.zeros(model.layout.lanes.stages), 0.0
        for part, seconds in zip(model.parts, durations, strict=True):
            nodes = (part.family == family) & ~part.own_work
            limit = part.typical_seconds[:, None, None, None]
            slow = nodes[:, None, None, None] & (seconds > policy.communication_ratio * limit)
            made = np.where(slow, limit, seconds)
            np.add.at(excess, part.stage, (seconds - made).sum(axis=(1, 2, 3)))
            usual += float(made[nodes].sum())
            fixed.append(made)
        if not excess.any():
            continue
        gain = 1 - replay_durations(model, fixed) / whole
        persistent = float((gain >= policy.communication_impact_ratio).mean()) >= PATTERN_STEPS_RATIO
        impact = float(gain.mean())
        if not persistent or impact < policy.communication_impact_ratio:
            continue
        if best is None or impact > best.impact_ratio:
            place = int(np.argmax(excess))
            in_one_stage = excess[place] >= ONE_PLACE_SHARE * excess.sum() and len(excess) > 1
            ratio = (usual + float(excess.sum())) / usual if usual > 0 else float("inf")
            best = SlowTransfer(name, place if in_one_stage else None, ratio, impact)
    return best
