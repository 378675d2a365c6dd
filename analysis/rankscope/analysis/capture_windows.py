"""What captures say of a job whose steps, or what they wait for, are not known otherwise: a few steps of many, now and
then. Stacks are looked at all the time, so the two are judged side by side."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope.analysis.policy import Policy
from rankscope.analysis.stack_judging import judge_stack_windows
from rankscope.analysis.verdict import Kind, Verdict
from rankscope.analysis.windows import JobWindow

# What captures said stands until so many more could have come.
CAPTURES_MISSED = 3


class CaptureWindows:
    def __init__(self) -> None:
        self.count = 0
        self.verdict: Verdict | None = None  # once there are steps enough
        self._last_unix_seconds = 0.0
        self._apart_seconds = 0.0

    def add(self, window: JobWindow, verdict: Verdict | None) -> None:
        if self.count:
            self._apart_seconds = max(window.end_unix_seconds - self._last_unix_seconds, window.window_seconds)
        self._last_unix_seconds = window.end_unix_seconds
        self.count += 1
        self.verdict = verdict or self.verdict

    def settle(self, recent: Iterable[JobWindow], policy: Policy, missing: str = "no step records") -> Verdict:
        """A finding of captures comes before what stacks say; that they found nothing comes after. `recent` are the
        latest windows, oldest first; `missing` says what they do not tell."""
        windows = list(recent)
        standing = self._standing(windows[-1].end_unix_seconds)
        if standing is not None and standing.kind.is_finding:
            return standing
        by_stacks = judge_stack_windows(windows, policy, missing)
        return standing if standing is not None and by_stacks.kind is Kind.INSUFFICIENT_DATA else by_stacks

    def _standing(self, now_unix_seconds: float) -> Verdict | None:
        is_fresh = now_unix_seconds - self._last_unix_seconds <= CAPTURES_MISSED * self._apart_seconds
        return self.verdict if is_fresh else None
