"""The status of a TrainingRun. No I/O: the same input makes the same status."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, structs

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.objects import TEXT_CHARACTERS, condition, merged_conditions, timestamp
from rankscope.operator.kube.resources import (
    Condition,
    Culprit,
    RankCount,
    RunPhase,
    RunVerdict,
    TrainingRunStatus,
)
from rankscope.operator.runs.inventory import Run
from rankscope.v1.identity_pb2 import RankIdentity

CULPRITS_SHOWN = 64


def run_status(
    run: Run, state: JobState | None, before: TrainingRunStatus, generation: int, now_unix_seconds: float
) -> TrainingRunStatus:
    """`before` is the current status: conditions keep the time of their last change."""
    status = TrainingRunStatus(observed_generation=generation, phase=_phase(run, state))
    conditions = [_seen(run, state)]
    if any(known.type == "Ended" for known in before.conditions):
        conditions.append(condition("Ended", "False", "PodsAgain", "the run has pods again"))
    if state is not None:
        status.job = state.job[:256]
        status.ranks = RankCount(
            expected=state.world_size, seen=state.ranks_seen, summary=f"{state.ranks_seen}/{state.world_size}"
        )
        # Rounded: a status that changes with every window would be written with every window.
        status.step_seconds = _rounded(state.step_seconds)
        status.mfu_ratio = _rounded(state.mfu_ratio)
        status.exposed_communication_ratio = _rounded(state.exposed_communication_ratio)
        status.step = _milliseconds(state.step_seconds)
        status.mfu = _percent(state.mfu_ratio)
        status.exposed = _percent(state.exposed_communication_ratio)
        status.verdict = run_verdict(state, before.verdict)
        conditions.append(_healthy(state.verdict))
    status.last_capture = before.last_capture
    status.last_hang = before.last_hang
    status.attempt, status.attempt_pod = _attempt(run, before)
    status.conditions = merged_conditions(before.conditions, conditions, generation, now_unix_seconds)
    return status


def ended_status(before: TrainingRunStatus, generation: int, now_unix_seconds: float) -> TrainingRunStatus:
    """Of a run without pods: the last known status, with the condition Ended."""
    over = condition("Ended", "True", "NoPods", "the run has no pods any more")
    conditions = merged_conditions(before.conditions, [over], generation, now_unix_seconds)
    return structs.replace(before, observed_generation=generation, phase="Ended", conditions=conditions)


def run_verdict(state: JobState, before: RunVerdict | UnsetType = UNSET) -> RunVerdict:
    """`before` is the current one: the same verdict again keeps its start, also after a restart."""
    made = _run_verdict(state)
    if isinstance(before, RunVerdict) and gist(before) == gist(made):
        made.since = min(before.since, made.since)
    return made


def is_premature(state: JobState | None, standing: RunVerdict | UnsetType) -> bool:
    """Whether the verdict may differ from `standing` only because a restarted operator still lacks windows."""
    if not isinstance(standing, RunVerdict) or standing.kind is Kind.INSUFFICIENT_DATA:
        return False
    found = UNSET if state is None else run_verdict(state)
    if not isinstance(found, RunVerdict) or found.kind is Kind.INSUFFICIENT_DATA:
        return gist(found) != gist(standing)
    return standing.kind.is_finding and gist(found) != gist(standing) and found.severity is not Severity.ALARM


def gist(verdict: RunVerdict | UnsetType) -> object:
    """What makes it another verdict for a user."""
    if not isinstance(verdict, RunVerdict):
        return None
    return (verdict.kind, verdict.severity, tuple(culprit.rank for culprit in verdict.culprits), verdict.stage)


def _run_verdict(state: JobState) -> RunVerdict:
    verdict = state.verdict
    identities = state.identities
    frames = verdict.cause.frames
    return RunVerdict(
        kind=verdict.kind,
        severity=verdict.severity,
        confidence=verdict.confidence,
        reason=verdict.reason[:TEXT_CHARACTERS],
        since=timestamp(state.since_unix_seconds),
        culprits=[_culprit(rank, identities.get(rank)) for rank in verdict.culprits[:CULPRITS_SHOWN]],
        culprit_count=len(verdict.culprits),
        stage=UNSET if verdict.stage is None else verdict.stage,
        group=verdict.group[:TEXT_CHARACTERS] or UNSET,
        phase=verdict.cause.phase if verdict.kind.is_finding else UNSET,
        bound=verdict.cause.bound or UNSET,
        stalls=verdict.cause.stalls[:64] or UNSET,
        source=f"{frames[0].file}:{frames[0].line} ({frames[0].function})"[:512] if frames else UNSET,
        evidence=verdict.cause.evidence[:TEXT_CHARACTERS] or UNSET,
        impact_ratio=_rounded(verdict.impact_ratio),
        lost_gpu_hours=UNSET if verdict.lost_gpu_seconds is None else _coarse(verdict.lost_gpu_seconds / 3600),
    )


def _attempt(run: Run, before: TrainingRunStatus) -> tuple[int | UnsetType, str | UnsetType]:
    """A restart replaces the pods or restarts their containers. It is counted by one pod of the run, which no training
    job outlives."""
    pods = {pod.uid: pod for pod in run.live_pods}
    if not pods:
        return before.attempt, before.attempt_pod
    first = min(pods.values(), key=lambda pod: pod.name)
    if not isinstance(before.attempt_pod, str) or not isinstance(before.attempt, int):
        return first.restarts, f"{first.uid}/{first.restarts}"
    uid, _, counted = before.attempt_pod.partition("/")
    if uid in pods:
        restarts = pods[uid].restarts
        more = max(0, restarts - int(counted)) if counted.isdecimal() else 0
        return before.attempt + more, f"{uid}/{restarts}"
    return before.attempt + 1 + first.restarts, f"{first.uid}/{first.restarts}"


def _phase(run: Run, state: JobState | None) -> RunPhase:
    if run.is_over:
        return "Ended"
    return "Pending" if state is None else "Running"


def _seen(run: Run, state: JobState | None) -> Condition:
    if state is None:
        pods = len(run.live_pods)
        return condition("RanksSeen", "False", "NoRanks", f"no rank was seen yet in the {pods} pods of the run")
    message = f"{state.ranks_seen} of {state.world_size} ranks report"
    if state.ranks_seen >= state.world_size:
        return condition("RanksSeen", "True", "AllRanks", message)
    return condition("RanksSeen", "False", "RanksMissing", message)


def _healthy(verdict: Verdict) -> Condition:
    if verdict.kind is Kind.INSUFFICIENT_DATA:
        return condition("Healthy", "Unknown", "InsufficientData", verdict.reason)
    bad = verdict.kind.is_finding and verdict.severity is Severity.ALARM
    reason = "".join(part.capitalize() for part in verdict.kind.value.split("_")) if bad else "Healthy"
    return condition("Healthy", "False" if bad else "True", reason, verdict.reason if bad else "nothing is raised")


def _culprit(rank: int, identity: RankIdentity | None) -> Culprit:
    if identity is None:
        return Culprit(rank=rank)
    return Culprit(
        rank=rank,
        node=identity.node or UNSET,
        pod=identity.pod_name or identity.pod or UNSET,
        gpu=identity.gpu_uuid or UNSET,
    )


def _rounded(value: float | None) -> float | UnsetType:
    return UNSET if value is None else float(f"{value:.2g}")


def _coarse(hours: float) -> float:
    """Grows all the time: to one digit, it is written when it matters."""
    return float(f"{hours:.1g}")


def _milliseconds(seconds: float | None) -> str | UnsetType:
    if seconds is None:
        return UNSET
    return f"{seconds * 1e3:.2g}ms" if seconds < 0.1 else f"{seconds * 1e3:.0f}ms" if seconds < 1 else f"{seconds:.1f}s"


def _percent(ratio: float | None) -> str | UnsetType:
    return UNSET if ratio is None else f"{100 * ratio:.0f}%"
