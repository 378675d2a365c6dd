"""What bounds a job: each way of losing time, its cost, the evidence, and what to try next.

The device's time is split into parts that do not overlap. If the device mostly computes, the job is compute-bound
(or memory-bound, if kernels that only move data outweigh the dense ones); otherwise it is bound by what prevents
computation. Time is lost only while nothing computes: a copy or a collective that overlaps a kernel costs nothing
and is not a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.quantities import quantity
from rankscope.analysis.traces.diagnosis_rules import RULES, SUGGESTIONS, Evidence, Finding, per_step_share
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words

if TYPE_CHECKING:
    from rankscope.analysis.traces.joins.join import Join

_PARTS = {
    "compute": "computation",
    "memory_kernels": "moving data in memory",
    "memory_copies": "copying",
    "input": "waiting for input",
    "host": "waiting for the host to launch",
    "synchronisation": "the host waiting for the device",
    "other": "idle time of unknown reason",
}
# The share of time from which on the device mostly computes.
_MOSTLY_RATIO = 0.5


@dataclass(frozen=True)
class Diagnosis:
    bound: str  # compute, communication, input, host, memory; unknown if nothing ran
    sentence: str
    shares: dict[str, float]  # shares of the span by part: the typical rank among those that set the pace
    findings: tuple[Finding, ...]  # largest saving first


def diagnose(ranks: Sequence[RankSummary], join: Join | None = None, policy: Policy = DEFAULT_POLICY) -> Diagnosis:
    """Diagnose the ranks of one job, with their join if there is one. A finding must be worth `policy.impact_ratio`
    of a step."""
    usable = [rank for rank in ranks if rank.span_us > 0]
    if not usable:
        return Diagnosis("unknown", "the trace contains no work", {}, ())
    evidence = Evidence(tuple(usable), join.exposed_wait_ratio if join else {})
    findings = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    if join is not None:
        findings += rank_findings(join, evidence, policy)
    worth = [finding for finding in findings if finding.saving_ratio >= policy.impact_ratio]
    worth.sort(key=lambda finding: -finding.saving_ratio)
    # The slow ranks set the pace. What bounds the others, which wait for them, is irrelevant.
    pace = [rank for rank in usable if join is not None and rank.rank in join.culprits] or usable
    shares = evidence.shares_of(pace)
    bound = _bound(shares)
    who = f"{ranks_in_words(join.culprits)}: " if join is not None and len(pace) < len(usable) else ""
    return Diagnosis(bound, who + _sentence(bound, shares, worth), shares, tuple(worth))


def _bound(shares: dict[str, float]) -> str:
    working = {"compute": shares["compute"], "memory": shares["memory_kernels"] + shares["memory_copies"]}
    if sum(working.values()) >= _MOSTLY_RATIO:
        return max(working, key=lambda part: working[part])
    lost = {
        "communication": shares["communication"] + shares["pipeline"],
        "input": shares["input"],
        "host": shares["host"] + shares["synchronisation"],
        "memory": shares["memory_copies"],
    }
    return max(lost, key=lambda part: lost[part]) if max(lost.values()) > 0 else "compute"


def _sentence(bound: str, shares: dict[str, float], findings: Sequence[Finding]) -> str:
    busy = shares["compute"] + shares["memory_kernels"]
    messages = f", {_percent(shares['pipeline'])} pipeline waits" if shares["pipeline"] > 0 else ""
    sentence = {
        "compute": f"compute-bound: kernels compute {_percent(busy)} of the time",
        "memory": f"memory-bound: kernels and copies that only move data take "
        f"{_percent(shares['memory_kernels'] + shares['memory_copies'])} of the time, dense computation "
        f"{_percent(shares['compute'])}",
        "communication": f"communication-bound: {_percent(shares['communication'])} of the time is exposed "
        f"communication{messages}, computation takes {_percent(busy)}",
        "input": f"input-bound: {_percent(shares['input'])} of the time the device waits for data",
        "host": f"host-bound: {_percent(shares['host'] + shares['synchronisation'])} of the time the device waits for "
        "the host to launch work",
    }[bound]
    if not findings:
        return f"{sentence}; little to gain elsewhere"
    best = findings[0]
    return f"{sentence}; most is lost to {best.title}: {_percent(best.saving_ratio)} of the step could be saved at most"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.0f} %"


def rank_findings(join: Join, evidence: Evidence, policy: Policy) -> list[Finding]:
    """The join's verdict as a finding; without a verdict, waiting for the last rank in general."""
    if join.verdict.is_finding and join.impact_ratio is not None:
        why, numbers = _excess(join, evidence, policy)
        return [
            Finding(
                kind=join.verdict.value,
                bound="communication",
                title=_title(join),
                saving_us=join.impact_ratio * evidence.step_us,
                saving_ratio=join.impact_ratio,
                evidence=f"{join.reason}{why}",
                suggestion=SUGGESTIONS.get(join.verdict.value, "Look at the ranks named here first."),
                numbers={"impact_ratio": join.impact_ratio, **numbers},
                ranks=join.culprits,
            )
        ]
    saving, ratio = evidence.lost("waiting")
    latest = max(join.last_arrivals, key=lambda rank: join.last_arrivals[rank], default=None)
    often = ""
    # Of a job in which no rank stands out, the join's reason names a rank that is always last.
    if latest is not None and join.collectives_matched and join.verdict.value != "healthy":
        often = f"; rank {latest} was last in {join.last_arrivals[latest]} of {join.collectives_matched}"
    words = f"ranks wait {quantity(saving, 'us')} a step in collectives for the last one to arrive{often}"
    return [evidence.finding("waiting_for_ranks", ratio, words, {"wait_us": saving})]


def _title(join: Join) -> str:
    kind: str = join.verdict.value
    return {
        "slow_rank": f"waiting for {ranks_in_words(join.culprits)}" if join.culprits else "waiting for a slow rank",
        "slow_stage": f"waiting for pipeline stage {join.stage}",
        "data_imbalance": "work spread unevenly over ranks",
        "slow_communication": "communication slower than it should be",
    }.get(kind, kind.replace("_", " "))


def _excess(join: Join, evidence: Evidence, policy: Policy) -> tuple[str, dict[str, float]]:
    """The part of the culprits' time that contains most of their excess over the other ranks."""
    slow = [rank for rank in evidence.ranks if rank.rank in join.culprits]
    others = [rank for rank in evidence.ranks if rank.rank not in join.culprits]
    if join.verdict.value != "slow_rank" or not slow or not others:
        return "", {}
    excess = {
        part: float(
            np.median([per_step_share(rank, rank.parts_us[part]) for rank in slow])
            - np.median([per_step_share(rank, rank.parts_us[part]) for rank in others])
        )
        for part in _PARTS
    }
    most = max(excess, key=lambda part: excess[part])
    grown = sum(value for value in excess.values() if value > 0)
    if grown <= 0 or excess[most] < policy.cause_share * grown:
        return "", {}
    return (
        f"; of its time, {_PARTS[most]} is {quantity(excess[most], 'us')} a step longer than its peers'",
        {f"excess_{most}_us": excess[most]},
    )
