"""Decides on each alert that requests a capture, and records why."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from rankscope.common.metric_table import label
from rankscope.common.token_bucket import TokenBucket
from rankscope.operator.alerts.alert import Alert, Concern, RefusedError, Wanted, choose, find_concern
from rankscope.operator.correlation.correlator import JobState

# Firings that already had their capture. Alertmanager repeats notifications: after a while, after a restart, from its
# peers.

MAX_REMEMBERED = 10_000
REMEMBERED_SECONDS = 7 * 86400.0


class Occasions:
    """Remembers firings by fingerprint and start. Bounded: the oldest is forgotten first."""

    def __init__(self, monotonic_seconds: Callable[[], float]) -> None:
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()

    def has(self, alert: Alert) -> bool:
        with self._lock:
            seen_at = self._seen.get(alert.occasion)
            return seen_at is not None and self._monotonic_seconds() - seen_at < REMEMBERED_SECONDS

    def remember(self, alerts: Iterable[Alert]) -> None:
        with self._lock:
            for alert in alerts:
                self._seen[alert.occasion] = self._monotonic_seconds()
                self._seen.move_to_end(alert.occasion)
            while len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)


# How often alerts may cause captures: a job has a cool-down after each, and all jobs share one token bucket.

MAX_JOBS = 10_000


@dataclass(frozen=True)
class Limits:
    job_rest_seconds: float = 600.0
    # A rank that is accused later may get a second capture in that time: the first was of others, perhaps of a symptom.
    captures_per_rest: int = 2
    captures_per_hour: float = 12.0
    burst: int = 4


@dataclass(frozen=True)
class _Spent:
    until_monotonic: float
    accused: frozenset[int]


class Limiter:
    """Not thread-safe: the caller holds a lock."""

    def __init__(self, limits: Limits, monotonic_seconds: Callable[[], float]) -> None:
        self._limits = limits
        self._monotonic_seconds = monotonic_seconds
        self._spent: dict[str, tuple[_Spent, ...]] = {}
        self._bucket = TokenBucket(limits.burst, limits.captures_per_hour / 3600)

    def objection(self, wanted: Wanted) -> str | None:
        """Why this capture may not start now; None if it may."""
        now = self._monotonic_seconds()
        lately = [each for each in self._spent.get(wanted.job, ()) if each.until_monotonic > now]
        if lately:
            seen = frozenset[int]().union(*(each.accused for each in lately))
            if wanted.accused <= seen or len(lately) >= self._limits.captures_per_rest:
                rest = min(each.until_monotonic for each in lately) - now
                return f"alerts have captured this job lately; the next may in {rest:.0f} s"
        if (seconds := self._bucket.wait_seconds(now)) > 0:
            return f"alerts cause {self._limits.captures_per_hour:g} captures an hour; the next may in {seconds:.0f} s"
        return None

    def spend(self, wanted: Wanted) -> None:
        now = self._monotonic_seconds()
        self._bucket.spend(now)
        standing = {
            job: kept
            for job, spent in self._spent.items()
            if (kept := tuple(each for each in spent if each.until_monotonic > now))
        }
        if wanted.job in standing or len(standing) < MAX_JOBS:
            spent = _Spent(now + self._limits.job_rest_seconds, wanted.accused)
            standing[wanted.job] = (*standing.get(wanted.job, ()), spent)
        self._spent = standing


log = logging.getLogger(__name__)

MAX_OUTCOMES = 100


class Result(str, Enum):
    STARTED = "started"
    DUPLICATE = "duplicate"  # this firing has had its capture
    LIMITED = "limited"  # too soon; the next notification of the same firing may be captured
    REFUSED = "refused"  # nothing to capture; retrying changes nothing
    FAILED = "failed"  # the request failed; worth retrying


class FailedError(Exception):
    """The capture could not be requested; worth retrying."""


@dataclass(frozen=True)
class Outcome:
    at_unix_seconds: float
    alert: str
    job: str
    result: Result
    text: str
    ranks: tuple[int, ...] = ()


Start = Callable[[Wanted], str]
"""Begins a capture and returns its id. Raises RefusedError or FailedError."""


class AlertDecisions:
    """Thread-safe. One capture for all alerts of a job in a notification. `is_elsewhere` returns whether another
    replica has an unknown job: then a retry is worthwhile."""

    def __init__(
        self,
        states: Callable[[], Sequence[JobState]],
        start: Start,
        limits: Limits | None = None,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        unix_seconds: Callable[[], float] = time.time,
        is_elsewhere: Callable[[str], bool] = lambda job: False,
    ) -> None:
        self._states = states
        self._start = start
        self._is_elsewhere = is_elsewhere
        self._occasions = Occasions(monotonic_seconds)
        self._limiter = Limiter(limits or Limits(), monotonic_seconds)
        self._unix_seconds = unix_seconds
        self._deciding = threading.Lock()
        self._totals = dict.fromkeys(Result, 0)
        self._recent: deque[Outcome] = deque(maxlen=MAX_OUTCOMES)

    def totals(self) -> dict[Result, int]:
        return dict(self._totals)

    @property
    def recent(self) -> tuple[Outcome, ...]:
        """Newest first."""
        return tuple(reversed(self._recent))

    def handle(self, alerts: Iterable[Alert]) -> tuple[Outcome, ...]:
        """The decision on each alert that requests a capture; other alerts are ignored."""
        # Two simultaneous notifications must not both find that there was none yet.
        with self._deciding:
            outcomes: list[Outcome] = []
            by_job: dict[str, list[Concern]] = {}
            states = self._states()
            for alert in (alert for alert in alerts if alert.wants_capture):
                if self._occasions.has(alert):
                    outcomes.append(self._note(alert, Result.DUPLICATE, "this firing has had its capture"))
                    continue
                try:
                    concern = find_concern(alert, states)
                except RefusedError as error:
                    outcomes.append(self._refuse(alert, str(error), states))
                    continue
                by_job.setdefault(concern.state.job, []).append(concern)
            for together in by_job.values():
                result, text, ranks = self._decide(together[0].state, together)
                outcomes.extend(self._note(concern.alert, result, text, ranks) for concern in together)
            return tuple(outcomes)

    def _refuse(self, alert: Alert, why: str, states: Sequence[JobState]) -> Outcome:
        is_known = any(alert.is_about(state.job) for state in states)
        if alert.run and not is_known and self._is_elsewhere(alert.run):
            return self._note(alert, Result.FAILED, "another replica has this job")
        return self._note(alert, Result.REFUSED, why)

    def _decide(self, state: JobState, concerns: Sequence[Concern]) -> tuple[Result, str, tuple[int, ...]]:
        ranks: tuple[int, ...] = ()
        try:
            wanted = choose(state, concerns)
            ranks = wanted.ranks
            if objection := self._limiter.objection(wanted):
                return Result.LIMITED, objection, ranks
            capture_id = self._start(wanted)
        except RefusedError as error:
            return Result.REFUSED, str(error), ranks
        except FailedError as error:
            return Result.FAILED, str(error), ranks
        self._limiter.spend(wanted)
        self._occasions.remember(concern.alert for concern in concerns)
        return Result.STARTED, f"capture {capture_id}", ranks

    def _note(self, alert: Alert, result: Result, text: str, ranks: tuple[int, ...] = ()) -> Outcome:
        outcome = Outcome(self._unix_seconds(), label(alert.name), label(alert.run), result, text, ranks)
        self._totals[result] += 1
        self._recent.append(outcome)
        level = logging.WARNING if result is Result.FAILED else logging.INFO
        who = f" ranks {','.join(map(str, ranks))}" if ranks else ""
        log.log(level, "alert %r of job %r%s: %s: %s", outcome.alert, outcome.job, who, result.value, text)
        return outcome
