"""The detector: verdicts on all jobs of a fleet, window by window.

`FleetDetector` is the entry. It gathers each job's windows until every rank has steps to compare, compares the ranks of
all jobs at once (slow_rank.py), and decides per job from its last windows (findings.py, rules.py), or from stacks where
no steps are known (stack_verdict.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter

import numpy as np

from rankscope.analysis.step_graph.step_breakdown import StepBreakdown
from rankscope.analysis.step_graph.step_picture import StepPicture
from rankscope.analysis.verdicts.asynchronous import Cadence, StepCounts, ends_steps_together, split
from rankscope.analysis.verdicts.critical_path import LivePath
from rankscope.analysis.verdicts.findings import Observation, ReadyWindow, observe, observe_path, observe_workers
from rankscope.analysis.verdicts.hang import HangWatch
from rankscope.analysis.verdicts.job_summary import summarize
from rankscope.analysis.verdicts.long_steps import LongStepHistory
from rankscope.analysis.verdicts.own_past import OwnPast
from rankscope.analysis.verdicts.rules import HEALTHY, Damper, RecentWindows
from rankscope.analysis.verdicts.slow_communication import TransferBaseline
from rankscope.analysis.verdicts.slow_rank import screen
from rankscope.analysis.verdicts.stack_verdict import NO_STEPS, StackJudge
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, FIXED, Policy
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Verdict, ranks
from rankscope.analysis.verdicts.window_merge import merge_evidence, merge_windows
from rankscope.analysis.verdicts.windows import JobWindow, RankColumns

# Steps every rank needs in a window before ranks are compared in it.
STEPS_PER_WINDOW = 4
# Windows without enough steps are gathered, up to this many.
MAX_PENDING = 600
# Where waiting is sampled rarely: so many of the gaps between two samples, but never more windows than this.
GAPS_WAITED = 3
MAX_PATIENCE = 150
# A finding of captures stands until so many more could have come.
CAPTURES_MISSED = 3
# Windows in which some ranks have steps and others never had any, or none has any more.
UNKNOWN_WINDOWS = 10
# Between two windows of the critical path.
MAX_WINDOWS_OF_EVIDENCE = 16
IN_CAPTURES = " (in captured steps)"
# What only a cause or a stall needs is left out of the comparison, as every column costs a fleet time.
ONLY_FOR_CAUSES = (
    *("forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds"),
    *("long_ratio", "late_ratio", "late_ahead_seconds", "tokens_per_step"),
)


class CaptureWindows:
    """Captures of a job, where its steps or their waiting are not known otherwise: a few steps of many, now and then.
    Stacks are sampled all the time, so the two are judged side by side."""

    def __init__(self) -> None:
        self.count = 0
        self.verdict: Verdict | None = None  # once there are steps enough
        # By the length of windows: the clocks of nodes may be set.
        self._since_seconds = 0.0
        self._apart_seconds = 0.0

    def advance(self, seconds: float) -> None:
        self._since_seconds += seconds

    def add(self, window: JobWindow, verdict: Verdict | None) -> None:
        if self.count:
            self._apart_seconds = max(self._since_seconds, window.window_seconds)
        self._since_seconds = 0.0
        self.count += 1
        self.verdict = verdict or self.verdict

    def settle(self, judge_stacks: Callable[[], Verdict]) -> Verdict:
        """A finding of captures comes before one of stacks; that captures found nothing comes after."""
        standing = self._standing()
        if standing is not None and standing.kind.is_finding:
            return standing
        by_stacks = judge_stacks()
        return standing if standing is not None and by_stacks.kind is Kind.INSUFFICIENT_DATA else by_stacks

    def _standing(self) -> Verdict | None:
        is_fresh = self._since_seconds <= CAPTURES_MISSED * self._apart_seconds
        return self.verdict if is_fresh else None


class JobDetector:
    """One job. Call `absorb` with every window, screen what it returns (all jobs together), pass that to `judge`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pending: list[JobWindow] = []
        self._pending_captures: list[JobWindow] = []
        self._raw: deque[JobWindow] = deque(maxlen=2 * policy.stack_windows)
        self._recent = RecentWindows(policy)
        self._damper = Damper(policy)
        self._baseline = TransferBaseline()
        self._long_steps = LongStepHistory()
        self._own_past = OwnPast()
        self._path = LivePath(policy)
        self._since_path: deque[JobWindow] = deque(maxlen=MAX_WINDOWS_OF_EVIDENCE)
        self._step_counts = StepCounts()
        self._steps_seen = 0.0
        self._without_steps = 0  # windows in a row
        self._filled_ratio = 0.0  # of the fullest window
        self._unmeasured = 0
        self._patience = policy.windows_kept  # for windows in which waiting was not measured
        self._step_seconds: float | None = None
        self._lost_gpu_seconds = 0.0
        self._captures = CaptureWindows()
        self._stacks = StackJudge()
        self._hang = HangWatch()
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "no window yet")
        self.breakdown: StepBreakdown | None = None  # where a step goes, if the job is judged by the critical path

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def picture(self) -> StepPicture | None:
        """A step that explains the verdict; None where the job is not judged by the critical path."""
        return self._path.picture(self.verdict.culprits)

    def adopt(self, policy: Policy) -> None:
        """Judge by other thresholds from now on. The job's past stays known; an alarm of the old thresholds is not held
        by hysteresis against the new ones."""
        if policy is self._policy or policy == self._policy:
            return
        self._policy = policy
        self._path = LivePath(policy)
        self._raw = deque(self._raw, maxlen=2 * policy.stack_windows)
        self._recent = RecentWindows(policy)
        self._damper = Damper(policy)
        self._patience = policy.windows_kept
        self._captures = CaptureWindows()
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "the policy has changed: the ranks are compared again")

    def absorb(self, window: JobWindow) -> JobWindow | None:
        """Take a window; return the stretch that is now ready for comparing ranks, if one is."""
        self._raw.append(window)
        self._captures.advance(window.window_seconds)
        self._path.add(window)
        window = self._path.with_stages(window)
        self._count_steps(window)
        window = self._without_servers(window)
        steps = window.columns.steps
        fewest = steps.min(initial=np.inf)
        if fewest >= STEPS_PER_WINDOW and not self._pending and not window.is_captured:
            return window
        self._without_steps = self._without_steps + 1 if np.isnan(steps).all() else 0
        if self._without_steps:
            if self._without_steps == UNKNOWN_WINDOWS and not self._captures.count:
                self._steps_seen = 0.0  # what was said of the steps does not hold for what the job does now
            return None  # nothing to gather; between two captures there may be thousands of these
        # Recorded steps are slower than those around them, of which only the length is known.
        pending = self._pending_captures if window.is_captured else self._pending
        pending.append(window)
        if len(pending) > MAX_PENDING:
            del pending[0]
        ready = window if len(pending) == 1 else merge_windows(pending)
        if not ready.columns.steps.min(initial=np.inf) >= STEPS_PER_WINDOW:  # nor where a rank's are not known
            return None
        pending.clear()
        if ready.is_captured:
            around = tuple(self._raw)
            return replace(ready, evidence=lambda: merge_evidence(around))
        return ready

    def _count_steps(self, window: JobWindow) -> None:
        counts, before = self._step_counts, self._step_counts.cadence
        counts.add(window, self._policy)
        if Cadence.ASYNCHRONOUS in (before, counts.cadence) and counts.cadence is not before:
            # What was compared so far are other ranks, and by other rules.
            self._pending.clear()
            self._recent = RecentWindows(self._policy)
            self._damper = Damper(self._policy)
            self.verdict = Verdict(Kind.INSUFFICIENT_DATA, f"the run is {counts.cadence.value}: no window compared yet")

    def _without_servers(self, window: JobWindow) -> JobWindow:
        counts = self._step_counts
        if counts.cadence is not Cadence.ASYNCHRONOUS or window.is_captured:
            return window
        is_worker = counts.is_worker(window.columns)
        return split(window, is_worker, counts.servers) if is_worker.any() else window

    def _observe(self, ready: ReadyWindow) -> Observation:
        if ready.window.asynchronous is not None:
            return observe_workers(ready, self._policy)
        return observe(ready, self._baseline, self._long_steps, self._policy)

    def judge(self, ready: ReadyWindow | None) -> Verdict:
        """The verdict after the window last absorbed."""
        verdict = self._hung(ready)
        if verdict is None:
            said = self._judge_ranks(ready)
            verdict = self.verdict if said is None else self._damper.settle(said, self.verdict)
        gaps = (Kind.INSUFFICIENT_DATA, Kind.HANG)
        if verdict.kind in gaps and self.verdict.kind not in gaps and not self._captures.count:
            # Windows before a gap are no evidence for what comes after it. Between captures there are only gaps.
            self._recent = RecentWindows(self._policy)
        self.verdict = self._with_loss(verdict)
        self.breakdown = self._path.breakdown(self.verdict)
        self._path.draw(self.verdict.culprits)
        return self.verdict

    def _with_loss(self, verdict: Verdict) -> Verdict:
        """The loss grows while a finding stands, and ends with it."""
        if not verdict.kind.is_finding or verdict.impact_ratio is None:
            self._lost_gpu_seconds = 0.0
            return verdict
        latest = self._raw[-1]
        self._lost_gpu_seconds += verdict.impact_ratio * latest.window_seconds * latest.world_size
        return replace(verdict, lost_gpu_seconds=self._lost_gpu_seconds)

    def _hung(self, ready: ReadyWindow | None) -> Verdict | None:
        if ready is None:
            return self._hang.observe(self._raw[-1], self._step_seconds, self._policy)
        self._hang.end()  # a job that has steps to compare is moving
        return None

    def _judge_ranks(self, ready: ReadyWindow | None) -> Verdict | None:
        """None where the latest window adds nothing."""
        latest = self._raw[-1]
        seen = len(latest.columns)
        if seen < self._policy.ranks_seen_ratio * latest.world_size:
            return Verdict(Kind.INSUFFICIENT_DATA, f"{seen} of {latest.world_size} ranks report")
        if ready is None:
            if (self._steps_seen == 0 or self._captures.count) and np.isnan(latest.columns.steps).all():
                return self._captures.settle(self._judge_stacks)
            if self.verdict.kind is Kind.HANG:
                return Verdict(Kind.INSUFFICIENT_DATA, "moving again; no window compared yet")
            return self._unknown_steps(latest)
        summary, world_size = ready.summary, ready.window.world_size
        if summary.ranks_measured < self._policy.ranks_seen_ratio * world_size:
            self._unmeasured += 1
            missing = f"waiting on others is measured on {summary.ranks_measured:.0f} of {world_size} ranks"
            if self._captures.count:
                return self._captures.settle(lambda: self._judge_stacks(missing))
            if self._steps_seen and self._unmeasured <= self._patience:
                return None  # waiting is sampled, and a window may hold no sample: that alone changes nothing
            if self._unmeasured <= self._patience:
                return Verdict(Kind.INSUFFICIENT_DATA, missing)  # the first steps; stacks before them show nothing
            return self._judge_stacks(missing)
        if self._steps_seen and self._unmeasured > self._patience:
            # Samples of this job are that far apart.
            self._patience = min(GAPS_WAITED * self._unmeasured, MAX_PATIENCE)
        self._unmeasured = 0
        self._steps_seen += summary.fewest_steps
        self._step_seconds = summary.step_seconds
        if ready.window.is_captured:
            return self._judge_captures(ready)
        self._captures = CaptureWindows()
        # Earlier windows were kept for their stacks; once steps are known they only take memory.
        self._raw.clear()
        self._raw.append(latest)
        if self._steps_seen < self._policy.steps_needed:
            reason = f"{self._steps_seen:.0f} steps seen, {self._policy.steps_needed} needed"
            return Verdict(Kind.INSUFFICIENT_DATA, reason)
        if self._step_counts.cadence is Cadence.DRIFTING:
            return Verdict(
                Kind.INSUFFICIENT_DATA, "ranks without collectives step apart; asynchronous, if that goes on"
            )
        skew = ready.window.clock_skew_seconds
        is_apart = skew is not None and skew > self._step_seconds + FIXED.clock_difference_seconds
        if is_apart and ends_steps_together(ready.window):
            return Verdict(Kind.INSUFFICIENT_DATA, f"clocks of the nodes are {skew:.1f} s apart; check NTP or chrony")
        if ready.window.asynchronous is None:
            if latest.departed:
                return None  # a rank died in the window: what the others did until then shows nothing
            if self._path.is_known:
                return self._judge_path(ready)
            if self._is_partial(ready):
                return self._recent.decide(self._observe(ready.without_outliers()), self.verdict)
        observation = self._observe(ready)
        if world_size == 1:
            observation = self._own_past.compare(ready.window, observation, self._policy)
        return self._recent.decide(observation, self.verdict)

    def _judge_path(self, ready: ReadyWindow) -> Verdict | None:
        self._since_path.append(ready.window)
        finding = self._path.take(ready.window)
        if finding is None or isinstance(finding, Verdict):
            return finding  # None while the next steps are under way: that alone changes nothing
        # Stacks are recorded now and then, in any of the windows between two of the path.
        since = tuple(self._since_path)
        self._since_path.clear()
        ready = ready._replace(window=replace(ready.window, evidence=lambda: merge_evidence(since)))
        observation = observe_path(ready, finding, self._long_steps, self._policy)
        # Steps of half a second come in few windows, which are long. One of them alone raises no alarm.
        is_long = round(float(finding.window.step_ns.sum()) / 1e9 / self._raw[-1].window_seconds) > 1
        is_clear = observation.impact_ratio >= FIXED.path_clear_impact_ratio
        return self._recent.decide(observation, self.verdict, 2 if is_long and is_clear else 1)

    def _is_partial(self, ready: ReadyWindow) -> bool:
        """Ranks are not compared in a window in which the job starts or ends: its few steps are unlike the others."""
        self._filled_ratio = max(self._filled_ratio, ready.filled_ratio)
        return ready.filled_ratio < FIXED.window_filled_ratio * self._filled_ratio

    def _unknown_steps(self, latest: JobWindow) -> Verdict | None:
        """Of a rank that runs no optimizer: the others' steps cannot be compared with it."""
        unknown = latest.columns.rank[np.isnan(latest.columns.steps)].tolist()
        if not unknown or self.verdict.kind is not Kind.INSUFFICIENT_DATA or len(self._pending) < UNKNOWN_WINDOWS:
            return None
        reason = f"no steps of {ranks(unknown)} are known; if it trains, call rankscope.probe.step() after each step"
        return Verdict(Kind.INSUFFICIENT_DATA, reason)

    def _judge_stacks(self, missing: str = NO_STEPS) -> Verdict:
        return self._stacks.judge(list(self._raw), self._policy, missing)

    def _judge_captures(self, ready: ReadyWindow) -> Verdict:
        """A few steps of many: confidence is low, and the stacks of the rest count too."""
        if self._steps_seen < self._policy.steps_needed:
            self._captures.add(ready.window, None)
        else:
            standing = self._captures.verdict or HEALTHY
            verdict = self._recent.decide(observe(ready, self._baseline, self._long_steps, self._policy), standing)
            reason = f"{verdict.reason.removesuffix(IN_CAPTURES)}{IN_CAPTURES}"
            self._captures.add(ready.window, replace(verdict, reason=reason, confidence=Confidence.LOW))
        return self._captures.settle(self._judge_stacks)


