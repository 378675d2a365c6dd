"""Findings of the critical path that are no rank's fault: a slow stage, a slow group or link, uneven data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.quantities import count, quantity
from rankscope.analysis.stats.robust import Bools, Floats, median_or_nan
from rankscope.analysis.step_graph.links import SlowLink
from rankscope.analysis.step_graph.own_work import StageWork
from rankscope.analysis.step_graph.path_windows import PathWindow
from rankscope.analysis.step_graph.step_breakdown import MIN_BANDWIDTH_BYTES
from rankscope.analysis.verdicts.slow_communication import SlowTransfer
from rankscope.analysis.verdicts.slow_stage import ITS_PAST, THE_OTHERS, SlowStage
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict, percent, ranks

UNEVEN = Verdict(
    Kind.DATA_IMBALANCE,
    "all ranks wait in turn: the work of a step is spread unevenly, and differently each time",
    Severity.ALARM,
    cause=Cause("unknown", (), "self time varies by step"),
)
MAX_NAMED = 3


@dataclass(frozen=True)
class CommonFindings:
    """Of one window."""

    stage: SlowStage | None = None
    stage_lingering: SlowStage | None = None
    transfer: SlowTransfer | None = None
    imbalance_impact_ratio: float | None = None

    @property
    def is_remarkable(self) -> bool:
        return any(one is not None for one in (self.stage, self.transfer, self.imbalance_impact_ratio))


NOTHING_COMMON = CommonFindings()


def find_common(recent: Sequence[PathWindow], policy: Policy) -> CommonFindings:
    """What the last of some windows shows, in which no rank is slow or stalls."""
    window, common = recent[-1], recent[-1].common
    stage = None if common.stage is None else _slow_stage(common.stage, window, 1.0)
    lingering = None if common.stage is None else _slow_stage(common.stage, window, policy.hysteresis)
    transfer = None if common.link is None else _slow_transfer(common.link, window, policy)
    if stage is not None:
        return CommonFindings(stage)
    if transfer is not None:
        return CommonFindings(stage_lingering=lingering, transfer=transfer)
    uneven = None if common.uneven is None else _uneven(recent, policy)
    return CommonFindings(stage_lingering=lingering, imbalance_impact_ratio=uneven)


def judge_common(windows: Sequence[PathWindow], slow: Bools, policy: Policy) -> Verdict | None:
    """The finding of enough windows of a row. `slow`: by window, whether some rank is."""
    found = [
        NOTHING_COMMON if is_slow else find_common(windows[max(0, end - policy.windows_kept) : end], policy)
        for end, is_slow in enumerate(slow.tolist(), 1)
    ]
    stages = [one.stage for one in found]
    for stage in dict.fromkeys(one.stage for one in stages if one is not None):
        hits = [one if one is not None and one.stage == stage else None for one in stages]
        if _lasts([one is not None for one in hits], policy):
            return SlowStage.verdict([one for one in hits if one is not None], Severity.ALARM)
    transfers = [one.transfer for one in found]
    if _lasts([one is not None for one in transfers], policy):
        known = [one for one in transfers if one is not None]
        typical = SlowTransfer.typical(known)
        return Verdict(
            Kind.SLOW_COMMUNICATION,
            typical.reason,
            Severity.ALARM,
            group=typical.where,
            links=typical.links,
            impact_ratio=float(np.mean([one.impact_ratio for one in known])),
            cause=Cause("communication", (), typical.evidence),
        )
    uneven = [one.imbalance_impact_ratio for one in found]
    if _lasts([one is not None for one in uneven], policy):
        impact = float(np.mean([one for one in uneven if one is not None]))
        reason = f"{UNEVEN.reason}; {percent(impact)} of the time would come back with even work"
        return Verdict(UNEVEN.kind, reason, UNEVEN.severity, impact_ratio=impact, cause=UNEVEN.cause)
    return None


def _lasts(hits: Sequence[bool], policy: Policy) -> bool:
    kept = policy.windows_kept
    return any(sum(hits[end : end + kept]) >= policy.windows_for_alarm for end in range(len(hits)))


def _share(loss_ns: Floats, window: PathWindow) -> float:
    """Of the median step: a stall or a checkpoint is in few."""
    return median_or_nan(loss_ns) / max(median_or_nan(window.step_ns), 1.0)


def _slowed_down(job_growth: float, share: float) -> bool:
    """Whether the steps became longer by about the share of them that would come back."""
    return (job_growth - 1) * (1 - share) >= FIXED.path_slowdown_share * share


def _slow_stage(work: StageWork, window: PathWindow, part: float) -> SlowStage | None:
    """`part` of the way to the thresholds is enough."""
    share = _share(work.loss_ns, window)
    if share < part * FIXED.path_stage_impact_ratio:
        return None
    ratio, against = work.ratio, THE_OTHERS
    if work.is_against_past:
        ratio, against = work.growth, ITS_PAST
        together = work.least_growth - 1 >= FIXED.path_stage_ranks_share * (work.growth - 1)
        if not together or not _slowed_down(work.job_growth, share):
            return None
    needed = FIXED.path_stage_growth_ratio if work.is_against_past else FIXED.path_others_ratio
    if ratio < 1 + part * (needed - 1):
        return None
    return SlowStage(work.stage, tuple(work.ranks.tolist()), ratio, share, against)


def _slow_transfer(link: SlowLink, window: PathWindow, policy: Policy) -> SlowTransfer | None:
    share = _share(link.loss_ns, window)
    is_slow = link.ratio >= (policy.communication_ratio if link.is_against_past else FIXED.path_others_ratio)
    if not is_slow or link.score < FIXED.path_score or share < policy.communication_impact_ratio:
        return None
    if link.is_against_past:
        # A neighbour on the machine slows own work and transfers alike.
        is_busy = link.own_growth * policy.communication_ratio > link.ratio
        if is_busy or not _slowed_down(link.job_growth, share):
            return None
    return SlowTransfer(
        link.ratio,
        share,
        link.transfer_ns / 1e9,
        link.usual_ns / 1e9,
        where=_name(link),
        links=tuple(name.ranks for name in link.names),
        rates=_rates(link),
        against="its own past" if link.is_against_past else "the other groups",
    )


def _name(link: SlowLink) -> str:
    """`the data group of ranks 0 and 2`, `the pipeline link of ranks 1 and 3`, `3 of 8 tensor groups (…)`"""
    kind = "" if link.kind.value == "unknown" else f"{link.kind.value} "
    what = "link" if link.names[0].is_pair else "group"
    if len(link.names) == 1:
        return f"the {kind}{what} of {ranks(link.names[0].ranks)}"
    more = ", …" if len(link.names) > MAX_NAMED else ""
    listed = ", ".join(ranks(name.ranks) for name in link.names[:MAX_NAMED])
    if len(link.names) == link.of_kind:
        return f"{'both' if link.of_kind == 2 else f'all {link.of_kind}'} {kind}{what}s ({listed}{more})"
    return f"{len(link.names)} of {count(link.of_kind, f'{kind}{what}')} ({listed}{more})"


def _rates(link: SlowLink) -> str:
    if link.bus_bytes < MIN_BANDWIDTH_BYTES or link.transfer_ns <= 0 or link.usual_ns <= 0:
        return ""
    now, usual = (quantity(1e9 * link.bus_bytes / time, "B/s") for time in (link.transfer_ns, link.usual_ns))
    return f", at {now} instead of {usual}"


def _uneven(recent: Sequence[PathWindow], policy: Policy) -> float | None:
    """The share of some windows that even work would bring back. Few steps show it badly, as chance makes ranks uneven
    in each of them. None where one rank is mostly the last of its stage: it is late, and the data is not uneven."""
    stages = recent[-1].stages
    alike = [one for one in recent if np.array_equal(one.stages, stages)]
    losses = np.concatenate(
        [np.zeros(len(one.step_ns)) if one.common.uneven is None else one.common.uneven.loss_ns for one in alike]
    )
    step_ns = np.concatenate([one.step_ns for one in alike])
    usual_ns = max(median_or_nan(step_ns), 1.0)
    share = float(losses.mean()) / usual_ns
    # A stall is in few steps.
    rest = np.sort(losses)[: max(1, round(len(losses) * (1 - FIXED.path_stalled_share)))]
    if share < FIXED.path_uneven_impact_ratio or float(rest.mean()) / usual_ns < FIXED.path_uneven_rest_ratio:
        return None
    held_ns = np.sum([one.common.uneven.held_ns for one in alike if one.common.uneven is not None], axis=0)
    for stage in np.unique(stages).tolist():
        held = held_ns[stages == stage]
        whole, fair = float(held.sum()), 1 / len(held)
        if len(held) < 2 or not whole > 0:
            continue
        if (float(held.max()) / whole - fair) / (1 - fair) >= policy.imbalance_one_rank_share:
            return None
    return share
