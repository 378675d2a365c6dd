"""What-if replays: the gain if slow ranks, a slow stage, imbalance or slow transfers were fixed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats
from rankscope.analysis.timelines.replay import Model, replay_durations
from rankscope.analysis.timelines.slow_ranks import mean_excess, median_of_others, relative_to_step, stays_slow
from rankscope.analysis.verdicts.thresholds import Policy

# The slowest rank of a step relative to the usual one. Of many noisy ranks, one is always slow by a few per cent.
IMBALANCE_RATIO = 1.15
# Share of steps; one bad step in twenty is not a pattern.
PATTERN_STEPS_RATIO = 0.25
ONE_PLACE_SHARE = 0.8


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
    """Durations with the own work of the culprits [stage, data, tensor] replaced by the median of their cohort."""
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
    """Durations with each rank's own work replaced by the median of the others of its stage."""
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
    """Durations with each stage's own work scaled to the median of the other stages; `level` is per stage."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = median_of_others(level) / level
    factor = np.where(np.isfinite(factor), factor, 1.0)
    return [
        seconds * np.where(part.own_work, factor[part.stage], 1.0)[:, None, None, None]
        for part, seconds in zip(model.parts, durations, strict=True)
    ]


def stage_levels(own: Floats) -> Floats:
    """The own work of a typical rank of each stage in each step, from [step, stage, data, tensor].

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