class FleetDetector:
    """All jobs of a shard, tick by tick: ranks are compared once over all jobs, the rest is done per job. A job without
    a window in a tick keeps its verdict.

    `policy_of` gives a job's own policy and is called at every tick: a changed one holds from that tick on."""

    def __init__(
        self, policy: Policy = DEFAULT_POLICY, policy_of: Callable[[str], Policy | None] | None = None
    ) -> None:
        self._policy = policy
        self._policy_of = policy_of
        self._judges: dict[str, JobDetector] = {}

    def evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        # Columns may hold anything that was sent as a measurement; results are checked where they are used.
        with np.errstate(all="ignore"):
            return self._evaluate(windows)

    def _evaluate(self, windows: Mapping[str, JobWindow]) -> dict[str, Verdict]:
        judges = self._judges
        if self._policy_of is None:
            for job in windows.keys() - judges.keys():
                judges[job] = JobDetector(self._policy)
        else:
            for job in windows:
                policy = self._policy_of(job) or self._policy
                if job in judges:
                    judges[job].adopt(policy)
                else:
                    judges[job] = JobDetector(policy)
        ready = {job: judges[job].absorb(window) for job, window in windows.items()}
        comparable = {job: w for job, w in ready.items() if w is not None and len(w.columns)}
        compared: dict[str, ReadyWindow] = {}
        for policy, together in self._grouped(comparable).items():
            compared.update(_compare(together, policy))
        return {job: judges[job].judge(compared.get(job)) for job in windows}

    def _grouped(self, windows: Mapping[str, JobWindow]) -> dict[Policy, dict[str, JobWindow]]:
        """By policy without its MFU target, which no comparison depends on: a fleet has many jobs and few policies."""
        if self._policy_of is None:
            return {self._policy: dict(windows)} if windows else {}
        # Looked up by identity first: hashing a policy for every job takes as long as evaluating the job.
        known: dict[int, dict[str, JobWindow]] = {}
        groups: dict[Policy, dict[str, JobWindow]] = {}
        for job, window in windows.items():
            policy = self._judges[job].policy
            group = known.get(id(policy))
            if group is None:
                group = known[id(policy)] = groups.setdefault(replace(policy, mfu_target_ratio=None), {})
            group[job] = window
        return groups

    def picture(self, job: str) -> StepPicture | None:
        judge = self._judges.get(job)
        return None if judge is None else judge.picture

    def breakdown(self, job: str) -> StepBreakdown | None:
        judge = self._judges.get(job)
        return None if judge is None else judge.breakdown

    def forget(self, job: str) -> None:
        """The job has ended, or its processes are new: the old ones are no evidence."""
        self._judges.pop(job, None)


def _compare(windows: Mapping[str, JobWindow], policy: Policy) -> dict[str, ReadyWindow]:
    columns = _concatenate([window.columns for window in windows.values()])
    screened = screen(columns, policy)
    summaries = summarize(columns, screened, len(windows))
    compared, start = {}, 0
    for (job, window), summary in zip(windows.items(), summaries, strict=True):
        end = start + len(window.columns)
        compared[job] = ReadyWindow(window, screened, slice(start, end), summary)
        start = end
    return compared


def _concatenate(parts: list[RankColumns]) -> RankColumns:
    """One table of several jobs' windows, for comparing ranks. `job` is renumbered by position."""
    job = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    left_out = dict.fromkeys(ONLY_FOR_CAUSES, np.broadcast_to(np.nan, job.shape))
    names = [f.name for f in fields(RankColumns) if f.name != "job" and f.name not in left_out]
    made = {name: np.concatenate([*map(attrgetter(name), parts)]) for name in names}
    return RankColumns(job=job, **made, **left_out)
