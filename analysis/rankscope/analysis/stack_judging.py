"""The verdict where no step is known: stacks of two stretches of time that must tell the same story."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.merging import merge_evidence
from rankscope.analysis.policy import Policy
from rankscope.analysis.stack_evidence import StackVerdict, judge_stacks
from rankscope.analysis.verdict import Confidence, Kind, Severity, Verdict
from rankscope.analysis.windows import JobWindow
from rankscope.analysis.wording import ranks


def judge_stack_windows(windows: Sequence[JobWindow], policy: Policy, missing: str = "no step records") -> Verdict:
    """`windows` are the latest, oldest first. Overlapping stretches would not be two witnesses. `missing` says why
    stacks are all there is."""
    length = policy.stack_windows
    if len(windows) < 2 * length:
        return _abstain(missing, f"{len(windows)} of {2 * length} windows of stacks gathered")
    older, newer = (_compare(half, policy) for half in (windows[-2 * length : -length], windows[-length:]))
    suspect = newer.suspect
    if suspect is not None and older.suspect is not None and older.suspect.rank == suspect.rank:
        return Verdict(
            Kind.SLOW_RANK,
            f"{ranks([suspect.rank])}: {suspect.cause.evidence}, and it waits less than they do",
            Severity.ALARM,
            Confidence.LOW,
            (suspect.rank,),
            impact_ratio=suspect.excess_share,
            cause=suspect.cause,
        )
    if newer.reason or older.reason:
        return _abstain(missing, newer.reason or older.reason)
    if suspect is not None or older.suspect is not None:
        return _abstain(missing, "a rank differs from its peers, but not for long enough")
    return Verdict(Kind.HEALTHY, f"no rank stands out in its stacks; {missing}", confidence=Confidence.LOW)


def _compare(windows: Sequence[JobWindow], policy: Policy) -> StackVerdict:
    evidence = merge_evidence(windows)
    profiles = {rank: e.stacks for rank, e in evidence.items() if e.stacks is not None}
    if len(profiles) < policy.ranks_seen_ratio * windows[-1].world_size:
        return StackVerdict(reason="stacks of too few ranks")
    starved = {rank: e.starved_share for rank, e in evidence.items() if e.starved_share is not None}
    return judge_stacks(profiles, starved, policy)


def _abstain(missing: str, reason: str) -> Verdict:
    return Verdict(Kind.INSUFFICIENT_DATA, f"{missing}; {reason}", confidence=Confidence.LOW)
