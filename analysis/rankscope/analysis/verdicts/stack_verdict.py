"""Level 0: no step is known, only where each rank's training thread was seen. It names a rank only when its own work
exceeds that of every peer *and* its waiting is missing; otherwise it abstains. Equal stacks do not show that a job is
healthy: a loss that all ranks share, or that sits in few steps, is not seen in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

from rankscope.analysis.profiles.comparison import sentence
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.phases import WAITING_PHASES
from rankscope.analysis.verdicts.causes import FRAMES_SHOWN
from rankscope.analysis.verdicts.stack_profiles import StackHistory, frames_in_excess
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict, ranks
from rankscope.analysis.verdicts.window_merge import merge_evidence
from rankscope.analysis.verdicts.windows import EXCUSED_PHASES, JobWindow, StackProfile, step_phase

NO_STEPS = "no steps are known"
NEXT_STEP = "next step: the probe; in a loop without an optimizer, call rankscope.probe.step() after each step"
TRAINING_PHASES = frozenset({*WAITING_PHASES, "input", "forward", "backward_code", "optimizer"})
PEERS_COMPARED = 64


@dataclass(frozen=True)
class Suspect:
    rank: int
    excess_share: float  # of the time; about what would come back
    cause: Cause


@dataclass(frozen=True)
class StackVerdict:
    """Nobody (`suspect` None, `reason` empty), one rank, or an abstention with its reason."""

    suspect: Suspect | None = None
    reason: str = ""
    samples: int = 0  # of the rank with the fewest


def judge_stacks(
    profiles: Mapping[int, StackProfile], starved_shares: Mapping[int, float], policy: Policy
) -> StackVerdict:
    """Compare the ranks of one cohort over the same stretch of time."""
    if len(profiles) < 2:
        return StackVerdict(reason="one rank has nobody to be compared with")
    thin = sorted(rank for rank, profile in profiles.items() if profile.samples < policy.stack_samples_needed)
    if thin:
        return StackVerdict(reason=f"fewer than {policy.stack_samples_needed} stack samples of rank {thin[0]}")
    excused = [sum(p.phase_shares.get(phase, 0.0) for phase in EXCUSED_PHASES) for p in profiles.values()]
    if max(excused) > FIXED.stack_excused_share:
        return StackVerdict(reason="a checkpoint or a compilation is going on")
    training = [sum(p.phase_shares.get(phase, 0.0) for phase in TRAINING_PHASES) for p in profiles.values()]
    if max(training) < FIXED.stack_training_share:
        return StackVerdict(reason="no training is seen in the stacks yet")  # imports, and what comes before the loop
    excess = {rank: _excess(rank, profiles, starved_shares, policy) for rank in profiles}
    ranked = sorted(profiles, key=lambda rank: excess[rank].excess_share, reverse=True)
    first, second = excess[ranked[0]], excess[ranked[1]]
    if first.excess_share < policy.stack_excess_share:
        return StackVerdict(samples=min(profile.samples for profile in profiles.values()))
    if second.excess_share > FIXED.stack_second_share * first.excess_share:
        return StackVerdict(reason="several ranks differ from their peers; stacks alone cannot tell which is late")
    others = [_waiting(profiles[rank]) for rank in ranked[1:]]
    missing = min(others) - _waiting(profiles[ranked[0]])
    if missing < FIXED.stack_waiting_share * first.excess_share:
        return StackVerdict(reason=f"rank {ranked[0]} differs from its peers, but does not wait less than they do")
    return StackVerdict(suspect=first)


def _waiting(profile: StackProfile) -> float:
    return sum(profile.phase_shares.get(phase, 0.0) for phase in WAITING_PHASES)


def _excess(
    rank: int, profiles: Mapping[int, StackProfile], starved_shares: Mapping[int, float], policy: Policy
) -> Suspect:
    mine = profiles[rank]
    others = [profile for other, profile in profiles.items() if other != rank]
    peers_starved = [starved_shares[other] for other in profiles if other != rank and other in starved_shares]
    if rank in starved_shares and peers_starved:
        starved = starved_shares[rank] - max(peers_starved)
        if starved > policy.stack_starved_share:
            evidence = f"{starved:.0%} of the time without a CPU, more than any peer"
            return Suspect(rank, starved, Cause("starved", (), evidence))
    found = frames_in_excess(mine, others, usual=max)
    significant = [e for e in found if _score(e.share, e.excess, mine.samples) >= policy.stack_score]
    if not significant:
        return Suspect(rank, 0.0, Cause())
    largest = max(significant, key=lambda e: e.excess)
    seen = {frame[:3]: frame for frame in mine.frames}
    frames = tuple(seen[e.frame[:3]] for e in significant[:FRAMES_SHOWN])
    evidence = f"seen in {frames[0].function} {largest.excess:.0%} of the time more than any peer"
    return Suspect(rank, largest.excess, Cause(step_phase(frames[0].phase), frames, evidence))


def _score(share: float, excess: float, samples: int) -> float:
    """How many standard errors the excess is away from none, for two shares of about `samples` observations."""
    usual = max(share - excess, 0.0)
    variance = share * (1 - share) + usual * (1 - usual) + 1 / samples
    return excess / sqrt(variance / samples)


class StackJudge:
    """The verdicts on a job where no step is known."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._history = StackHistory()

    def judge(self, windows: Sequence[JobWindow], policy: Policy, missing: str = NO_STEPS) -> Verdict:
        """`windows` are the latest, oldest first, one more than in the call before. `missing` is the reason why there
        are only stacks."""
        verdict = _judge_windows(windows, policy, missing)
        suspect = verdict.culprits[0] if verdict.culprits else None
        fresh = windows[-1:] if suspect == self._suspect else windows
        if suspect != self._suspect:
            self._suspect, self._history = suspect, StackHistory()
        if suspect is None or not verdict.cause.frames:
            return verdict
        peers = [rank for rank in windows[-1].columns.rank.tolist() if rank != suspect][:PEERS_COMPARED]
        evidence = merge_evidence(fresh, [suspect, *peers])
        self._history.add({rank: e.stacks for rank, e in evidence.items() if e.stacks is not None})
        cause = verdict.cause
        proven = self._history.proven(suspect, peers, {Frame(*frame[:3]) for frame in cause.frames})
        if not proven:
            return verdict
        said = f"{cause.evidence}; {sentence(ranks([suspect]), proven[0])}"
        return replace(verdict, cause=replace(cause, evidence=said))


