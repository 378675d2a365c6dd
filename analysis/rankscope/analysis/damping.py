"""Damps the rules' verdict of each window, so that users do not see it flip between kinds."""

from __future__ import annotations

from rankscope.analysis.policy import Policy
from rankscope.analysis.verdict import Kind, Verdict


class Damper:
    """One job's. The rules have their own persistence and hysteresis; this is about changes from one kind to another.

    - A standing alarm gives way to a finding of another kind when that has become an alarm.
    - Doubt (`insufficient_data`) must persist as long as an alarm before it replaces an answer.
    - What comes back soon after it went is still there: it stays until it has not been seen for a minute. Meanwhile
      only an alarm that names ranks replaces it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._window = 0
        self._doubts = 0  # windows in a row
        self._left: dict[Kind, int] = {}  # in which window each kind was last given up
        self._seen = 0  # in which window the rules last said what stands
        self._came_back = False
        self._has_answered = False

    def settle(self, said: Verdict, standing: Verdict) -> Verdict:
        """What stands after one more window, in which the rules say `said`."""
        self._window += 1
        self._doubts = self._doubts + 1 if said.kind is Kind.INSUFFICIENT_DATA else 0
        if said.kind is standing.kind:
            self._seen = self._window
            return said
        if self._is_premature(said, standing):
            return standing
        if self._has_answered and standing.kind is not Kind.HEALTHY:
            self._left[standing.kind] = self._window
        self._has_answered = True
        self._came_back = said.kind is not Kind.HEALTHY and self._is_recent(self._left.get(said.kind))
        self._seen = self._window
        return said

    def _is_premature(self, said: Verdict, standing: Verdict) -> bool:
        if standing.kind is Kind.HANG:
            return False  # it moves, or it does not
        if said.kind is Kind.INSUFFICIENT_DATA:
            return self._doubts < self._policy.windows_for_alarm
        is_held = self._came_back and self._is_recent(self._seen)
        if said.kind is Kind.HEALTHY or not standing.kind.is_finding:
            return is_held and not said.kind.is_finding
        if is_held:
            return not (said.is_alarm and said.culprits)
        return standing.is_alarm and not said.is_alarm

    def _is_recent(self, window: int | None) -> bool:
        return window is not None and self._window - window < self._policy.windows_damped
