"""How often stacks are recorded: the plan of recordings, the budget that lowers it to keep the daemon's CPU use within
what the user granted, and the back-off after recordings that fail.

A sample of a process with a hundred threads, as CUDA processes have, costs six times as much as one of a process with
one thread. With too few samples a second a recording shows nothing, so the rate has a floor; below it, ranks are
recorded only part of the time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

# The lowest rate while a rank is recorded.
MIN_RATE_HERTZ: Final = 5
# Attaching costs as much as twenty samples of a process with many threads: longer recordings are cheaper, shorter ones
# give results sooner.
ATTACHING_SAMPLES: Final = 20
SAMPLES_WANTED: Final = 40
MIN_RECORDING_SECONDS, MAX_RECORDING_SECONDS = 4, 8
RECORDED_RATIOS: Final = (0.75, 0.5, 0.25, 0.125)

FAILURES_BEFORE_BACK_OFF: Final = 3
MAX_BACK_OFF_SECONDS: Final = 60.0

OBSERVED_SECONDS: Final = 20.0
PERIODS_OBSERVED: Final = 2
# A new rank costs this once: finding it while it imports, and the first recording. So does one that ends.
ARRIVAL_SECONDS: Final = 0.1
RECOVERY_SECONDS: Final = 30.0
MAX_RECOVERY_SECONDS: Final = 600.0
RECOVERY_BELOW_RATIO: Final = 0.75
TARGET_RATIO: Final = 0.9
MAX_RAISE_FACTOR: Final = 2.0
# The cost of a sample by threads, and the share of the budget for sampling, before anything was measured: a first
# guess, so that processes with many threads do not cost too much until then.
SAMPLE_SECONDS: Final = 0.0002
SAMPLE_SECONDS_PER_THREAD: Final = 0.000011
GUESSED_SHARE: Final = 0.7
# The part of the budget that sampling keeps, whatever the daemon's own work takes: others can add to that work (calls,
# processes to look at), and must not end the stacks of all ranks. Together the two stay within one and a half budgets.
ASSURED_RATIO: Final = 0.5


@dataclass(frozen=True)
class Plan:
    """How a rank is recorded: for `seconds` at `rate_hz`, again after `period_seconds` from start to start."""

    seconds: int
    rate_hz: int
    period_seconds: float

    def __str__(self) -> str:
        pause = f" for {self.seconds} of {self.period_seconds:g} s" if self.has_pause else ""
        return f"stacks at {self.rate_hz} Hz{pause}"

    @property
    def has_pause(self) -> bool:
        return self.period_seconds > self.seconds

    @property
    def cost(self) -> float:
        """CPU use, in samples per second."""
        return (ATTACHING_SAMPLES + self.seconds * self.rate_hz) / self.period_seconds


def plan_at(average_hertz: float) -> Plan | None:
    """The recordings that average this many samples per second, pauses included. None: no recordings."""
    if average_hertz <= 0:
        return None
    rate_hz = max(MIN_RATE_HERTZ, int(average_hertz))
    recorded_ratio = min(1.0, average_hertz / rate_hz)
    seconds = (
        math.ceil(SAMPLES_WANTED / rate_hz) if recorded_ratio == 1.0 else int(MAX_RECORDING_SECONDS * recorded_ratio)
    )
    seconds = min(MAX_RECORDING_SECONDS, max(MIN_RECORDING_SECONDS, seconds))
    return Plan(seconds, rate_hz, seconds / recorded_ratio)


def back_off_seconds(plan: Plan, failures: int, is_permanent: bool) -> float:
    """The pause after `failures` recordings of a rank in a row: none at first, unless the cause is permanent, then
    twice as long after each."""
    excess = failures - (1 if is_permanent else FAILURES_BEFORE_BACK_OFF) + 1
    return min(MAX_BACK_OFF_SECONDS, plan.period_seconds * 2.0 ** min(excess, 10)) if excess > 0 else 0.0


def rate_ladder(full_hertz: float) -> tuple[float, ...]:
    """Average rates to choose from: whole numbers down to the floor, then pauses; the last one is off."""
    lower = [float(rate) for rate in range(math.ceil(full_hertz) - 1, MIN_RATE_HERTZ - 1, -1)]
    paused = [MIN_RATE_HERTZ * ratio for ratio in RECORDED_RATIOS]
    return tuple(dict.fromkeys((max(0.0, full_hertz), *(rate for rate in (*lower, *paused) if rate < full_hertz), 0.0)))


class Budget:
    """Chooses the average stack rate. `observe` takes the CPU seconds used so far, at every window; it has no clock."""

    def __init__(self, core_ratio_per_rank: float, full_hertz: float) -> None:
        self._core_ratio_per_rank = core_ratio_per_rank
        self._ladder = rate_ladder(full_hertz)
        self._rung = 0
        self._ranks = 0
        self._observed: deque[_Observed] = deque()
        self._calm_since: float | None = None
        self._raised_at: float | None = None
        self._recovery_seconds = RECOVERY_SECONDS
        self._used_ratio: float | None = None
        self._is_guessing = True

    @property
    def rate_hertz(self) -> float:
        """Stack samples per second and rank, pauses included."""
        return self._ladder[self._rung]

    @property
    def plan(self) -> Plan | None:
        return plan_at(self.rate_hertz)

    @property
    def recording_hertz(self) -> float:
        """Stack samples per second of a rank while it is recorded; 0: none is."""
        return 0.0 if self.plan is None else self.plan.rate_hz

    @property
    def used_ratio(self) -> float | None:
        """CPU use over the last seconds, as a ratio of the budget; above 1 is over it."""
        return self._used_ratio

    def observe(
        self, now_seconds: float, own_seconds: float, sampling_seconds: float, ranks: int, threads: float = 1.0
    ) -> float:
        """Take the CPU seconds since the daemon started, of itself and of the stack samplers. Returns the rate from now
        on. `threads` are those of a typical rank."""
        if ranks == 0:
            # Without ranks there is no sampling to reduce.
            self._ranks = 0
            self._is_guessing = True
            self._forget(_Observed(now_seconds, own_seconds, sampling_seconds))
            return self.rate_hertz
        granted_seconds = ARRIVAL_SECONDS * abs(ranks - self._ranks)
        if self._observed:
            last = self._observed[-1]
            granted_seconds += last.granted_seconds
            granted_seconds += self._core_ratio_per_rank * ranks * (now_seconds - last.at_seconds)
        self._ranks = ranks
        now = _Observed(now_seconds, own_seconds, sampling_seconds, granted_seconds)
        self._observed.append(now)
        plan = self.plan
        needed_seconds = max(OBSERVED_SECONDS, PERIODS_OBSERVED * plan.period_seconds if plan else 0.0)
        while len(self._observed) > 2 and self._observed[1].at_seconds <= now_seconds - needed_seconds:
            self._observed.popleft()
        before = self._observed[0]
        if now_seconds <= before.at_seconds:
            return self.rate_hertz
        granted_seconds -= before.granted_seconds
        own_ratio = max(0.0, own_seconds - before.own_seconds) / granted_seconds
        sampling_ratio = max(0.0, sampling_seconds - before.sampling_seconds) / granted_seconds
        self._used_ratio = own_ratio + sampling_ratio
        if now_seconds - before.at_seconds < needed_seconds:
            if self._is_guessing:
                self._lower_by_guess(threads)
            return self.rate_hertz
        self._is_guessing = False
        if self._used_ratio > 1.0 and sampling_ratio > ASSURED_RATIO:
            self._calm_since = None
            self._lower(self._rung_that_fits(own_ratio, sampling_ratio), now)
        elif self._used_ratio < RECOVERY_BELOW_RATIO and self._rung > 0:
            self._calm_since = before.at_seconds if self._calm_since is None else self._calm_since
            if now_seconds - self._calm_since >= self._recovery_seconds:
                self._raise(self._rung_that_fits(own_ratio, sampling_ratio), now)
        else:
            self._calm_since = None
        return self.rate_hertz

    def _lower_by_guess(self, threads: float) -> None:
        affordable = GUESSED_SHARE * self._core_ratio_per_rank
        per_sample = SAMPLE_SECONDS + SAMPLE_SECONDS_PER_THREAD * threads
        while self.rate_hertz > MIN_RATE_HERTZ:
            plan = self.plan
            if plan is None or plan.cost * per_sample <= affordable:
                return
            self._rung += 1

    def _rung_that_fits(self, own_ratio: float, sampling_ratio: float) -> int:
        """The highest rung within the budget, estimated from the cost of the present one."""
        present = self.plan
        off = len(self._ladder) - 1
        if present is None:
            return off - 1
        factor = MAX_RAISE_FACTOR
        if sampling_ratio > 0:
            factor = min(factor, max(ASSURED_RATIO, TARGET_RATIO - own_ratio) / sampling_ratio)
        plans = map(plan_at, self._ladder)
        return next((rung for rung, plan in enumerate(plans) if plan and plan.cost <= factor * present.cost), off)

    def _lower(self, rung: int, now: _Observed) -> None:
        off = len(self._ladder) - 1
        if self._rung == off:
            return
        if self._raised_at is not None and now.at_seconds - self._raised_at < 2 * self._recovery_seconds:
            # The last raise did not hold: wait longer before the next, or the rate would oscillate.
            self._recovery_seconds = min(MAX_RECOVERY_SECONDS, 2 * self._recovery_seconds)
        # Off is the last resort: when even the fewest recordings were tried and are too much.
        self._rung = off if self._rung == off - 1 else min(off - 1, max(self._rung + 1, rung))
        self._forget(now)

    def _raise(self, rung: int, now: _Observed) -> None:
        if rung >= self._rung:
            return
        self._rung = rung
        self._raised_at = now.at_seconds
        self._calm_since = None
        self._forget(now)

    def _forget(self, now: _Observed) -> None:
        # The cost at the old rate does not predict the cost at the new one.
        self._observed.clear()
        self._observed.append(now)


@dataclass(frozen=True)
class _Observed:
    """Totals so far. The grant follows the number of ranks as it changes."""

    at_seconds: float
    own_seconds: float
    sampling_seconds: float
    granted_seconds: float = 0.0
