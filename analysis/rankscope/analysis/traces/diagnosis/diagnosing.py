"""What bounds a job, in words: each way of losing time, what it costs, the evidence, and what to try next.

The device's time is split into parts that do not overlap. Where it mostly computes, the job is compute-bound (or
memory-bound, if kernels that only move data outweigh the dense ones); else it is bound by what keeps it from computing.
A part is lost only while nothing computes: a copy or a collective under a kernel costs nothing and is no finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.traces.diagnosis.blame import blame, wait_ratios
from rankscope.analysis.traces.diagnosis.evidence import Evidence, Finding
from rankscope.analysis.traces.diagnosis.rules import RULES
from rankscope.analysis.traces.summaries.records import RankSummary
from rankscope.analysis.wording import ranks as ranks_in_words

if TYPE_CHECKING:
    from rankscope.analysis.traces.joins.joining import Join

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
