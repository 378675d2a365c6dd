"""All jobs of a shard at one tick: the comparison of ranks runs once over everything, the rest per job."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.analysis.judging import JobJudge
from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.screening import Screen, concatenate, screen
from rankscope.analysis.verdict import Verdict
from rankscope.analysis.windows import JobWindow


class FleetJudge:
    """Holds what is remembered of each job. A job that is not named for a tick keeps its verdict."""

    def __init__(self, policy: Policy = DEFAULT_POLICY) -> None:
        self._policy = policy
        self._judges: dict[str, JobJudge] = {}

    def evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        judges = {job: self._judges.setdefault(job, JobJudge(self._policy)) for job in windows}
        ready = {job: judges[job].absorb(window) for job, window in windows.items()}
        complete = {job: window for job, window in ready.items() if window is not None and len(window.columns)}
        screens = self._screen(complete)
        return {job: judges[job].judge(ready[job], screens.get(job)) for job in windows}

    def _screen(self, windows: Mapping[str, JobWindow]) -> dict[str, Screen]:
        if not windows:
            return {}
        whole = screen(concatenate([window.columns for window in windows.values()]), self._policy)
        screens, start = {}, 0
        for job, window in windows.items():
            screens[job] = whole.take(slice(start, start + len(window.columns)))
            start += len(window.columns)
        return screens

    def forget(self, job: str) -> None:
        """The job has ended, or its processes are new ones: nothing of the old ones is evidence."""
        self._judges.pop(job, None)
