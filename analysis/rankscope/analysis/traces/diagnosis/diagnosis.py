"""What bounds a job, in words: each way of losing time, what it costs, the evidence, and what to try next.

The device's time is split into parts that do not overlap. Where it mostly computes, the job is compute-bound (or
memory-bound, if kernels that only move data outweigh the dense ones); else it is bound by what keeps it from computing.
A part is lost only while nothing computes: a copy or a collective under a kernel costs nothing and is no finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.quantities import quantity
from rankscope.analysis.traces.diagnosis.findings import NEXT, RULES, Evidence, Finding, of_one_step
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words

if TYPE_CHECKING:
    from rankscope.analysis.traces.joins.join import Join


# What a join of ranks adds to a diagnosis: waiting is not transferring, and whoever holds the others up is named.


def wait_ratios(join: Join) -> dict[int, float]:
    """Of each rank's communication that nothing hid, what was waiting for others; of all of it where no steps are
    known."""
    ratios = {}
    steps = join.steps
    for row, rank in enumerate(steps.rank.tolist()):
        wait, transfer = float(np.nansum(steps.wait_ns[row])), float(np.nansum(steps.transfer_ns[row]))
        if wait + transfer > 0:
            ratios[rank] = wait / (wait + transfer)
    for rank, waits in join.waits.items():
        if rank not in ratios and waits.wait_us + waits.transfer_us > 0:
            ratios[rank] = waits.wait_us / (waits.wait_us + waits.transfer_us)
    return ratios


def blame(join: Join, evidence: Evidence, policy: Policy) -> list[Finding]:
    """The verdict as a finding; where there is none, waiting for whoever comes last in turn."""
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
                suggestion=NEXT.get(join.verdict.value, "Look at the ranks named here first."),
                numbers={"impact_ratio": join.impact_ratio, **numbers},
                ranks=join.culprits,
            )
        ]
    saving, ratio = evidence.lost("waiting")
    latest = max(join.last_arrivals, key=lambda rank: join.last_arrivals[rank], default=None)
    often = ""
    if latest is not None and join.collectives_matched:
        often = f"; rank {latest} came last in {join.last_arrivals[latest]} of {join.collectives_matched}"
    return [
        Finding(
            kind="waiting_for_ranks",
            bound="communication",
            title="waiting for whoever comes last to a collective",
            saving_us=saving,
            saving_ratio=ratio,
            evidence=f"ranks wait {quantity(saving, 'us')} a step in collectives for the last one to arrive{often}",
            suggestion=NEXT["waiting_for_ranks"],
            numbers={"wait_us": saving},
        )
    ]


def _title(join: Join) -> str:
    kind: str = join.verdict.value
    return {
        "slow_rank": f"waiting for {ranks_in_words(join.culprits)}" if join.culprits else "waiting for a slow rank",
        "slow_stage": f"waiting for pipeline stage {join.stage}",
        "data_imbalance": "work spread unevenly over ranks",
        "slow_communication": "communication slower than it should be",
    }.get(kind, kind.replace("_", " "))


def _excess(join: Join, evidence: Evidence, policy: Policy) -> tuple[str, dict[str, float]]:
    """The part of the culprits' time that holds most of what they take longer than the others."""
    guilty = [rank for rank in evidence.ranks if rank.rank in join.culprits]
    innocent = [rank for rank in evidence.ranks if rank.rank not in join.culprits]
    if join.verdict.value != "slow_rank" or not guilty or not innocent:
        return "", {}
    excess = {
        part: float(
            np.median([of_one_step(rank, rank.parts_us[part]) for rank in guilty])
            - np.median([of_one_step(rank, rank.parts_us[part]) for rank in innocent])
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


_PARTS = {
    "compute": "computation",
    "memory_kernels": "moving data in memory",
    "memory_copies": "copying",
    "input": "waiting for input",
    "host": "waiting for the host to launch",
    "synchronisation": "the host waiting for the device",
    "other": "idle time of unknown reason",
}


# From here on the device computes more than it does anything else.
_MOSTLY = 0.5


@dataclass(frozen=True)
class Diagnosis:
    bound: str  # compute, communication, input, host, memory; unknown where nothing ran
    sentence: str
    shares: dict[str, float]  # of the span, by part: of the typical rank among those that set the pace
    findings: tuple[Finding, ...]  # in order of the time each would save


def diagnose(ranks: Sequence[RankSummary], join: Join | None = None, policy: Policy = DEFAULT_POLICY) -> Diagnosis:
    """Ranks of one job, and what their join found. A finding needs to be worth `policy.impact_ratio` of a step."""
    usable = [rank for rank in ranks if rank.span_us > 0]
    if not usable:
        return Diagnosis("unknown", "nothing ran in what was traced", {}, ())
    evidence = Evidence(tuple(usable), wait_ratios(join) if join else {})
    findings = [finding for rule in RULES for finding in rule(evidence)]
    if join is not None:
        findings += blame(join, evidence, policy)
    worth = [finding for finding in findings if finding.saving_ratio >= policy.impact_ratio]
    worth.sort(key=lambda finding: -finding.saving_ratio)
    # The slow one sets the pace: what bounds the others, who wait for it, bounds nothing.
    pace = [rank for rank in usable if join is not None and rank.rank in join.culprits] or usable
    shares = evidence.shares_of(pace)
    bound = _bound(shares)
    who = f"{ranks_in_words(join.culprits)}: " if join is not None and len(pace) < len(usable) else ""
    return Diagnosis(bound, who + _sentence(bound, shares, worth), shares, tuple(worth))


def _bound(shares: dict[str, float]) -> str:
    working = {"compute": shares["compute"], "memory": shares["memory_kernels"] + shares["memory_copies"]}
    if sum(working.values()) >= _MOSTLY:
        return max(working, key=lambda part: working[part])
    lost = {
        "communication": shares["communication"],
        "input": shares["input"],
        "host": shares["host"] + shares["synchronisation"],
        "memory": shares["memory_copies"],
    }
    return max(lost, key=lambda part: lost[part]) if max(lost.values()) > 0 else "compute"


def _sentence(bound: str, shares: dict[str, float], findings: Sequence[Finding]) -> str:
    busy = shares["compute"] + shares["memory_kernels"]
    said = {
        "compute": f"compute-bound: kernels compute {_percent(busy)} of the time",
        "memory": f"memory-bound: kernels and copies that only move data take "
        f"{_percent(shares['memory_kernels'] + shares['memory_copies'])} of the time, dense computation "
        f"{_percent(shares['compute'])}",
        "communication": f"communication-bound: {_percent(shares['communication'])} of the time goes to communication "
        f"that nothing hides, computation gets {_percent(busy)}",
        "input": f"input-bound: {_percent(shares['input'])} of the time the device waits for data",
        "host": f"host-bound: {_percent(shares['host'] + shares['synchronisation'])} of the time the device waits for "
        "the host to launch work",
    }[bound]
    if not findings:
        return f"{said}; little to gain elsewhere"
    best = findings[0]
    return f"{said}; most is lost to {best.title}: {_percent(best.saving_ratio)} of the step at best would come back"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.0f} %"
