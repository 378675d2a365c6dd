"""What a job was over its whole life: its steps, and the verdicts that stood."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from rankscope.analysis.stats.step_time_comparison import StepTimes
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.operator.console.answers import measured
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.window_pb2 import RankWindow

# Between two evaluations; a longer gap is a pause of the machine.
MAX_GAP_SECONDS = 10.0
# A shorter warning is brief: it is mentioned below the verdict.
MIN_WARNING_SECONDS = 10.0
MIN_WARNING_SHARE = 0.5
MAX_PROBLEMS = 3


@dataclass
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Finding:
    """A verdict that stood for some of the run's time, at one stretch or at several."""

    verdict: Verdict  # the latest with the highest severity
    first_unix_seconds: float
    last_unix_seconds: float
    seconds: float = 0.0  # for which it stood
    breakdown: StepBreakdown | None = None  # the latest, with the excess of the culprit if there is one
    _lost_before: float = 0.0  # in stretches that have ended
    _lost: float = 0.0

    def add(self, verdict: Verdict, breakdown: StepBreakdown | None, now: float, seconds: float) -> None:
        lost = verdict.lost_gpu_seconds or 0.0
        if lost < self._lost:  # a stretch begins at zero
            self._lost_before += self._lost
        self._lost = lost
        if verdict.is_alarm >= self.verdict.is_alarm:
            self.verdict = verdict
        # An alarm stands for some windows after the rank has recovered.
        had_excess = self.breakdown is not None and self.breakdown.has_excess
        if breakdown is not None and (breakdown.has_excess or not had_excess):
            self.breakdown = breakdown
        self.seconds += seconds
        self.last_unix_seconds = now

    @property
    def total(self) -> Verdict:
        """The verdict with the loss of all stretches."""
        return replace(self.verdict, lost_gpu_seconds=(self._lost_before + self._lost) or None)

    @property
    def weight(self) -> tuple[bool, float, float]:
        verdict = self.total
        return verdict.is_alarm, verdict.lost_gpu_seconds or 0.0, verdict.impact_ratio or 0.0


@dataclass
class JobSummary:
    """`add` takes every state of the job."""

    job: str
    step_times: StepTimes = field(default_factory=StepTimes)
    ranks: int = 0
    steps: int = 0
    restarts: int = 0
    pids: dict[int, int] = field(default_factory=dict)  # the latest rank of each process, from the last restart on
    self_seconds: Mean = field(default_factory=Mean)
    wait_seconds: Mean = field(default_factory=Mean)
    input_seconds: Mean = field(default_factory=Mean)
    mfu_ratio: Mean = field(default_factory=Mean)
    exposed_ratio: Mean = field(default_factory=Mean)
    windows: Sequence[RankWindow] = ()  # the last in which steps ended
    problems: dict[str, str] = field(default_factory=dict)  # by the text without its numbers
    # The last that is no finding.
    calm: Verdict = field(default_factory=lambda: Verdict(Kind.INSUFFICIENT_DATA, "no window was seen"))
    judged_seconds: float = 0.0
    _breakdown: StepBreakdown | None = None  # the latest without a finding
    _findings: dict[object, Finding] = field(default_factory=dict)
    _standing: Finding | None = None
    _evaluated: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """The costliest first. A job that ends recovers from nothing: the last windows do not decide."""
        return sorted(self._findings.values(), key=attrgetter("weight"), reverse=True)

    @property
    def leading(self) -> Finding | None:
        """The finding that is the verdict. A warning is one if it stood for most of the run."""
        first = next(iter(self.findings), None)
        if first is None or first.verdict.is_alarm:
            return first
        lasts = first.seconds >= max(MIN_WARNING_SECONDS, MIN_WARNING_SHARE * self.judged_seconds)
        return first if lasts else None

    @property
    def verdict(self) -> Verdict:
        leading = self.leading
        return self.calm if leading is None else leading.total

    def meet(self, state: JobState) -> None:
        """Remember which process is which rank: a rank that has ended is missing in later states."""
        if state.restarts != self.restarts:
            self.restarts = state.restarts
            self.pids.clear()
        self.pids.update((identity.pid, rank) for rank, identity in state.identities.items())

    def add(self, state: JobState) -> bool:
        """False if it was added before: an evaluation of other jobs brings the same state again."""
        if state.evaluated_unix_seconds == self._evaluated:
            return False
        now, seconds = state.evaluated_unix_seconds, 0.0
        if self._evaluated:
            seconds = min(max(now - self._evaluated, 0.0), MAX_GAP_SECONDS)
        self._evaluated = now
        self.ranks = max(self.ranks, state.world_size)
        self._note(state, now, seconds)
        windows = list(state.windows)
        for window in windows:
            self.steps = max(self.steps, window.steps_total)
            for problem in window.problems:
                if len(self.problems) < MAX_PROBLEMS:
                    self.problems.setdefault(re.sub(r"\d+", "", problem), problem)
        timed = [window for window in windows if window.HasField("step_seconds")]
        if not timed:
            return True
        self.windows = timed
        for window in timed:
            self.self_seconds.add(measured(window, "self_seconds"))
            self.wait_seconds.add(measured(window, "wait_seconds"))
            self.input_seconds.add(measured(window, "input_seconds"))
        self.mfu_ratio.add(state.mfu_ratio)
        self.exposed_ratio.add(state.exposed_communication_ratio)
        return True

    @property
    def breakdown(self) -> StepBreakdown | None:
        """Return where a step went while the verdict stood; None if the job was not judged by the critical path."""
        return self._breakdown if self.leading is None else self.leading.breakdown

    def _note(self, state: JobState, now: float, seconds: float) -> None:
        verdict = state.verdict
        if verdict.kind is not Kind.INSUFFICIENT_DATA:
            self.judged_seconds += seconds
        if not verdict.kind.is_finding:
            self._standing = None
            self._breakdown = state.breakdown or self._breakdown
            if verdict.kind is Kind.HEALTHY or self.calm.kind is Kind.INSUFFICIENT_DATA:
                self.calm = verdict
            return
        finding = self._findings.setdefault((verdict.kind, verdict.culprits, verdict.stage), Finding(verdict, now, now))
        finding.add(verdict, state.breakdown, now, seconds if finding is self._standing else 0.0)
        self._standing = finding

    @property
    def median_step_seconds(self) -> float | None:
        return self.step_times.median_seconds
