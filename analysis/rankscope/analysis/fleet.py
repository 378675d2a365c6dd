"""All jobs of a shard at one tick: the comparison of ranks runs once over everything, the rest per job."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.analysis.judging import JobJudge
from rankscope.analysis.observing import ReadyWindow
from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.screening import concatenate, screen
from rankscope.analysis.summaries import summarize
from rankscope.analysis.verdict import Verdict
from rankscope.analysis.windows import JobWindow


class FleetJudge:
    """Holds what is remembered of each job. A job that is not named for a tick keeps its verdict."""

    def __init__(self, policy: Policy = DEFAULT_POLICY) -> None:
        self._policy = policy
        self._judges: dict[str, JobJudge] = {}

    def evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        for job in windows.keys() - self._judges.keys():
            self._judges[job] = JobJudge(self._policy)
        judges = self._judges
        ready = {job: judges[job].absorb(window) for job, window in windows.items()}
        compared = self._compare({job: w for job, w in ready.items() if w is not None and len(w.columns)})
        return {job: judges[job].judge(compared.get(job)) for job in windows}

    def _compare(self, windows: Mapping[str, JobWindow]) -> dict[str, ReadyWindow]:
        if not windows:
            return {}
        columns = concatenate([window.columns for window in windows.values()])
        screened = screen(columns, self._policy)
        summaries = summarize(columns, screened, len(windows))
        compared, start = {}, 0
        for (job, window), summary in zip(windows.items(), summaries, strict=True):
            end = start + len(window.columns)
            compared[job] = ReadyWindow(window, screened, slice(start, end), summary)
            start = end
        return compared

    def forget(self, job: str) -> None:
        """The job has ended, or its processes are new ones: nothing of the old ones is evidence."""
        self._judges.pop(job, None)
