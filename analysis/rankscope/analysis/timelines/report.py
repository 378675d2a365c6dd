"""Analyses a timeline: how much slower than typical the job is (S), the shares of the slowest workers (M_W) and of
the last stage (M_S), what each rank, stage and operation costs, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.timelines.layout import lay_out
from rankscope.analysis.timelines.replay import (
    Model,
    Scenario,
    build_model,
    replay_durations,
    replay_recorded,
    replay_replicas,
    replay_scenarios,
    replay_typical,
)
from rankscope.analysis.timelines.timeline import JobSizes, Timeline, TimelineError
from rankscope.analysis.timelines.what_if import (
    Outliers,
    find_imbalance,
    find_outliers,
    find_slow_stage,
    find_slow_transfer,
    like_peers,
    peers_of_each,
    self_seconds,
    stage_levels,
    stages_like_others,
)
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict, percent, ranks

# Number of ranks for which "what if it ran like its peers" is computed; those with the highest scores.
WORKERS_REPLAYED = 256
# … limited to one or two seconds of computation.
REPLAY_BUDGET = 400_000_000
MIN_SLOWDOWN = 1e-9
# Delays that the replay excludes are reported from this ratio on.
DELAY_NOTED_RATIO = 1.05
NOT_DECLARED = JobSizes()


@dataclass(frozen=True)
class TimelineReport:
    judgement: Judgement
    decomposition: Decomposition
    rank: Ints  # [stage, data, tensor]
    data_ranks: Ints
    families: tuple[str, ...]
    steps: Ints
    steps_recorded: int
    recorded_step_seconds: Floats  # first start to last end
    notes: tuple[str, ...]

    @property
    def launch_slowdown(self) -> float:
        """Recorded steps relative to their replay without delays before operations."""
        return float(self.recorded_step_seconds.mean() / self.decomposition.step_seconds.mean())

    @property
    def lost_ratio(self) -> float:
        """The share of the step that typical durations everywhere would save."""
        return 1 - 1 / self.decomposition.slowdown


@dataclass(frozen=True)
class Decomposition:
    """Slowdowns are ratios to the typical step. `if_…` are seconds per step with one rank like the others of its
    stage, one stage like the other stages, one type of operation typical."""

    step_seconds: Floats  # per step, replayed as recorded
    typical_seconds: Floats  # per step
    replica_slowdown: Floats  # per data-parallel rank
    stage_slowdown: Floats
    family_slowdown: Floats
    worker_score: Floats  # [stage, data]
    m_w: float | None
    m_s: float | None
    if_worker: Floats  # [stage, data]; NaN if not computed
    if_stage: Floats  # NaN if there is only one stage
    if_family: Floats

    @property
    def slowdown(self) -> float:
        return float(self.step_seconds.mean() / self.typical_seconds.mean())


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    outliers: Outliers
    self_seconds: Floats  # [stage, data, tensor], mean over steps
    notes: tuple[str, ...]


def analyze(timeline: Timeline, sizes: JobSizes = NOT_DECLARED, policy: Policy = DEFAULT_POLICY) -> TimelineReport:
    """Raises TimelineError if there is nothing to replay or no other rank to compare with."""
    layout = lay_out(timeline, sizes)
    if layout.lanes.rank.size < 2:
        raise TimelineError("only one rank, nothing to compare it with; record the other ranks too")
    model = build_model(layout)
    decomposition = decompose(model)
    judgement = judge(model, policy)
    report = TimelineReport(
        judgement,
        decomposition,
        layout.lanes.rank,
        layout.lanes.data_ranks,
        model.families,
        model.steps,
        layout.steps_recorded,
        _recorded(model),
        (*layout.notes, *model.notes, *judgement.notes),
    )
    return _with_notes(report, sizes)


def _recorded(model: Model) -> Floats:
    made = []
    for part in model.parts:
        start, duration = part.table.start_seconds, part.table.duration_seconds
        made.append((start + duration).max(axis=(0, 2, 3)) - start.min(axis=(0, 2, 3)))
    return np.concatenate(made)


def _with_notes(report: TimelineReport, sizes: JobSizes) -> TimelineReport:
    notes = list(report.notes)
    if report.launch_slowdown >= DELAY_NOTED_RATIO:
        gaps = percent(1 - 1 / report.launch_slowdown)
        notes.append(f"{gaps} of the recorded step are delays before operations, which the replay excludes")
    declared = (sizes.tensor or 1) if report.rank.shape[2] == 1 else 1
    if declared > 1:
        notes.append(f"a row stands for {declared} tensor-parallel ranks: ranks of one group cannot be distinguished")
    return replace(report, notes=tuple(notes))


def decompose(model: Model) -> Decomposition:
    recorded, typical = replay_recorded(model), replay_typical(model)
    ideal = float(typical.mean())
    if not ideal > 0:
        raise TimelineError("all durations are zero; are they in seconds, and rounded?")
    stages, replicas, tensors = model.layout.lanes.rank.shape
    by_stage = [_workers((stages, replicas, tensors), stage=stage) for stage in range(stages)]
    families = range(len(model.families))
    scenarios = [Scenario(workers) for workers in by_stage]
    scenarios += [Scenario(family=family) for family in families]
    scenarios += [Scenario(family=family, inverted=True) for family in families]
    scenarios += [Scenario(by_stage[-1], inverted=True)]
    seconds = replay_scenarios(model, scenarios).mean(axis=1)
    stage_slowdown, rest = seconds[:stages] / ideal, seconds[stages:]
    family_slowdown, rest = rest[: len(families)] / ideal, rest[len(families) :]
    if_family, if_last = rest[: len(families)], float(rest[-1])
    replica_slowdown = replay_replicas(model).mean(axis=1) / ideal
    score = np.minimum(stage_slowdown[:, None], replica_slowdown[None, :])
    worst = _worst(score, model.layout.lanes.rank[:, :, 0])
    if_worst = float(replay_scenarios(model, [Scenario(worst[:, :, None], inverted=True)]).mean())
    lost = float(recorded.mean()) - ideal
    known = lost > MIN_SLOWDOWN * ideal
    return Decomposition(
        recorded,
        typical,
        replica_slowdown,
        stage_slowdown,
        family_slowdown,
        score,
        (float(recorded.mean()) - if_worst) / lost if known else None,
        (float(recorded.mean()) - if_last) / lost if known else None,
        _replay_workers(model, score),
        _replay_stages(model, by_stage),
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


def _replay_workers(model: Model, score: Floats) -> Floats:
    cost = sum(part.net_seconds.size for part in model.parts)
    count = min(score.size, WORKERS_REPLAYED, max(1, REPLAY_BUDGET // cost))
    order = np.argsort(-score, axis=None, kind="stable")[:count]
    shape = model.layout.lanes.rank.shape
    places = [(int(at) // score.shape[1], int(at) % score.shape[1]) for at in order]
    scenarios = [Scenario(_workers(shape, stage, replica), inverted=True) for stage, replica in places]
    seconds = np.full(score.size, np.nan)
    if shape[1] * shape[2] > 1:
        seconds[order] = replay_scenarios(model, scenarios, peers_of_each(model)).mean(axis=1)
    return seconds.reshape(score.shape)


def _replay_stages(model: Model, by_stage: list[Bools]) -> Floats:
    if len(by_stage) < 2:
        return np.full(len(by_stage), np.nan)
    durations = [part.net_seconds for part in model.parts]
    balanced = stages_like_others(model, durations, np.median(stage_levels(self_seconds(model)), axis=0))
    scenarios = [Scenario(stage, inverted=True) for stage in by_stage]
    seconds: Floats = replay_scenarios(model, scenarios, balanced).mean(axis=1)
    return seconds


def judge(model: Model, policy: Policy) -> Judgement:
    own = self_seconds(model)
    found = find_outliers(own, policy)
    outlier, notes = found.outlier, list[str]()
    abstention = _abstain(model, policy)
    candidates: list[Verdict] = []
    durations = [part.net_seconds for part in model.parts]
    if outlier.any():
        durations = like_peers(model, outlier)
        slow, note = _slow_ranks(model, durations, found, outlier, policy)
        candidates += [slow] if slow else []
        notes += [note] if note else []
    candidates += _job_wide(model, durations, policy)
    candidates.sort(key=lambda verdict: -(verdict.impact_ratio or 0.0))
    if abstention is None:
        notes += [f"also {verdict.kind.value}: {verdict.reason}" for verdict in candidates[1:]]
    elif candidates:
        notes.append(f"it looks like {candidates[0].kind.value}: {candidates[0].reason}")
    if own.shape[2] * own.shape[3] == 1:
        notes.append("one rank per stage: a slow rank cannot be distinguished from a slow stage")
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
    model: Model, durations: list[Floats], found: Outliers, outlier: Bools, policy: Policy
) -> tuple[Verdict | None, str]:
    whole = float(replay_recorded(model).mean())
    impact = 1 - float(replay_durations(model, durations).mean()) / whole
    culprits = tuple(sorted(model.layout.lanes.rank[outlier].tolist()))
    worst = float(found.ratio[outlier].max())
    excess = f"{ranks(culprits)}: {worst:.2f}× the self time of the other ranks of the same stage"
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
    """The operation with most of the excess."""
    excess = np.zeros(len(model.families))
    for part, fixed in zip(model.parts, like_peers(model, outlier), strict=True):
        np.add.at(excess, part.family, (part.net_seconds - fixed).sum(axis=(1, 2, 3)))
    total = float(excess.sum())
    if total <= 0:
        return ""
    family = int(np.argmax(excess))
    return f"; {percent(float(excess[family]) / total)} of it in {model.families[family]}"


def _job_wide(model: Model, durations: list[Floats], policy: Policy) -> list[Verdict]:
    own = self_seconds(model, durations)
    found: list[Verdict] = []
    stage = find_slow_stage(model, durations, own, policy)
    if stage is not None:
        reason = (
            f"stage {stage.stage} works {stage.self_seconds:.3g} s a step, the other stages "
            f"{stage.others_seconds:.3g} s ({stage.ratio:.2f}×); its ranks are alike"
        )
        found.append(
            Verdict(Kind.SLOW_STAGE, reason, Severity.ALARM, stage=stage.stage, impact_ratio=stage.impact_ratio)
        )
    imbalance = find_imbalance(model, durations, own, policy)
    if imbalance is not None:
        reason = (
            f"in the median step the slowest rank works {imbalance.spread_ratio:.2f}× as long as the others, and it is "
            f"a different one each time (at most {percent(imbalance.slowest_often_ratio)} of the steps the same)"
        )
        found.append(Verdict(Kind.DATA_IMBALANCE, reason, Severity.ALARM, impact_ratio=imbalance.impact_ratio))
    transfer = find_slow_transfer(model, durations, policy)
    if transfer is not None:
        where = "" if transfer.stage is None else f" of stage {transfer.stage}"
        reason = f"{transfer.family}{where} takes {transfer.ratio:.1f}× its usual transfer time; no rank is late for it"
        found.append(Verdict(Kind.SLOW_COMMUNICATION, reason, Severity.ALARM, impact_ratio=transfer.impact_ratio))
    return found


def _healthy(found: Outliers) -> Verdict:
    known = found.ratio[~np.isnan(found.ratio)]
    if not len(known):
        return Verdict(Kind.HEALTHY, "no stage takes much longer than the others")
    return Verdict(Kind.HEALTHY, f"no rank works more than {known.max():.2f}× as long as the others of its stage")
