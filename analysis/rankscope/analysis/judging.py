"""The verdict on one job: gathers its windows, and asks the rules that fit what is known of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from rankscope.analysis.capture_windows import CaptureWindows
from rankscope.analysis.hangs import Hang, find_hang
from rankscope.analysis.merging import merge_evidence, merge_windows
from rankscope.analysis.observing import ReadyWindow, observe
from rankscope.analysis.policy import Policy
from rankscope.analysis.rules import HEALTHY, RecentWindows
from rankscope.analysis.stack_judging import judge_stack_windows
from rankscope.analysis.transfers import TransferBaseline
from rankscope.analysis.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.analysis.windows import FrameSeen, JobWindow
from rankscope.analysis.wording import ranks

# Steps every rank needs in a window before ranks are compared in it.
STEPS_PER_WINDOW = 4
# Windows without enough steps are gathered, but not for ever.
PENDING_KEPT = 600
FRAMES_OF_A_HANG = 3
# Nodes may differ by a step, and by what the kernel's clock discipline leaves.
CLOCK_TOLERANCE_SECONDS = 0.25
IN_CAPTURES = " (in captured steps)"


class JobJudge:
    """Call `absorb` with every window; screen what it returns (all jobs together), and hand that to `judge`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pending: list[JobWindow] = []
        self._raw: deque[JobWindow] = deque(maxlen=2 * policy.stack_windows)
        self._recent = RecentWindows(policy)
        self._baseline = TransferBaseline()
        self._steps_seen = 0.0
        self._unmeasured = 0
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
        self._captures = CaptureWindows()
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "the policy has changed: the ranks are judged anew")

    def absorb(self, window: JobWindow) -> JobWindow | None:
        """Take a window; return the stretch that is now ready for comparing ranks, if one is."""
        self._raw.append(window)
        if np.isnan(window.columns.steps).all():
            return None  # nothing to gather: between two captures there may be thousands of these
        self._pending.append(window)
        if len(self._pending) > PENDING_KEPT:
            del self._pending[0]
        ready = window if len(self._pending) == 1 else merge_windows(self._pending)
        if not ready.columns.steps.min(initial=np.inf) >= STEPS_PER_WINDOW:  # nor where a rank's are not known
            return None
        self._pending.clear()
        if ready.is_captured:
            around = tuple(self._raw)
            return replace(ready, evidence=lambda: merge_evidence(around))
        return ready

    def judge(self, ready: ReadyWindow | None) -> Verdict:
        """The verdict after the window last absorbed."""
        # Who has steps to be judged by is moving.
        hung = self._hung() if ready is None else None
        self.verdict = self._with_loss(hung or self._judge_ranks(ready))
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

    def _judge_ranks(self, ready: ReadyWindow | None) -> Verdict:
        latest = self._raw[-1]
        seen = len(latest.columns)
        if seen < self._policy.ranks_seen_ratio * latest.world_size:
            return Verdict(Kind.INSUFFICIENT_DATA, f"{seen} of {latest.world_size} ranks report")
        if ready is None:
            if (self._steps_seen == 0 or self._captures.count) and np.isnan(latest.columns.steps).all():
                return self._captures.settle(self._raw, self._policy)
            return self.verdict if self.verdict.kind is not Kind.HANG else Verdict(Kind.HEALTHY, "moving again")
        summary = ready.summary
        if summary.ranks_measured < self._policy.ranks_seen_ratio * latest.world_size:
            self._unmeasured += 1
            if self._steps_seen and self._unmeasured <= self._policy.windows_kept:
                return self.verdict  # DDP is sampled, and a window may hold no sample: that alone changes nothing
            return judge_stack_windows(list(self._raw), self._policy)
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
