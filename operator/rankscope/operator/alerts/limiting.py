"""How often alerts may cause captures: a job rests after each, and all jobs together draw on one bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankscope.operator.alerts.choosing import Wanted

JOBS_MOST = 10_000


@dataclass(frozen=True)
class Limits:
    job_rest_seconds: float = 600.0
    # A rank that is accused only later is worth a second one in that time: the first was for others, perhaps for a
    # symptom of what that rank does.
    captures_per_rest: int = 2
    captures_per_hour: float = 12.0
    burst: int = 4


@dataclass(frozen=True)
class _Spent:
    until_monotonic: float
    accused: frozenset[int]


class Limiter:
    """Not thread-safe: who decides holds a lock anyway."""

    def __init__(self, limits: Limits, monotonic_seconds: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic_seconds = monotonic_seconds
        self._spent: dict[str, tuple[_Spent, ...]] = {}
        self._tokens = float(limits.burst)
        self._filled_at = monotonic_seconds()

    def objection(self, wanted: Wanted) -> str | None:
        """Why this capture may not start now; None if it may."""
        now = self._monotonic_seconds()
        lately = [each for each in self._spent.get(wanted.job, ()) if each.until_monotonic > now]
        if lately:
            seen = frozenset[int]().union(*(each.accused for each in lately))
            if wanted.accused <= seen or len(lately) >= self._limits.captures_per_rest:
                rest = min(each.until_monotonic for each in lately) - now
                return f"alerts have captured this job lately; the next may in {rest:.0f} s"
        self._fill(now)
        if self._tokens < 1:
            seconds = (1 - self._tokens) * 3600 / self._limits.captures_per_hour
            return f"alerts cause {self._limits.captures_per_hour:g} captures an hour; the next may in {seconds:.0f} s"
        return None

    def spend(self, wanted: Wanted) -> None:
        now = self._monotonic_seconds()
        self._fill(now)
        self._tokens -= 1
        standing = {
            job: kept
            for job, spent in self._spent.items()
            if (kept := tuple(each for each in spent if each.until_monotonic > now))
        }
        if wanted.job in standing or len(standing) < JOBS_MOST:
            spent = _Spent(now + self._limits.job_rest_seconds, wanted.accused)
            standing[wanted.job] = (*standing.get(wanted.job, ()), spent)
        self._spent = standing

    def _fill(self, now: float) -> None:
        gained = (now - self._filled_at) * self._limits.captures_per_hour / 3600
        self._tokens = min(float(self._limits.burst), self._tokens + gained)
        self._filled_at = now
