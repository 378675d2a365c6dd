"""All jobs of a shard at one tick: the comparison of ranks runs once over everything, the rest per job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.judging import JobJudge
from rankscope.analysis.observing import ReadyWindow
from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.screening import concatenate, screen
from rankscope.analysis.summaries import summarize
from rankscope.analysis.verdict import Verdict
from rankscope.analysis.windows import JobWindow


class FleetJudge:
    """Holds what is remembered of each job. A job that is not named for a tick keeps its verdict.

    `policy_of` gives a job's own policy, asked at every tick: one that has changed holds from that tick on."""

    def __init__(
        self, policy: Policy = DEFAULT_POLICY, policy_of: Callable[[str], Policy | None] | None = None
    ) -> None:
        self._policy = policy
        self._policy_of = policy_of
        self._judges: dict[str, JobJudge] = {}

    def evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        # Columns may hold anything that was sent as a measurement; what comes of it is checked where it is used.
        with np.errstate(all="ignore"):
            return self._evaluate(windows)

    def _evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        judges = self._judges
        if self._policy_of is None:
            for job in windows.keys() - judges.keys():
                judges[job] = JobJudge(self._policy)
        else:
            for job in windows:
                policy = self._policy_of(job) or self._policy
                if job in judges:
                    judges[job].adopt(policy)
                else:
                    judges[job] = JobJudge(policy)
        ready = {job: judges[job].absorb(window) for job, window in windows.items()}
        comparable = {job: w for job, w in ready.items() if w is not None and len(w.columns)}
        compared: dict[str, ReadyWindow] = {}
        for policy, together in self._grouped(comparable).items():
            compared.update(_compare(together, policy))
        return {job: judges[job].judge(compared.get(job)) for job in windows}

    def _grouped(self, windows: Mapping[str, JobWindow]) -> dict[Policy, dict[str, JobWindow]]:
        """By what the comparison depends on: a fleet has many jobs and few policies, and targets do not divide it."""
        if self._policy_of is None:
            return {self._policy: dict(windows)} if windows else {}
        # Found by identity first: hashing a policy for every job would take as long as judging it.
        known: dict[int, dict[str, JobWindow]] = {}
        groups: dict[Policy, dict[str, JobWindow]] = {}
        for job, window in windows.items():
            policy = self._judges[job].policy
            group = known.get(id(policy))
            if group is None:
                group = known[id(policy)] = groups.setdefault(replace(policy, mfu_target_ratio=None), {})
            group[job] = window
        return groups

    def forget(self, job: str) -> None:
        """The job has ended, or its processes are new ones: nothing of the old ones is evidence."""
        self._judges.pop(job, None)


def _compare(windows: Mapping[str, JobWindow], policy: Policy) -> dict[str, ReadyWindow]:
    columns = concatenate([window.columns for window in windows.values()])
    screened = screen(columns, policy)
    summaries = summarize(columns, screened, len(windows))
    compared, start = {}, 0
    for (job, window), summary in zip(windows.items(), summaries, strict=True):
        end = start + len(window.columns)
        compared[job] = ReadyWindow(window, screened, slice(start, end), summary)
        start = end
    return compared
