"""What becomes of each alert that asks for a capture, and why."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from rankscope.operator.alerts.choosing import Concern, RefusedError, Wanted, choose, find_concern
from rankscope.operator.alerts.deduplicating import Occasions
from rankscope.operator.alerts.limiting import Limiter, Limits
from rankscope.operator.alerts.reading import Alert
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.exporting import label

log = logging.getLogger(__name__)

OUTCOMES_KEPT = 100


class Result(str, Enum):
    STARTED = "started"
    DUPLICATE = "duplicate"  # this firing has had its capture
    LIMITED = "limited"  # too soon; the next notification of the same firing may have it
    REFUSED = "refused"  # nothing to capture; trying again changes nothing
    FAILED = "failed"  # could not be asked for; worth trying again


class FailedError(Exception):
    """Whoever takes captures could not be asked; worth trying again."""


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


class AlertDesk:
    """All methods may be called from any thread. One capture for all alerts of a job in a notification.

    `is_elsewhere` tells of a job that is not known here whether another replica has it: worth trying again, then."""

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
        self._recent: deque[Outcome] = deque(maxlen=OUTCOMES_KEPT)

    @property
    def totals(self) -> dict[Result, int]:
        return dict(self._totals)

    @property
    def recent(self) -> tuple[Outcome, ...]:
        """The latest first."""
        return tuple(reversed(self._recent))

    def handle(self, alerts: Iterable[Alert]) -> tuple[Outcome, ...]:
        """What became of each alert that asks for a capture; the others are not mentioned."""
        # Two notifications at once must not both find that there was none yet.
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
        job = alert.labels.get("job", "")
        is_known = any(job in (state.job, label(state.job)) for state in states)
        if job and not is_known and self._is_elsewhere(job):
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
        job = label(alert.labels.get("job", ""))
        outcome = Outcome(self._unix_seconds(), label(alert.name), job, result, text, ranks)
        self._totals[result] += 1
        self._recent.append(outcome)
        level = logging.WARNING if result is Result.FAILED else logging.INFO
        who = f" ranks {','.join(map(str, ranks))}" if ranks else ""
        log.log(level, "alert %r of job %r%s: %s: %s", outcome.alert, outcome.job, who, result.value, text)
        return outcome
