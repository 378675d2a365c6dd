"""The verdict on one job: gathers its windows, and asks the rules that fit what is known of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.verdicts.communication import TransferBaseline
from rankscope.analysis.verdicts.findings import ReadyWindow, observe
from rankscope.analysis.verdicts.hang import Hang, find_hang
from rankscope.analysis.verdicts.job_summary import summarize
from rankscope.analysis.verdicts.rules import HEALTHY, Damper, RecentWindows
from rankscope.analysis.verdicts.slow_rank import concatenate, screen
from rankscope.analysis.verdicts.stack_verdict import judge_stack_windows
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict, ranks
from rankscope.analysis.verdicts.window_merge import merge_evidence, merge_windows
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow

# What captures say of a job whose steps, or what they wait for, are not known otherwise: a few steps of many, now and
# then. Stacks are looked at all the time, so the two are judged side by side.

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


# Steps every rank needs in a window before ranks are compared in it.
STEPS_PER_WINDOW = 4
# Windows without enough steps are gathered, but not for ever.
PENDING_KEPT = 600
FRAMES_OF_A_HANG = 3
# Where waiting is sampled rarely: so many of the gaps between two samples, but never more windows than this.
GAPS_WAITED = 3
LONGEST_PATIENCE = 150
# Nodes may differ by a step, and by what the kernel's clock discipline leaves.
CLOCK_TOLERANCE_SECONDS = 0.25
IN_CAPTURES = " (in captured steps)"


class JobJudge:
    """Call `absorb` with every window; screen what it returns (all jobs together), and hand that to `judge`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pending: list[JobWindow] = []
        self._pending_captures: list[JobWindow] = []
        self._raw: deque[JobWindow] = deque(maxlen=2 * policy.stack_windows)
        self._recent = RecentWindows(policy)
        self._damper = Damper(policy)
        self._baseline = TransferBaseline()
        self._steps_seen = 0.0
        self._unmeasured = 0
        self._patience = policy.windows_kept  # for windows in which waiting was not measured
        self._step_seconds: float | None = None
        self._lost_gpu_seconds = 0.0
        self._captures = CaptureWindows()
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "no window yet")

    @property
    def policy(self) -> Policy:
        return self._policy

    def adopt(self, policy: Policy) -> None:
        """Judge by other thresholds from now on. What the job's past looked like stays known; what was raised by the
        old ones is not held by hysteresis against the new."""
        if policy is self._policy or policy == self._policy:
            return
        self._policy = policy
        self._raw = deque(self._raw, maxlen=2 * policy.stack_windows)
        self._recent = RecentWindows(policy)
        self._damper = Damper(policy)
        self._patience = policy.windows_kept
        self._captures = CaptureWindows()
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "the policy has changed: the ranks are compared again")

    def absorb(self, window: JobWindow) -> JobWindow | None:
        """Take a window; return the stretch that is now ready for comparing ranks, if one is."""
        self._raw.append(window)
        steps = window.columns.steps
        fewest = steps.min(initial=np.inf)
        if fewest >= STEPS_PER_WINDOW and not self._pending and not window.is_captured:
            return window
        if np.isnan(fewest) and np.isnan(steps).all():
            return None  # nothing to gather: between two captures there may be thousands of these
        # Recorded steps are slower than those around them, of which only the length is known.
        pending = self._pending_captures if window.is_captured else self._pending
        pending.append(window)
        if len(pending) > PENDING_KEPT:
            del pending[0]
        ready = window if len(pending) == 1 else merge_windows(pending)
        if not ready.columns.steps.min(initial=np.inf) >= STEPS_PER_WINDOW:  # nor where a rank's are not known
            return None
        pending.clear()
        if ready.is_captured:
            around = tuple(self._raw)
            return replace(ready, evidence=lambda: merge_evidence(around))
        return ready

    def judge(self, ready: ReadyWindow | None) -> Verdict:
        """The verdict after the window last absorbed."""
        # Who has steps to be judged by is moving.
        verdict = self._hung() if ready is None else None
        if verdict is None:
            said = self._judge_ranks(ready)
            verdict = self.verdict if said is None else self._damper.settle(said, self.verdict)
        gaps = (Kind.INSUFFICIENT_DATA, Kind.HANG)
        if verdict.kind in gaps and self.verdict.kind not in gaps and not self._captures.count:
            # What was compared before a gap says nothing about what comes after it. Between captures are only gaps.
            self._recent = RecentWindows(self._policy)
        self.verdict = self._with_loss(verdict)
        return self.verdict

    def _with_loss(self, verdict: Verdict) -> Verdict:
        """What is lost grows while a finding stands, and is forgotten with it."""
        if not verdict.kind.is_finding or verdict.impact_ratio is None:
            self._lost_gpu_seconds = 0.0
            return verdict
        latest = self._raw[-1]
        self._lost_gpu_seconds += verdict.impact_ratio * latest.window_seconds * latest.world_size
        return replace(verdict, lost_gpu_seconds=self._lost_gpu_seconds)

    def _hung(self) -> Verdict | None:
        latest = self._raw[-1]
        if np.fmax.reduce(latest.columns.steps, initial=0.0) > 0:
            return None
        hang = find_hang(latest.stalls(), latest.departed, self._step_seconds, self._policy)
        return None if hang is None else _hang_verdict(hang, known_steps=self._steps_seen > 0)

    def _judge_ranks(self, ready: ReadyWindow | None) -> Verdict | None:
        """None where the latest window says nothing new."""
        latest = self._raw[-1]
        seen = len(latest.columns)
        if seen < self._policy.ranks_seen_ratio * latest.world_size:
            return Verdict(Kind.INSUFFICIENT_DATA, f"{seen} of {latest.world_size} ranks report")
        if ready is None:
            if (self._steps_seen == 0 or self._captures.count) and np.isnan(latest.columns.steps).all():
                return self._captures.settle(self._raw, self._policy)
            if self.verdict.kind is Kind.HANG:
                return Verdict(Kind.INSUFFICIENT_DATA, "moving again; no window compared yet")
            return None
        summary = ready.summary
        if summary.ranks_measured < self._policy.ranks_seen_ratio * latest.world_size:
            self._unmeasured += 1
            missing = f"waiting on others is measured on {summary.ranks_measured:.0f} of {latest.world_size} ranks"
            if self._captures.count:
                return self._captures.settle(self._raw, self._policy, missing)
            if self._steps_seen and self._unmeasured <= self._patience:
                return None  # waiting is sampled, and a window may hold no sample: that alone changes nothing
            if self._unmeasured <= self._patience:
                return Verdict(Kind.INSUFFICIENT_DATA, missing)  # the first steps; stacks before them say nothing
            return judge_stack_windows(list(self._raw), self._policy, missing)
        if self._steps_seen and self._unmeasured > self._patience:
            # Samples of this job are that far apart.
            self._patience = min(GAPS_WAITED * self._unmeasured, LONGEST_PATIENCE)
        self._unmeasured = 0
        self._steps_seen += summary.fewest_steps
        self._step_seconds = summary.step_seconds
        if ready.window.is_captured:
            return self._judge_captures(ready)
        self._captures = CaptureWindows()
        # Earlier windows were kept for their stacks; with steps to go by they only hold memory.
        self._raw.clear()
        self._raw.append(latest)
        if self._steps_seen < self._policy.steps_needed:
            reason = f"{self._steps_seen:.0f} steps seen, {self._policy.steps_needed} needed"
            return Verdict(Kind.INSUFFICIENT_DATA, reason)
        skew = ready.window.clock_skew_seconds
        if skew is not None and skew > self._step_seconds + CLOCK_TOLERANCE_SECONDS:
            return Verdict(Kind.INSUFFICIENT_DATA, f"clocks of the nodes are {skew:.1f} s apart; check NTP or chrony")
        return self._recent.decide(observe(ready, self._baseline, self._policy), self.verdict)

    def _judge_captures(self, ready: ReadyWindow) -> Verdict:
        """A few steps of many, so what they say is less sure, and what stacks say of the rest counts beside it."""
        if self._steps_seen < self._policy.steps_needed:
            self._captures.add(ready.window, None)
        else:
            standing = self._captures.verdict or HEALTHY
            verdict = self._recent.decide(observe(ready, self._baseline, self._policy), standing)
            reason = f"{verdict.reason.removesuffix(IN_CAPTURES)}{IN_CAPTURES}"
            self._captures.add(ready.window, replace(verdict, reason=reason, confidence=Confidence.LOW))
        return self._captures.settle(self._raw, self._policy)


def _hang_verdict(hang: Hang, known_steps: bool) -> Verdict:
    who = f"{ranks(hang.culprits)}: {hang.how}" if hang.culprits else hang.how
    where = f", at {hang.stack[0]}" if hang.stack else ""
    frames = tuple(frame for frame in map(_frame, hang.stack[:FRAMES_OF_A_HANG]) if frame)
    return Verdict(
        Kind.HANG,
        f"no rank has advanced for {hang.seconds:.0f} s; {who}{where}",
        Severity.ALARM,
        Confidence.HIGH if known_steps else Confidence.LOW,
        hang.culprits,
        impact_ratio=1.0,
        cause=Cause(hang.phase, frames, hang.how),
    )


def _frame(text: str) -> FrameSeen | None:
    """`function (file:line)` as a frame."""
    function, bracket, rest = text.partition(" (")
    file, colon, line = rest.rstrip(")").rpartition(":")
    if not bracket or not colon or not line.isdigit():
        return None
    return FrameSeen(function, file, int(line), 1.0, 1.0, "unknown")


# All jobs of a shard at one tick: the comparison of ranks runs once over everything, the rest per job.


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
