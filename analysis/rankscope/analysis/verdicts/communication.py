"""Is communication itself slow? Compared with the job's own past, when nobody is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from statistics import median
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints, grouped_min, number_groups
from rankscope.analysis.verdicts.job_summary import JobSummary
from rankscope.analysis.verdicts.thresholds import Policy

BASELINE_KEPT = 120


@dataclass(frozen=True)
class SlowTransfer:
    ratio: float
    impact_ratio: float
    transfer_seconds: float
    usual_seconds: float


class Pace(NamedTuple):
    """What the rank that comes last pays for communication, what ranks work, how long they queue for a CPU."""

    transfer_seconds: float
    own_seconds: float
    starved_seconds: float


class TransferBaseline:
    """The job's own past. Windows that look slow never enter it, so that a fault cannot become normal."""

    def __init__(self) -> None:
        self._past: deque[Pace] = deque(maxlen=BASELINE_KEPT)
        self._usual: Pace | None = None
        self._unlearned = 0

    def compare(self, summary: JobSummary, policy: Policy) -> SlowTransfer | None:
        """Judge one window, and learn from it if it was unremarkable."""
        pace = Pace(summary.least_transfer_seconds, summary.own_seconds, summary.starved_seconds)
        if isnan(pace.transfer_seconds) or isnan(summary.step_seconds):
            return None
        if len(self._past) < policy.baseline_windows:
            self._learn(pace)
            return None
        usual = self._usual_pace()
        excess = pace.transfer_seconds - usual.transfer_seconds
        impact = excess / max(summary.step_seconds, pace.transfer_seconds)
        ratio = pace.transfer_seconds / max(usual.transfer_seconds, 1e-9)
        if ratio < policy.communication_ratio or impact < policy.communication_impact_ratio:
            if impact < policy.communication_impact_ratio / 2:
                self._learn(pace)
            return None
        if self._machine_is_busy(pace, usual, excess, ratio, policy):
            return None
        return SlowTransfer(ratio, impact, pace.transfer_seconds, usual.transfer_seconds)

    def _learn(self, pace: Pace) -> None:
        self._past.append(pace)
        self._unlearned += 1

    def _usual_pace(self) -> Pace:
        # The median of many windows hardly moves with one more; recomputing it each time would dominate a fleet's tick.
        if self._usual is None or self._unlearned * 8 >= len(self._past):
            self._usual = Pace(*map(_median, zip(*self._past, strict=True)))
            self._unlearned = 0
        return self._usual

    @staticmethod
    def _machine_is_busy(pace: Pace, usual: Pace, excess: float, ratio: float, policy: Policy) -> bool:
        """A neighbour that eats the CPU slows own work and transfer alike; a slow network only the latter."""
        queued = np.nan_to_num(pace.starved_seconds - usual.starved_seconds) >= policy.starved_share * excess
        alike = pace.own_seconds * policy.communication_ratio > ratio * usual.own_seconds
        return bool(queued or alike)


def _median(values: tuple[float, ...]) -> float:
    """Of a hundred values at most: numpy's costs ten times as much for so few, once for every job of a fleet."""
    return nan if any(map(isnan, values)) else float(median(values))


# Waiting on others from time in collectives, by process group.
#
# All members of a group leave a collective together, and each enters it when it arrives. The member that the others
# wait for has the shortest time in it: what it spends is the transfer, and what others spend beyond that is waiting.

# As the probe tells them apart (rankscope/probe/ring_layout.py).
EXPOSED, OVERLAPPED, POINT_TO_POINT, DDP, RECORDER = 1, 2, 3, 4, 5
# Time in these is time in which the step's own stream stood still.
_EXPOSED_KINDS = (EXPOSED, DDP)
_COMPARED_KINDS = (EXPOSED, OVERLAPPED, DDP, RECORDER)
_NUMBER_LIMIT = 2.0**53


@dataclass(frozen=True)
class GroupSpans:
    """A row per group (slot) and a column per rank; NaN where a rank has fewer groups."""

    number: Floats
    kind: Floats
    seconds: Floats  # in collectives, per sampled step
    step_seconds: Floats  # of the sampled steps

    @staticmethod
    def of(measured: Mapping[str, Floats], groups_read: int) -> GroupSpans:
        def table(name: str) -> Floats:
            return np.array([measured[f"group{number}_{name}"] for number in range(groups_read)])

        return GroupSpans(table("id"), table("kind"), table("seconds"), table("step_seconds"))


@dataclass(frozen=True)
class Waits:
    """Seconds per step of each rank; NaN where it tells of no group."""

    wait_seconds: Floats  # on others, and in transfers that nothing can hide
    transfer_seconds: Floats
    self_seconds: Floats


def group_waits(spans: GroupSpans, job: Ints, step_seconds: Floats) -> Waits:
    """`job` and `step_seconds` have a value per rank. Point-to-point traffic is not compared: its two ends have
    different roles, and a stage that waits for another does nothing wrong. All of it counts as waiting."""
    ranks = spans.number.shape[1]
    with np.errstate(all="ignore"):
        # Sampled steps cost a little more than others, and DDP's are not those of the spans.
        own = spans.seconds * (step_seconds / spans.step_seconds)
        good = (own >= 0) & np.isfinite(own) & (spans.step_seconds > 0)
        good &= (spans.number >= 0) & (spans.number < _NUMBER_LIMIT) & (spans.number % 1 == 0)
        good &= np.isin(spans.kind, (*_COMPARED_KINDS, POINT_TO_POINT))
        is_exposed = np.isin(spans.kind, _EXPOSED_KINDS)
        # A stream cannot stand still for longer than the step.
        own = np.where(is_exposed | (spans.kind == POINT_TO_POINT), np.minimum(own, step_seconds), own)
    slot, rank = np.nonzero(good)
    number, kind = spans.number[slot, rank].astype(np.int64), spans.kind[slot, rank].astype(np.int64)
    group, count = number_groups(job[rank], number, kind)
    values = own[slot, rank]
    least = grouped_min(values, group, count)[group]
    compared = kind != POINT_TO_POINT
    waiting = np.where(compared, values - least, values)
    transfer = np.where(is_exposed[slot, rank], least, 0.0)
    waited = np.bincount(rank, weights=waiting, minlength=ranks)
    transferred = np.bincount(rank, weights=transfer, minlength=ranks)
    known = np.bincount(rank, minlength=ranks) > 0
    total = np.minimum(waited + transferred, step_seconds)
    return Waits(
        np.where(known, total, np.nan),
        np.where(known, np.minimum(transferred, total), np.nan),
        np.where(known, step_seconds - total, np.nan),
    )
