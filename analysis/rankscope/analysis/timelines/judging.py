"""The verdict on a timeline: of all that could be put right, what would give back most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import Bools, Floats
from rankscope.analysis.timelines.counterfactuals import (
    find_imbalance,
    find_slow_stage,
    find_slow_transfer,
    like_peers,
)
from rankscope.analysis.timelines.modelling import Model, replay_recorded, replay_taken
from rankscope.analysis.timelines.standing_out import StandingOut, own_seconds, stand_out
from rankscope.analysis.verdict import Kind, Severity, Verdict
from rankscope.analysis.wording import percent, ranks


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    standing_out: StandingOut
    own_seconds: Floats  # [stage, data, tensor], mean over steps
    notes: tuple[str, ...]


def judge(model: Model, policy: Policy) -> Judgement:
    own = own_seconds(model)
    found = stand_out(own, policy)
    outlier, notes = found.outlier, list[str]()
    abstention = _abstain(model, policy)
    candidates: list[Verdict] = []
    taken = [part.taken_seconds for part in model.parts]
    if outlier.any():
        taken = like_peers(model, outlier)
        slow, note = _slow_ranks(model, taken, found, outlier, own, policy)
        candidates += [slow] if slow else []
        notes += [note] if note else []
    candidates += _job_wide(model, taken, policy)
    candidates.sort(key=lambda verdict: -(verdict.impact_ratio or 0.0))
    if abstention is None:
        notes += [f"also {verdict.kind.value}: {verdict.reason}" for verdict in candidates[1:]]
    elif candidates:
        notes.append(f"it looks like {candidates[0].kind.value}: {candidates[0].reason}")
    if own.shape[2] * own.shape[3] == 1:
        notes.append("one rank per stage: a slow rank cannot be told from a slow stage")
    verdict = abstention or (candidates or [_healthy(found)])[0]
    return Judgement(verdict, found, own.mean(axis=0), tuple(notes))


def _abstain(model: Model, policy: Policy) -> Verdict | None:
    layout = model.layout
    lanes = layout.lanes
    if lanes.ranks_seen < policy.ranks_seen_ratio * lanes.ranks_expected:
        return Verdict(Kind.INSUFFICIENT_DATA, f"{lanes.ranks_seen} of {lanes.ranks_expected} ranks have whole rows")
    if layout.steps_used < policy.steps_needed:
        reason = f"{layout.steps_used} whole steps of {layout.steps_recorded}, {policy.steps_needed} needed"
        return Verdict(Kind.INSUFFICIENT_DATA, reason)
    return None


def _slow_ranks(
    model: Model, taken: list[Floats], found: StandingOut, outlier: Bools, own: Floats, policy: Policy
) -> tuple[Verdict | None, str]:
    whole = float(replay_recorded(model).mean())
    impact = 1 - float(replay_taken(model, taken).mean()) / whole
    culprits = tuple(sorted(model.layout.lanes.rank[outlier].tolist()))
    worst = float(found.ratio[outlier].max())
    excess = f"{ranks(culprits)}: {worst:.2f}× the own work of the other ranks of the same stage"
    if impact < policy.impact_ratio:
        return None, f"{excess}, but that costs the job {percent(max(impact, 0.0))} only"
    where = _where(model, outlier)
    return (
        Verdict(
            Kind.SLOW_RANK,
            f"{excess}, in {percent(float(found.slow_steps_ratio[outlier].min()))} of the steps{where}",
            Severity.ALARM,
            culprits=culprits,
            impact_ratio=impact,
        ),
        "",
    )


def _where(model: Model, outlier: Bools) -> str:
    """The operation that holds most of the excess, if one does."""
    excess = np.zeros(len(model.families))
    for part, fixed in zip(model.parts, like_peers(model, outlier), strict=True):
        np.add.at(excess, part.family, (part.taken_seconds - fixed).sum(axis=(1, 2, 3)))
    total = float(excess.sum())
    if total <= 0:
        return ""
    family = int(np.argmax(excess))
    return f"; {percent(float(excess[family]) / total)} of it in {model.families[family]}"


def _job_wide(model: Model, taken: list[Floats], policy: Policy) -> list[Verdict]:
    own = own_seconds(model, taken)
    found: list[Verdict] = []
    stage = find_slow_stage(model, taken, own, policy)
    if stage is not None:
        reason = (
            f"stage {stage.stage} works {stage.own_seconds:.3g} s a step, the other stages "
            f"{stage.others_seconds:.3g} s ({stage.ratio:.2f}×); its ranks are alike"
        )
        found.append(
            Verdict(Kind.SLOW_STAGE, reason, Severity.ALARM, stage=stage.stage, impact_ratio=stage.impact_ratio)
        )
    imbalance = find_imbalance(model, taken, own, policy)
    if imbalance is not None:
        reason = (
            f"in the middle step the slowest rank works {imbalance.spread_ratio:.2f}× as long as the others, and it is "
            f"another one each time (at most {percent(imbalance.slowest_often_ratio)} of the steps the same)"
        )
        found.append(Verdict(Kind.DATA_IMBALANCE, reason, Severity.ALARM, impact_ratio=imbalance.impact_ratio))
    transfer = find_slow_transfer(model, taken, policy)
    if transfer is not None:
        where = "" if transfer.stage is None else f" of stage {transfer.stage}"
        reason = f"{transfer.family}{where} takes {transfer.ratio:.1f}× its usual transfer time; nobody is late for it"
        found.append(Verdict(Kind.SLOW_COMMUNICATION, reason, Severity.ALARM, impact_ratio=transfer.impact_ratio))
    return found


def _healthy(found: StandingOut) -> Verdict:
    known = found.ratio[~np.isnan(found.ratio)]
    if not len(known):
        return Verdict(Kind.HEALTHY, "no stage takes much longer than the others")
    return Verdict(Kind.HEALTHY, f"no rank works more than {known.max():.2f}× as long as the others of its stage")
