"""The verdict on a capture: the rules that watch a running job, with the capture's few steps as their windows. Ranks
with different roles are judged by the critical path, all others by the sums of their own work.

A capture has fewer than the 20 steps that a running job is judged by. A finding must therefore hold in three of five
steps, as it must in three of five windows there, and a rank that is named must work longer than the others by more than
the differences between steps explain. Below five steps confidence is low."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, median_or_nan
from rankscope.analysis.step_graph.path_windows import PathWindow
from rankscope.analysis.traces.joins.comparison import MIN_STEPS, RankExcess, compare_losses, compare_ranks
from rankscope.analysis.traces.joins.self_time import StepTimes
from rankscope.analysis.verdicts.critical_path import PathHistory, too_little_compared
from rankscope.analysis.verdicts.findings import ReadyWindow, imbalance_impact, observe
from rankscope.analysis.verdicts.job_summary import summarize
from rankscope.analysis.verdicts.long_steps import LongStepHistory
from rankscope.analysis.verdicts.path_findings import UNEVEN
from rankscope.analysis.verdicts.rules import HEALTHY, RecentWindows
from rankscope.analysis.verdicts.slow_communication import TransferBaseline
from rankscope.analysis.verdicts.slow_rank import screen
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict, percent
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words
from rankscope.analysis.verdicts.windows import JobWindow, RankColumns, columns_of

STEPS_FOR_CONFIDENCE = 5
STEPS_FOR_IMBALANCE = 3
# A rank is always last from this share of the collectives.
ALWAYS_LAST_RATIO = 0.9
# Of a rank's steps, in communication of which it is not known how much was waiting for others.
MAX_UNMATCHED_RATIO = 0.10
# Ranks that take turns on a CPU wait for each other in turn as well, and a trace does not show the queue. Uneven data
# must cost several turns of a scheduler a step.
HOST_IMBALANCE_NS = 50e6


def judge_steps(
    times: StepTimes,
    world_size: int,
    traced: Sequence[int],
    collectives_matched: int,
    clock_residual_us: float | None,
    stage_of: Mapping[int, int] | None,
    policy: Policy,
    last_arrivals: Mapping[int, int] | None = None,
    path: PathWindow | None = None,
    by_path: bool = False,
) -> Verdict:
    """`last_arrivals` is how often each rank was the last, if known. `by_path`: ranks may have different roles."""
    missing = _abstain(times, world_size, traced, collectives_matched, clock_residual_us, policy)
    if missing:
        return Verdict(Kind.INSUFFICIENT_DATA, missing, confidence=Confidence.LOW)
    if by_path:
        return _judge_path(path, policy)
    times = times.take(_unmatched_ratio(times) <= MAX_UNMATCHED_RATIO, _complete_steps(times, world_size, policy))
    count = len(times.step)
    needed = max(2, ceil(count * policy.windows_for_alarm / policy.windows_kept))
    policy = replace(policy, windows_kept=count, windows_for_alarm=needed, windows_for_warning=needed)
    spread = _spread(times)
    recent, baseline, long_steps = RecentWindows(policy), TransferBaseline(), LongStepHistory()

    def ready(steps: slice) -> ReadyWindow:
        return _ready(_columns(times, steps, spread, stage_of or {}), world_size, policy)

    verdict = HEALTHY
    for step in range(count):
        verdict = recent.decide(observe(ready(slice(step, step + 1)), baseline, long_steps, policy), HEALTHY)
    if verdict.kind is Kind.HEALTHY and count >= STEPS_FOR_IMBALANCE:
        # All steps together: in each of them some rank may stand out, another one each time.
        impact = imbalance_impact(ready(slice(None)).summary, policy)
        verdict = verdict if impact is None else replace(UNEVEN, impact_ratio=impact)
    if verdict.kind is Kind.DATA_IMBALANCE and times.on_host and _lost_ns(verdict, times) < HOST_IMBALANCE_NS:
        verdict = HEALTHY
    verdict = _sure(verdict, compare_ranks(times, stage_of or {}), times, last_arrivals or {}, policy)
    confidence = Confidence.HIGH if count >= STEPS_FOR_CONFIDENCE else Confidence.LOW
    return replace(verdict, confidence=confidence)


def _judge_path(path: PathWindow | None, policy: Policy) -> Verdict:
    count = 0 if path is None else len(path.steps)
    confidence = Confidence.HIGH if count >= STEPS_FOR_CONFIDENCE else Confidence.LOW
    if path is None or count < MIN_STEPS:
        reason = f"complete steps in common after the first: {count}, needed: {MIN_STEPS}; record more"
        return Verdict(Kind.INSUFFICIENT_DATA, reason, confidence=Confidence.LOW)
    if path.compared < FIXED.path_compared_share:
        return Verdict(Kind.INSUFFICIENT_DATA, too_little_compared(path.compared), confidence=confidence)
    excesses = compare_losses(path)
    is_clear = {excess.rank: excess.is_clear for excess in excesses}
    slow_steps = np.nan_to_num(path.losses_ns) >= FIXED.path_impact_ratio * path.step_ns[:, None]
    often = slow_steps.sum(axis=0) >= ceil(count * policy.windows_for_alarm / policy.windows_kept)
    slow = PathHistory(policy).add(path).slow & often & [is_clear[rank] for rank in path.ranks.tolist()]
    costly = path.ranks[path.returns >= FIXED.path_impact_ratio].tolist()
    named = path.ranks[slow].tolist()
    sentences = [excess.sentence(path.ranks.tolist()) for excess in excesses if excess.rank in (named or costly)]
    if named:
        return Verdict(
            Kind.SLOW_RANK,
            sentences[0],
            Severity.ALARM,
            culprits=tuple(named),
            impact_ratio=min(float(path.returns[slow].sum()), 1.0),
            confidence=confidence,
        )
    if costly:
        reason = f"{sentences[0]}; record more steps to be sure"
        return Verdict(Kind.INSUFFICIENT_DATA, reason, confidence=confidence)
    return Verdict(Kind.HEALTHY, "no rank holds up the others on the critical path", confidence=confidence)


def _sure(
    verdict: Verdict,
    excesses: Sequence[RankExcess],
    times: StepTimes,
    last_arrivals: Mapping[int, int],
    policy: Policy,
) -> Verdict:
    """The verdict with those culprits only whose excess is clear; without a culprit, the reason says who is last."""
    recorded = times.rank.tolist()
    if verdict.kind is Kind.SLOW_RANK:
        culprits = tuple(e.rank for e in excesses if e.rank in verdict.culprits and e.is_clear)
        if len(culprits) == len(verdict.culprits):
            return verdict
        if culprits:
            return replace(verdict, culprits=tuple(sorted(culprits)), group="")
        unsure = next(excess for excess in excesses if excess.rank in verdict.culprits)
        return Verdict(Kind.INSUFFICIENT_DATA, f"{unsure.sentence(recorded)}; record more steps to be sure")
    if verdict.kind is not Kind.HEALTHY or not excesses:
        return verdict
    late, arrivals = excesses[0], sum(last_arrivals.values())
    is_last = last_arrivals.get(late.rank, 0) >= max(ALWAYS_LAST_RATIO * arrivals, 1)
    if not is_last or late.excess_seconds * 1e9 < policy.impact_ratio * median_or_nan(times.step_ns):
        return verdict
    reason = f"rank {late.rank} is last in {last_arrivals[late.rank]} of {arrivals} collectives: "
    reason += late.sentence(recorded)
    if late.is_clear:
        return replace(verdict, reason=f"{reason}, less than a slow rank")
    return Verdict(Kind.INSUFFICIENT_DATA, f"{reason}; record more steps to be sure")


def _abstain(
    times: StepTimes,
    world_size: int,
    traced: Sequence[int],
    collectives_matched: int,
    clock_residual_us: float | None,
    policy: Policy,
) -> str:
    """Why there is not enough to judge by; empty if there is."""
    if len(traced) < 2:
        return "one rank's trace: there is nobody to compare it with"
    if len(traced) < policy.ranks_seen_ratio * world_size:
        return f"traces of {len(traced)} of {world_size} ranks; who was late among the others is not known"
    if not collectives_matched:
        return "no collective could be matched between ranks"
    if len(times.rank) < policy.ranks_seen_ratio * world_size:
        silent = sorted(set(traced) - set(times.rank.tolist()))
        return f"{ranks_in_words(silent)}: no steps, or no collective in common with another trace"
    complete = _complete_steps(times, world_size, policy)
    if complete.sum() < MIN_STEPS:
        return f"complete steps in common: {int(complete.sum())}, needed: {MIN_STEPS}; record more"
    unmatched = _unmatched_ratio(times)
    clear = unmatched <= MAX_UNMATCHED_RATIO
    if clear.sum() < policy.ranks_seen_ratio * world_size:
        blurred = times.rank[~clear].tolist()
        share = percent(float(np.median(unmatched[~clear])))
        return f"{ranks_in_words(blurred)}: {share} of a step is communication that could not be matched"
    if clock_residual_us is not None and clock_residual_us * 1000 > median_or_nan(times.step_ns):
        return "the clocks could not be aligned to within a step"
    return ""


def _complete_steps(times: StepTimes, world_size: int, policy: Policy) -> Bools:
    return np.asarray((~np.isnan(times.step_ns)).sum(axis=0) >= policy.ranks_seen_ratio * world_size)


def comparable(times: StepTimes) -> StepTimes:
    """The ranks of which it is known how much they waited."""
    return times.take(_unmatched_ratio(times) <= MAX_UNMATCHED_RATIO)


def _lost_ns(verdict: Verdict, times: StepTimes) -> float:
    return (verdict.impact_ratio or 0.0) * median_or_nan(times.step_ns)


def _unmatched_ratio(times: StepTimes) -> Floats:
    return np.asarray(np.nansum(times.unmatched_ns, axis=1) / np.maximum(np.nansum(times.step_ns, axis=1), 1.0))


def _spread(times: StepTimes) -> Floats:
    """A rank's slow steps against its fast ones, each step against what it took the others: a first step that is slow
    for all ranks alike is not noise of a rank. NaN where it is not known."""
    typical = np.array([median_or_nan(column) for column in times.self_ns.T])
    spread = np.full(len(times.rank), np.nan)
    for row, own in enumerate(times.self_ns):
        known = (own > 0) & (typical > 0)
        if known.any():
            low, high = np.quantile(own[known] / typical[known], [0.1, 0.9])
            spread[row] = max(high / low, 1.0)
    return spread


def _columns(times: StepTimes, steps: slice, spread: Floats, stage_of: Mapping[int, int]) -> RankColumns:
    rows = []
    for row, rank in enumerate(times.rank.tolist()):
        length = times.step_ns[row, steps]
        known = ~np.isnan(length)
        if not known.any():
            continue
        wait, transfer = (float(v[row, steps][known].mean()) / 1e9 for v in (times.wait_ns, times.transfer_ns))
        step = float(length[known].mean()) / 1e9
        rows.append(
            {
                "rank": rank,
                "stage": stage_of.get(rank, -1),
                "steps": int(known.sum()),
                "step_seconds": step,
                "self_seconds": step - wait,
                "wait_seconds": wait + transfer,
                "transfer_seconds": transfer,
                "self_spread_ratio": float(spread[row]),
            }
        )
    return columns_of(rows)


def _ready(columns: RankColumns, world_size: int, policy: Policy) -> ReadyWindow:
    screened = screen(columns, policy)
    window = JobWindow(0.0, median_or_nan(columns.step_seconds), world_size, columns, is_captured=True)
    return ReadyWindow(window, screened, slice(0, len(columns)), summarize(columns, screened, 1)[0])