def _judge_windows(windows: Sequence[JobWindow], policy: Policy, missing: str) -> Verdict:
    """Stacks of two stretches of time must agree. Overlapping ones would not be independent."""
    length = policy.stack_windows
    if len(windows) < 2 * length:
        reason = f"{missing}; {len(windows)} of {2 * length} windows of stacks gathered"
        return Verdict(Kind.INSUFFICIENT_DATA, reason, confidence=Confidence.LOW)
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
    whole = _compare(windows[-2 * length :], policy)
    if suspect is not None or older.suspect is not None or whole.suspect is not None:
        return _abstain(missing, "a rank differs from its peers, but not for long enough")
    if whole.reason:
        return _abstain(missing, whole.reason)
    if not _can_rule_out(whole.samples, policy):
        return _abstain(missing, f"{whole.samples} stack samples of a rank are too few to rule out a slow one")
    if missing == NO_STEPS:
        return _abstain(missing, "no rank stands out in its stacks")
    return Verdict(Kind.HEALTHY, f"no rank stands out in its stacks; {missing}", confidence=Confidence.LOW)


def _can_rule_out(samples: int, policy: Policy) -> bool:
    """Whether a rank that is clearly slow, by twice the threshold, would have been found in half of the samples: chance
    may hide it in as many."""
    share = 2 * policy.stack_excess_share
    return samples > 1 and _score(share, share, samples // 2) >= policy.stack_score


def _compare(windows: Sequence[JobWindow], policy: Policy) -> StackVerdict:
    evidence = merge_evidence(windows)
    profiles = {rank: e.stacks for rank, e in evidence.items() if e.stacks is not None}
    if len(profiles) < policy.ranks_seen_ratio * windows[-1].world_size:
        return StackVerdict(reason="stacks of too few ranks")
    starved = {rank: e.starved_share for rank, e in evidence.items() if e.starved_share is not None}
    return judge_stacks(profiles, starved, policy)


def _abstain(missing: str, reason: str) -> Verdict:
    advice = f" ({NEXT_STEP})" if missing == NO_STEPS else ""
    return Verdict(Kind.INSUFFICIENT_DATA, f"{missing}; {reason}{advice}", confidence=Confidence.LOW)
