"""The status of a Capture, from the reports of the daemons. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median

from msgspec import UNSET, structs

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.operator.kube.objects import condition, merged_conditions, timestamp
from rankscope.operator.kube.resources import CapturedRank, CapturePhase, CaptureStatus
from rankscope.v1 import capture_service_pb2 as pb

LONGEST_SECONDS = 1e6


def self_seconds(ranks: Iterable[pb.RankCapture]) -> Mapping[int, float]:
    """Of each rank with whole steps, the mean time of a step that it did not spend waiting in collectives."""
    found = {}
    for rank in ranks:
        steps = list(rank.summary.each_step_seconds)
        waits = list(rank.summary.each_exposed_communication_seconds)
        if rank.state == pb.CAPTURE_STATE_ANALYSED and steps and len(steps) == len(waits):
            each = [step - wait for step, wait in zip(steps, waits, strict=True)]
            # No NaN or huge value: a daemon's report is hostile input.
            if all(abs(seconds) < LONGEST_SECONDS for seconds in each) and (own := fmean(each)) > 0:
                found[rank.rank] = own
    return found


def joint_finding(ranks: Iterable[pb.RankCapture], policy: Policy) -> str | None:
    """The rank that the others wait for, by the run's policy; None where fewer than two ranks can be compared."""
    own = self_seconds(ranks)
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = {rank: seconds for rank, seconds in own.items() if rank != slowest}
    usual = median(others.values())
    whom = f"rank {next(iter(others))}" if len(others) == 1 else f"the other {len(others)} ranks"
    if own[slowest] < policy.rank_ratio * usual:
        return f"no rank stands out: all work {_text(usual)} to {_text(own[slowest])} of a step by themselves"
    return (
        f"rank {slowest} works {_text(own[slowest])} of each step by itself, {whom} {_text(usual)}: "
        f"it holds the others up by {_text(own[slowest] - usual)} a step"
    )


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


TEXT_CHARACTERS = 1000
FINDINGS_SHOWN = 32
# The largest that JSON readers keep exactly: the API server has to accept every status.
LARGEST_INTEGER = (1 << 53) - 1
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
    joint = [capture.join.reason for capture in reported.values() if capture.HasField("join") and capture.join.reason]
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
        bytes=min(reported.bytes, LARGEST_INTEGER) or UNSET,
        steps=reported.steps if reported.HasField("steps") else UNSET,
        start_unix_ms=reported.start_unix_millis if reported.HasField("start_unix_millis") else UNSET,
    )
