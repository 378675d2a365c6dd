"""Follows the verdicts on the demo's job, from before its fault to the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankscope.analysis.verdict import Kind, Verdict
from rankscope.cli.demo_job.launching import DemoJob, DemoJobError
from rankscope.cli.demo_report import Outcome, expects
from rankscope.cli.sentences import MARKS, headline
from rankscope.operator.correlation.correlator import Correlator, JobState

POLL_SECONDS = 0.1
# Enough healthy windows for the job to have a past that a slow network can be told from.
SETTLING_TICKS = 7
SETTLING_TIMEOUT_SECONDS = 90.0
# After the alarm: more stacks make the source line certain.
CAUSE_TICKS = 2


@dataclass(frozen=True)
class Alarm:
    verdict: Verdict
    at_monotonic: float


class Watch:
    """Not thread-safe but for the listener, which the correlator calls from its own thread."""

    def __init__(self, correlator: Correlator, job: DemoJob, show: Callable[[str], None]) -> None:
        self._job = job
        self._show = show
        self._lock = threading.Lock()
        self._state: JobState | None = None
        self._ticks = 0
        self._judged_ticks = 0
        self._alarms: list[Alarm] = []
        self._fault_at: float | None = None
        correlator.listen(self._note)

    def _note(self, states: tuple[JobState, ...]) -> None:
        now = time.monotonic()
        for state in states:
            if state.job != self._job.job_name:
                continue
            with self._lock:
                self._state = state
                self._ticks += 1
                self._judged_ticks += state.verdict.kind is not Kind.INSUFFICIENT_DATA
                before = self._alarms[-1].verdict if self._alarms else None
                if state.verdict.is_alarm and (
                    before is None or (before.kind, before.culprits) != (state.verdict.kind, state.verdict.culprits)
                ):
                    self._alarms.append(Alarm(state.verdict, now))

    def start_fault(self) -> None:
        self._fault_at = self._job.start_fault()

    def until_settled(self) -> None:
        """Until the healthy job has been judged for a while; at level 0 there may be nothing but abstentions."""
        enough = SETTLING_TICKS
        self._wait(SETTLING_TIMEOUT_SECONDS, lambda: self._judged_ticks >= enough or self._ticks >= 3 * enough)

    def for_seconds(self, seconds: float) -> None:
        self._wait(seconds, lambda: False)

    def until_alarm(self, timeout: float) -> bool:
        """Until the alarm that the fault should raise; True if it came."""
        return self._wait(timeout, lambda: self._found() is not None)

    def until_cause_settles(self, seconds: float | None) -> None:
        """A little longer for the source line; as long as the caller asked for, if he did."""
        if seconds is not None and self._fault_at is not None:
            self.for_seconds(max(0.0, self._fault_at + seconds - time.monotonic()))
            return
        target = self._ticks + CAUSE_TICKS
        self._wait(10.0, lambda: self._ticks >= target)

    def _found(self) -> Alarm | None:
        with self._lock:
            return next((alarm for alarm in self._alarms if self._is_right(alarm)), None)

    def _is_right(self, alarm: Alarm) -> bool:
        after = self._fault_at is not None and alarm.at_monotonic >= self._fault_at
        return after and expects(self._job.fault, alarm.verdict, self._job.ranks)

    def _wait(self, timeout: float, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + timeout
        while not condition():
            if gone := self._job.poll():
                rank, code = gone[0]
                raise DemoJobError(f"rank {rank} of the demo job ended with {code}:\n{self._job.log_tail(rank)}")
            if time.monotonic() >= deadline:
                return False
            self._show(self._progress(deadline - time.monotonic()))
            time.sleep(POLL_SECONDS)
        return True

    def _progress(self, remaining: float) -> str:
        state = self._state
        steps = min(self._job.steps_done())
        if state is None:
            return f"step {steps}; waiting for the first window"
        pace = f", {state.step_seconds * 1000:.0f} ms each" if state.step_seconds else ""
        return f"step {steps}{pace}; {MARKS[state.verdict.severity]} {headline(state.verdict)}; {remaining:.0f} s left"

    def outcome(self) -> Outcome:
        found = self._found()
        with self._lock:
            state, alarms = self._state, list(self._alarms)
        verdict = state.verdict if state else Verdict(Kind.INSUFFICIENT_DATA, "no window was seen")
        if found is not None and not expects(self._job.fault, verdict, self._job.ranks):
            verdict = found.verdict  # the job went on after the verdict stood
        false_alarms = [alarm.verdict for alarm in alarms if not self._is_right(alarm)]
        return Outcome(
            fault=self._job.fault,
            ranks=self._job.ranks,
            verdict=verdict,
            seconds_to_verdict=found.at_monotonic - self._fault_at if found and self._fault_at else None,
            false_alarms=tuple(false_alarms),
            state=state,
            probe=self._job.probe,
        )
