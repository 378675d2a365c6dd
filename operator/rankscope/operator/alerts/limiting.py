"""How often alerts may cause captures: a job rests after each, and all jobs together draw on one bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

JOBS_MOST = 10_000


@dataclass(frozen=True)
class Limits:
    job_rest_seconds: float = 600.0
    captures_per_hour: float = 12.0
    burst: int = 4


class Limiter:
    """Not thread-safe: who decides holds a lock anyway."""

    def __init__(self, limits: Limits, monotonic_seconds: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic_seconds = monotonic_seconds
        self._rested_at: dict[str, float] = {}
        self._tokens = float(limits.burst)
        self._filled_at = monotonic_seconds()

    def objection(self, job: str) -> str | None:
        """Why no capture may start now; None if one may."""
        now = self._monotonic_seconds()
        rest = self._rested_at.get(job, now) - now
        if rest > 0:
            return f"alerts have captured this job lately; the next may in {rest:.0f} s"
        self._fill(now)
        if self._tokens < 1:
            seconds = (1 - self._tokens) * 3600 / self._limits.captures_per_hour
            return f"alerts cause {self._limits.captures_per_hour:g} captures an hour; the next may in {seconds:.0f} s"
        return None

    def spend(self, job: str) -> None:
        now = self._monotonic_seconds()
        self._fill(now)
        self._tokens -= 1
        self._rested_at = {name: until for name, until in self._rested_at.items() if until > now}
        if len(self._rested_at) < JOBS_MOST:
            self._rested_at[job] = now + self._limits.job_rest_seconds

    def _fill(self, now: float) -> None:
        gained = (now - self._filled_at) * self._limits.captures_per_hour / 3600
        self._tokens = min(float(self._limits.burst), self._tokens + gained)
        self._filled_at = now
