"""Is communication itself slow? Compared with the job's own past, when nobody is late."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import median_or_nan
from rankscope.analysis.windows import RankColumns

BASELINE_KEPT = 120


@dataclass(frozen=True)
class Pace:
    """A job in one window: what the rank that comes last pays, what it works, how long it queued for a CPU."""

    step_seconds: float
    transfer_seconds: float
    own_seconds: float
    starved_seconds: float


@dataclass(frozen=True)
class SlowTransfer:
    ratio: float
    impact_ratio: float
    transfer_seconds: float
    usual_seconds: float


def pace_of(columns: RankColumns) -> Pace | None:
    if np.isnan(columns.transfer_seconds).all():
        return None
    return Pace(
        step_seconds=median_or_nan(columns.step_seconds),
        transfer_seconds=float(np.nanmin(columns.transfer_seconds)),
        own_seconds=median_or_nan(columns.self_seconds),
        starved_seconds=median_or_nan(columns.starved_seconds),
    )


class TransferBaseline:
    """The job's own past. Windows that look slow never enter it, so that a fault cannot become normal."""

    def __init__(self) -> None:
        self._past: deque[Pace] = deque(maxlen=BASELINE_KEPT)

    def compare(self, columns: RankColumns, policy: Policy) -> SlowTransfer | None:
        """Judge one window, and learn from it if it was unremarkable."""
        pace = pace_of(columns)
        if pace is None:
            return None
        if len(self._past) < policy.baseline_windows:
            self._past.append(pace)
            return None
        usual = self._usual()
        excess = pace.transfer_seconds - usual.transfer_seconds
        impact = excess / pace.step_seconds
        ratio = pace.transfer_seconds / max(usual.transfer_seconds, 1e-9)
        remarkable = ratio >= policy.communication_ratio and impact >= policy.communication_impact_ratio
        if not remarkable:
            if impact < policy.communication_impact_ratio / 2:
                self._past.append(pace)
            return None
        if self._machine_is_busy(pace, usual, excess, ratio, policy):
            return None
        return SlowTransfer(ratio, impact, pace.transfer_seconds, usual.transfer_seconds)

    def _usual(self) -> Pace:
        table = np.array([[p.step_seconds, p.transfer_seconds, p.own_seconds, p.starved_seconds] for p in self._past])
        return Pace(*(median_or_nan(table[:, column]) for column in range(4)))

    @staticmethod
    def _machine_is_busy(pace: Pace, usual: Pace, excess: float, ratio: float, policy: Policy) -> bool:
        """A neighbour that eats the CPU slows own work and transfer alike; a slow network only the latter."""
        queued = np.nan_to_num(pace.starved_seconds - usual.starved_seconds) >= policy.starved_share * excess
        alike = pace.own_seconds / usual.own_seconds * policy.communication_ratio > ratio
        return bool(queued or alike)
