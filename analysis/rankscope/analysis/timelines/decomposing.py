"""How much slower than typical the job is, and whose doing it is: the numbers S, M_W, M_S and what-if."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Floats
from rankscope.analysis.timelines.columns import TimelineError
from rankscope.analysis.timelines.counterfactuals import peers_of_each, stage_levels, stages_like_others
from rankscope.analysis.timelines.modelling import (
    Model,
    Scenario,
    replay_recorded,
    replay_replicas,
    replay_scenarios,
    replay_typical,
)
from rankscope.analysis.timelines.standing_out import own_seconds

# Ranks for which "what if it ran like its peers" is answered; of more, those of highest score.
RANKS_ASKED = 256
# … as long as that takes a second or two.
NUMBERS_AFFORDED = 400_000_000
LEAST_SLOWDOWN = 1e-9


@dataclass(frozen=True)
class Decomposition:
    """Slowdowns are ratios to the typical step. `if_…` are seconds of a step with one rank like the others of its
    stage, one stage like the other stages, one type of operation always typical."""

    step_seconds: Floats  # per step, replayed as recorded
    typical_seconds: Floats  # per step
    replica_slowdown: Floats  # per data-parallel rank
    stage_slowdown: Floats
    family_slowdown: Floats
    worker_score: Floats  # [stage, data]
    m_w: float | None
    m_s: float | None
    if_worker: Floats  # [stage, data], NaN where not asked
    if_stage: Floats  # NaN where there is one stage only
    if_family: Floats

    @property
    def slowdown(self) -> float:
        return float(self.step_seconds.mean() / self.typical_seconds.mean())


def decompose(model: Model) -> Decomposition:
    recorded, typical = replay_recorded(model), replay_typical(model)
    ideal = float(typical.mean())
    if not ideal > 0:
        raise TimelineError("all durations are zero; are they in seconds, and rounded?")
    stages, replicas, tensors = model.layout.lanes.rank.shape
    by_stage = [_workers((stages, replicas, tensors), stage=stage) for stage in range(stages)]
    families = range(len(model.families))
    asked = [Scenario(workers) for workers in by_stage]
    asked += [Scenario(family=family) for family in families]
    asked += [Scenario(family=family, turned=True) for family in families]
    asked += [Scenario(by_stage[-1], turned=True)]
    seconds = replay_scenarios(model, asked).mean(axis=1)
    stage_slowdown, rest = seconds[:stages] / ideal, seconds[stages:]
    family_slowdown, rest = rest[: len(families)] / ideal, rest[len(families) :]
    if_family, if_last = rest[: len(families)], float(rest[-1])
    replica_slowdown = replay_replicas(model).mean(axis=1) / ideal
    score = np.minimum(stage_slowdown[:, None], replica_slowdown[None, :])
    worst = _worst(score, model.layout.lanes.rank[:, :, 0])
    if_worst = float(replay_scenarios(model, [Scenario(worst[:, :, None], turned=True)]).mean())
    lost = float(recorded.mean()) - ideal
    known = lost > LEAST_SLOWDOWN * ideal
    return Decomposition(
        recorded,
        typical,
        replica_slowdown,
        stage_slowdown,
        family_slowdown,
        score,
        (float(recorded.mean()) - if_worst) / lost if known else None,
        (float(recorded.mean()) - if_last) / lost if known else None,
        _ask_workers(model, score),
        _ask_stages(model, by_stage),
        if_family,
    )


def _workers(shape: tuple[int, ...], stage: int, replica: int | None = None) -> Bools:
    chosen = np.zeros(shape, dtype=bool)
    chosen[stage, slice(None) if replica is None else replica] = True
    return chosen


def _worst(score: Floats, rank: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Bools:
    """The 3 % of workers with the highest score, at least one; of equals the lower rank."""
    count = -(-score.size * 3 // 100)
    order = np.lexsort((rank.ravel(), -score.ravel()))
    chosen = np.zeros(score.size, dtype=bool)
    chosen[order[:count]] = True
    return chosen.reshape(score.shape)


def _ask_workers(model: Model, score: Floats) -> Floats:
    cost = sum(part.taken_seconds.size for part in model.parts)
    count = min(score.size, RANKS_ASKED, max(1, NUMBERS_AFFORDED // cost))
    order = np.argsort(-score, axis=None, kind="stable")[:count]
    shape = model.layout.lanes.rank.shape
    places = [(int(at) // score.shape[1], int(at) % score.shape[1]) for at in order]
    asked = [Scenario(_workers(shape, stage, replica), turned=True) for stage, replica in places]
    seconds = np.full(score.size, np.nan)
    if shape[1] * shape[2] > 1:
        seconds[order] = replay_scenarios(model, asked, peers_of_each(model)).mean(axis=1)
    return seconds.reshape(score.shape)


def _ask_stages(model: Model, by_stage: list[Bools]) -> Floats:
    if len(by_stage) < 2:
        return np.full(len(by_stage), np.nan)
    taken = [part.taken_seconds for part in model.parts]
    balanced = stages_like_others(model, taken, np.median(stage_levels(own_seconds(model)), axis=0))
    asked = [Scenario(stage, turned=True) for stage in by_stage]
    seconds: Floats = replay_scenarios(model, asked, balanced).mean(axis=1)
    return seconds
