"""Slow communication: against the job's own past, when no rank is late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import median, mode
from typing import NamedTuple

import numpy as np

from rankscope.analysis.verdicts.job_summary import JobSummary
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import milliseconds, percent

MAX_BASELINE_WINDOWS = 120


@dataclass(frozen=True)
class SlowTransfer:
    ratio: float
    impact_ratio: float
    transfer_seconds: float
    usual_seconds: float
    # Of some groups or links, where the critical path shows them.
    where: str = ""
    links: tuple[tuple[int, ...], ...] = ()  # ranks of each
    rates: str = ""  # now and usually
    against: str = "its own past"

    @property
    def evidence(self) -> str:
        return f"{self.ratio:.1f}× {self.against}"

    @property
    def reason(self) -> str:
        times = f"{milliseconds(self.transfer_seconds)} instead of {milliseconds(self.usual_seconds)}"
        if not self.where:
            return f"no rank is late, but a step's communication takes {times}"
        verb = "takes" if len(self.links) == 1 else "take"
        back = f"{percent(self.impact_ratio)} of the job's time would come back"
        return f"no rank is late, but {self.where} {verb} {times} of a step{self.rates}; without that, {back}"

    @classmethod
    def typical(cls, found: Sequence[SlowTransfer]) -> SlowTransfer:
        """The latest of those in the groups that are slow most often: one group more or less is chance."""
        latest = [*reversed(found)]
        where = mode(one.where for one in latest)
        return next(one for one in latest if one.where == where)


class Pace(NamedTuple):
    """What the rank that comes last pays for communication, what ranks work, how long they queue for a CPU."""

    transfer_seconds: float
    self_seconds: float
    starved_seconds: float


class TransferBaseline:
    """The job's own past. Windows that look slow never enter it, so that a fault cannot become normal."""

    def __init__(self) -> None:
        self._past: deque[Pace] = deque(maxlen=MAX_BASELINE_WINDOWS)
        self._usual: Pace | None = None
        self._unlearned = 0

    def compare(self, summary: JobSummary, policy: Policy) -> SlowTransfer | None:
        """Judge one window, and learn from it if it was unremarkable."""
        pace = Pace(summary.least_transfer_seconds, summary.self_seconds, summary.starved_seconds)
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
        """A neighbour that eats the CPU slows own work and transfer alike; a slow network only the latter. Where ranks
        queue for a CPU at all times, a transfer varies by as much from window to window."""
        queued = np.nan_to_num(pace.starved_seconds - usual.starved_seconds) >= policy.starved_share * excess
        queued |= np.nan_to_num(pace.starved_seconds) >= excess
        alike = pace.self_seconds * policy.communication_ratio > ratio * usual.self_seconds
        return bool(queued or alike)


def _median(values: tuple[float, ...]) -> float:
    """Of a hundred values at most: numpy's costs ten times as much for so few, once for every job of a fleet."""
    return nan if any(map(isnan, values)) else float(median(values))
