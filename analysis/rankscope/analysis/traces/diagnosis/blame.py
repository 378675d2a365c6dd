"""What a join of ranks adds to a diagnosis: waiting is not transferring, and whoever holds the others up is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.drawing.quantities import quantity
from rankscope.analysis.policy import Policy
from rankscope.analysis.traces.diagnosis.advice import NEXT
from rankscope.analysis.traces.diagnosis.evidence import Evidence, Finding, of_one_step
from rankscope.analysis.wording import ranks as ranks_in_words

if TYPE_CHECKING:
    from rankscope.analysis.traces.joins.joining import Join


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
    kind = join.verdict.value
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
