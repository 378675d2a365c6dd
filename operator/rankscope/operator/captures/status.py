"""The status of a Capture, from the reports of the daemons. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import UNSET, structs

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.traces.joins.self_time import StepTimes
from rankscope.analysis.traces.joins.step_verdict import judge_steps
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.window_columns import MIN_STEP_SECONDS, plausible_seconds
from rankscope.operator.correlation.job_service import judgement_of
from rankscope.operator.kube.objects import condition, merged_conditions, timestamp
from rankscope.operator.kube.resources import CapturedRank, CapturePhase, CaptureStatus
from rankscope.v1 import capture_service_pb2 as pb


def joint_finding(ranks: Iterable[pb.RankCapture], policy: Policy) -> str | None:
    """What the captures of all ranks say together, by the run's policy; None where fewer than two can be compared.
    Of a step, the rank that waited least shows what the transfer takes. Sums do not tell who began a wait that a
    pipeline passes on. A daemon's report is hostile input."""
    measured = {}
    for rank in ranks:
        if any(kind in _MESSAGES for kind in rank.summary.collectives):
            return "the ranks send messages, as stages of a pipeline do: compare them with `rankscope analyze trace`"
        step = plausible_seconds(np.array(rank.summary.each_step_seconds[:MAX_STEPS]))
        exposed = plausible_seconds(np.array(rank.summary.each_exposed_communication_seconds[:MAX_STEPS]))
        is_whole = rank.state == pb.CAPTURE_STATE_ANALYSED and 0 < len(step) == len(exposed)
        if is_whole and (step >= MIN_STEP_SECONDS).all() and not np.isnan(exposed).any():
            measured[rank.rank] = 1e9 * step, 1e9 * np.minimum(exposed, step)
    if len(measured) < 2:
        return None
    count = min(len(step) for step, _ in measured.values())
    numbers = sorted(measured)
    step, exposed = (np.array([measured[number][part][:count] for number in numbers]) for part in (0, 1))
    transfer = np.broadcast_to(exposed.min(axis=0), step.shape)
    unmatched = np.zeros(step.shape)
    times = StepTimes(np.array(numbers), np.arange(count), step, exposed - transfer, transfer, unmatched, on_host=True)
    return judge_steps(times, len(numbers), numbers, count, None, None, policy).reason


_MESSAGES = frozenset(kind.label for kind in (CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV))
MAX_STEPS = 1000  # of a capture, that are compared
TEXT_CHARACTERS = 1000
FINDINGS_SHOWN = 32
# The largest that JSON readers keep exactly: the API server has to accept every status.
MAX_INTEGER = (1 << 53) - 1
ENDED = frozenset({"analysed", "failed", "cancelled"})


def state_name(state: pb.CaptureState.ValueType) -> str:
    try:
        return pb.CaptureState.Name(state).removeprefix("CAPTURE_STATE_").lower()
    except ValueError:
        return "unspecified"  # of a newer daemon, or of none


def is_ended(rank: CapturedRank) -> bool:
    return rank.state in ENDED


def updated_ranks(before: Iterable[CapturedRank], reported: Mapping[str, pb.Capture]) -> list[CapturedRank]:
    """`reported` is by node. A rank that has ended stays as it was: a daemon that forgets does not undo it."""
    known = {(node, rank.rank): rank for node, capture in reported.items() for rank in capture.ranks}
    ranks = []
    for rank in before:
        latest = known.get((rank.node, rank.rank)) if isinstance(rank.node, str) else None
        ranks.append(rank if latest is None or is_ended(rank) else _updated(rank, latest))
    return ranks


def failed_ranks(before: Iterable[CapturedRank], node: str, error: str) -> list[CapturedRank]:
    """Those of a node that will not deliver any more."""
    text = error[:TEXT_CHARACTERS]
    return [
        structs.replace(rank, state="failed", error=text) if rank.node == node and not is_ended(rank) else rank
        for rank in before
    ]


def phase_of(ranks: Iterable[CapturedRank]) -> CapturePhase:
    states = [rank.state for rank in ranks]
    if any(state not in ENDED for state in states):
        return "Running"
    if all(state == "analysed" for state in states):
        return "Succeeded"
    return "Cancelled" if all(state in ("cancelled", "analysed") for state in states) else "Failed"


def summarised(status: CaptureStatus) -> CaptureStatus:
    ranks = status.ranks
    starts = [rank.start_unix_ms for rank in ranks if isinstance(rank.start_unix_ms, int) and rank.state == "analysed"]
    delivered = sum(rank.state == "analysed" for rank in ranks)
    return structs.replace(
        status,
        phase=phase_of(ranks),
        delivered=f"{delivered}/{len(ranks)}",
        start_skew_ms=float(max(starts) - min(starts)) if len(starts) > 1 else UNSET,
    )


def concluded(
    status: CaptureStatus, reason: str, message: str, generation: int, now_unix_seconds: float
) -> CaptureStatus:
    """With its last condition; reason and message by default from what the ranks delivered."""
    errors = dict.fromkeys(str(rank.error) for rank in status.ranks if isinstance(rank.error, str))
    message = message or "; ".join(errors)[:TEXT_CHARACTERS]
    done = condition(
        "Complete",
        "True" if status.phase == "Succeeded" else "False",
        reason or {"Succeeded": "Delivered", "Cancelled": "Cancelled"}.get(str(status.phase), "RanksFailed"),
        message or f"{status.delivered} ranks delivered",
    )
    conditions = merged_conditions(status.conditions, [done], generation, now_unix_seconds)
    return structs.replace(status, message=message, finished_at=timestamp(now_unix_seconds), conditions=conditions)


def findings_of(reported: Mapping[str, pb.Capture], policy: Policy) -> list[str]:
    """Findings of all traces together first, then of each rank."""
    ranks = [rank for capture in reported.values() for rank in capture.ranks]
    joint = [text for capture in reported.values() if (text := judgement_of(capture) or capture.join.reason)]
    if len(reported) > 1:
        joint = [text for text in [joint_finding(ranks, policy)] if text is not None]
    single = [f"rank {rank.rank}: {finding}" for rank in ranks for finding in rank.summary.findings[:2]]
    return [text[:TEXT_CHARACTERS] for text in [*joint, *single][:FINDINGS_SHOWN]]


def _updated(rank: CapturedRank, reported: pb.RankCapture) -> CapturedRank:
    return structs.replace(
        rank,
        state=state_name(reported.state),
        backend=reported.backend[:TEXT_CHARACTERS] or UNSET,
        error=reported.error[:TEXT_CHARACTERS] or UNSET,
        uri=(reported.uri or reported.artifact)[:TEXT_CHARACTERS] or UNSET,
        bytes=min(reported.bytes, MAX_INTEGER) or UNSET,
        steps=reported.steps if reported.HasField("steps") else UNSET,
        start_unix_ms=reported.start_unix_millis if reported.HasField("start_unix_millis") else UNSET,
    )
