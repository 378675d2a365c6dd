"""Keeping the daemon's own CPU use within what the user granted, by sampling stacks less often."""

from __future__ import annotations

from collections import deque

OBSERVED_SECONDS = 20.0
# Nothing is decided on less than this: one window's cost is noise, and a new rate needs time to show.
SETTLING_SECONDS = 20.0
# Meeting a rank costs once: finding it while it imports, and the first look at its stacks. So does losing one: what its
# last recording cost is known only when it has gone.
ARRIVAL_SECONDS = 0.1
RECOVERY_SECONDS = 30.0
RECOVERY_SECONDS_MAX = 600.0
RECOVERY_BELOW_RATIO = 0.5


def rate_ladder(full_hertz: float) -> tuple[float, ...]:
    """The rates to fall back through; the last one is off."""
    if full_hertz <= 0:
        return (0.0,)
    halves = [full_hertz, full_hertz / 2, full_hertz / 4]
    return (*(rate for rate in halves if rate >= 1.0 or rate == full_hertz), *((1.0,) if halves[2] > 1.0 else ()), 0.0)


class Budget:
    """Tells the stack rate to use. Give it the CPU seconds used so far at every window; it has no clock of its own."""

    def __init__(self, core_ratio_per_rank: float, full_hertz: float) -> None:
        self._core_ratio_per_rank = core_ratio_per_rank
        self._ladder = rate_ladder(full_hertz)
        self._rung = 0
        self._ranks = 0
        # Time, CPU seconds used, and CPU seconds granted so far: the grant follows the number of ranks as it changes.
        self._observed: deque[tuple[float, float, float]] = deque()
        self._calm_since: float | None = None
        self._raised_at: float | None = None
        self._recovery_seconds = RECOVERY_SECONDS
        self._used_ratio: float | None = None

    @property
    def rate_hertz(self) -> float:
        return self._ladder[self._rung]

    @property
    def used_ratio(self) -> float | None:
        """CPU use over the last seconds, as a ratio of the budget; above 1 is over it."""
        return self._used_ratio

    def observe(self, now_seconds: float, cpu_seconds: float, ranks: int) -> float:
        """Take note of the CPU seconds used since the daemon began; returns the rate from now on."""
        if ranks == 0:
            # Looking for ranks costs what it costs; sampling less would not make it cheaper.
            self._ranks = 0
            self._forget(now_seconds, cpu_seconds)
            return self.rate_hertz
        last_seconds, _, granted_seconds = self._observed[-1] if self._observed else (now_seconds, 0.0, 0.0)
        granted_seconds += self._core_ratio_per_rank * ranks * (now_seconds - last_seconds)
        granted_seconds += ARRIVAL_SECONDS * abs(ranks - self._ranks)
        self._ranks = ranks
        self._observed.append((now_seconds, cpu_seconds, granted_seconds))
        while len(self._observed) > 2 and self._observed[1][0] <= now_seconds - OBSERVED_SECONDS:
            self._observed.popleft()
        since, cpu_before, granted_before = self._observed[0]
        elapsed_seconds = now_seconds - since
        if elapsed_seconds <= 0:
            return self.rate_hertz
        self._used_ratio = max(0.0, cpu_seconds - cpu_before) / (granted_seconds - granted_before)
        if elapsed_seconds < SETTLING_SECONDS:
            return self.rate_hertz
        if self._used_ratio > 1.0:
            self._calm_since = None
            self._lower(now_seconds, cpu_seconds)
        elif self._used_ratio < RECOVERY_BELOW_RATIO and self._rung > 0:
            self._calm_since = since if self._calm_since is None else self._calm_since
            if now_seconds - self._calm_since >= self._recovery_seconds:
                self._raise(now_seconds, cpu_seconds)
        else:
            self._calm_since = None
        return self.rate_hertz

    def _lower(self, now_seconds: float, cpu_seconds: float) -> None:
        if self._rung == len(self._ladder) - 1:
            return
        if self._raised_at is not None and now_seconds - self._raised_at < 2 * self._recovery_seconds:
            # The last raise did not hold: wait longer before the next, or the rate would swing for ever.
            self._recovery_seconds = min(RECOVERY_SECONDS_MAX, 2 * self._recovery_seconds)
        self._rung += 1
        self._forget(now_seconds, cpu_seconds)

    def _raise(self, now_seconds: float, cpu_seconds: float) -> None:
        self._rung -= 1
        self._raised_at = now_seconds
        self._calm_since = None
        self._forget(now_seconds, cpu_seconds)

    def _forget(self, now_seconds: float, cpu_seconds: float) -> None:
        # What was spent at the old rate says nothing about the new one.
        self._observed.clear()
        self._observed.append((now_seconds, cpu_seconds, 0.0))
