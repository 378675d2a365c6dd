"""The verdict on one job: rules over its last windows, with persistence, hysteresis, impact and abstention."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rankscope.analysis.causes import name_cause
from rankscope.analysis.hangs import Hang, find_hang
from rankscope.analysis.merging import merge_evidence, merge_windows
from rankscope.analysis.observing import Observation, ReadyWindow, observe
from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import median_or_nan
from rankscope.analysis.stack_evidence import StackVerdict, judge_stacks
from rankscope.analysis.transfers import TransferBaseline
from rankscope.analysis.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.analysis.windows import FrameSeen, JobWindow
from rankscope.analysis.wording import milliseconds, percent, ranks

# Steps every rank needs in a window before ranks are compared in it.
STEPS_PER_WINDOW = 4
# Windows without enough steps are gathered, but not for ever.
PENDING_KEPT = 600


class JobJudge:
    """Call `absorb` with every window; screen what it returns (all jobs together), and hand that to `judge`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pending: list[JobWindow] = []
        self._raw: deque[JobWindow] = deque(maxlen=2 * policy.stack_windows)
        self._recent: deque[Observation] = deque(maxlen=policy.windows_kept)
        self._baseline = TransferBaseline()
        self._steps_seen = 0.0
        self._step_seconds: float | None = None
        self._lost_gpu_seconds = 0.0
        self.verdict = Verdict(Kind.INSUFFICIENT_DATA, "no window yet")

    def absorb(self, window: JobWindow) -> JobWindow | None:
        """Take a window; return the stretch that is now ready for comparing ranks, if one is."""
        self._raw.append(window)
        self._pending.append(window)
        if len(self._pending) > PENDING_KEPT:
            del self._pending[0]
        if np.isnan(window.columns.steps).all():
            return None
        if window.columns.steps.min(initial=np.inf) < STEPS_PER_WINDOW:
            merged = merge_windows(self._pending)
            if not merged.columns.steps.min(initial=np.inf) >= STEPS_PER_WINDOW:
                return None
            window = merged
        elif len(self._pending) > 1:
            window = merge_windows(self._pending)
        self._pending.clear()
        return window

    def judge(self, ready: ReadyWindow | None) -> Verdict:
        """The verdict after the window last absorbed."""
        self.verdict = self._hung() or self._judge_ranks(ready)
        return self.verdict

    # -- standing still

    def _hung(self) -> Verdict | None:
        latest = self._raw[-1]
        if np.fmax.reduce(latest.columns.steps, initial=0.0) > 0:
            return None
        evidence = latest.evidence()
        stalls = {rank: evidence[rank].stall if rank in evidence else None for rank in latest.columns.rank.tolist()}
        hang = find_hang(stalls, latest.departed, self._step_seconds, self._policy)
        if hang is None:
            return None
        self._lost_gpu_seconds += latest.window_seconds * latest.world_size
        return self._hang_verdict(hang, known_steps=self._steps_seen > 0)

    def _hang_verdict(self, hang: Hang, known_steps: bool) -> Verdict:
        who = f"{ranks(hang.culprits)}: {hang.how}" if hang.culprits else hang.how
        where = f", at {hang.stack[0]}" if hang.stack else ""
        frames = tuple(frame for frame in map(_frame, hang.stack[:3]) if frame)
        return Verdict(
            Kind.HANG,
            f"no rank has advanced for {hang.seconds:.0f} s; {who}{where}",
            Severity.ALARM,
            Confidence.HIGH if known_steps else Confidence.LOW,
            hang.culprits,
            impact_ratio=1.0,
            lost_gpu_seconds=self._lost_gpu_seconds,
            cause=Cause(hang.phase, frames, hang.how),
        )

    # -- moving

    def _judge_ranks(self, ready: ReadyWindow | None) -> Verdict:
        latest = self._raw[-1]
        reason = self._abstain(latest)
        if reason:
            return Verdict(Kind.INSUFFICIENT_DATA, reason)
        if ready is None:
            if self._steps_seen == 0 and np.isnan(latest.columns.steps).all():
                return self._judge_stacks(latest)
            return self.verdict if self.verdict.kind is not Kind.HANG else self._healthy("moving again")
        summary = ready.summary
        if summary.ranks_measured < self._policy.ranks_seen_ratio * latest.world_size:
            return self._judge_stacks(latest)
        self._steps_seen += summary.fewest_steps
        self._step_seconds = summary.step_seconds
        if self._steps_seen < self._policy.steps_needed:
            reason = f"{self._steps_seen:.0f} steps seen, {self._policy.steps_needed} needed"
            return Verdict(Kind.INSUFFICIENT_DATA, reason)
        skew = ready.window.clock_skew_seconds
        if skew is not None and skew > self._step_seconds + 0.25:
            return Verdict(Kind.INSUFFICIENT_DATA, f"clocks of the nodes are {skew:.1f} s apart; check NTP or chrony")
        self._recent.append(observe(ready, self._baseline, self._policy))
        return self._decide()

    def _abstain(self, latest: JobWindow) -> str:
        seen = len(latest.columns)
        if seen < self._policy.ranks_seen_ratio * latest.world_size:
            return f"{seen} of {latest.world_size} ranks report"
        return ""

    def _decide(self) -> Verdict:
        if not self.verdict.kind.is_finding and not any(observation.remarkable for observation in self._recent):
            return self._healthy("no rank, stage or link stands out")
        for rule in (self._slow_ranks, self._slow_stage, self._slow_communication, self._imbalance, self._input_bound):
            verdict = rule()
            if verdict is not None:
                return verdict
        return self._low_mfu() or self._healthy("no rank, stage or link stands out")

    def _healthy(self, reason: str) -> Verdict:
        self._lost_gpu_seconds = 0.0
        return Verdict(Kind.HEALTHY, reason)

    def _severity(self, windows: int) -> Severity | None:
        if windows >= self._policy.windows_for_alarm:
            return Severity.ALARM
        return Severity.WARNING if windows >= self._policy.windows_for_warning else None

    def _standing(self, kind: Kind) -> bool:
        return self.verdict.kind is kind and self.verdict.severity is Severity.ALARM

    def _slow_ranks(self) -> Verdict | None:
        seen = Counter(rank for observation in self._recent for rank in observation.outliers)
        alarmed = {rank for rank, count in seen.items() if count >= self._policy.windows_for_alarm}
        if self._standing(Kind.SLOW_RANK):
            lingering = Counter(
                rank for observation in self._recent for rank in observation.outliers | observation.lingering
            )
            alarmed |= {r for r in self.verdict.culprits if lingering[r] >= self._policy.windows_for_warning}
        warned = {rank for rank, count in seen.items() if count >= self._policy.windows_for_warning}
        culprits = tuple(sorted(alarmed or warned))
        if not culprits:
            return None
        return self._slow_rank_verdict(culprits, Severity.ALARM if alarmed else Severity.WARNING)

    def _slow_rank_verdict(self, culprits: tuple[int, ...], severity: Severity) -> Verdict:
        flagged = [observation for observation in self._recent if observation.outliers.intersection(culprits)]
        if not flagged or flagged[-1].screen is None:
            return replace(self.verdict, severity=severity)
        last, screened = flagged[-1], flagged[-1].screen
        columns = last.window.columns
        rows = np.isin(columns.rank, culprits)
        evidence = merge_evidence([observation.window for observation in flagged])
        stacks = {rank: e.stacks for rank, e in evidence.items() if e.stacks is not None}
        cause = name_cause(columns, screened, rows, stacks, self._policy)
        impact = float(np.mean([observation.impact_ratio for observation in flagged]))
        self._count_loss(impact, self._recent[-1])
        own, usual = median_or_nan(screened.own_seconds[rows]), median_or_nan(screened.reference_seconds[rows])
        group = _place_of(columns.rank[rows].tolist(), last.window)
        reason = (
            f"{group or ranks(culprits)}: {milliseconds(own)} of own work a step against {milliseconds(usual)} of its "
            f"peers; the job would be {percent(impact)} faster without that"
        )
        return Verdict(
            Kind.SLOW_RANK,
            reason,
            severity,
            Confidence.HIGH,
            culprits,
            group=group,
            impact_ratio=impact,
            lost_gpu_seconds=self._lost_gpu_seconds,
            cause=cause,
        )

    def _slow_stage(self) -> Verdict | None:
        seen = Counter(o.stage.stage for o in self._recent if o.stage)
        stage, count = max(seen.items(), key=lambda item: item[1], default=(-1, 0))
        severity = self._severity(count)
        if self._standing(Kind.SLOW_STAGE) and self.verdict.stage is not None:
            still = [f.stage for o in self._recent if (f := o.stage or o.stage_lingering)]
            if still.count(self.verdict.stage) >= self._policy.windows_for_warning:
                stage, severity = self.verdict.stage, Severity.ALARM
        if severity is None:
            return None
        found = [o.stage for o in self._recent if o.stage and o.stage.stage == stage]
        if not found:
            return self.verdict
        columns = self._recent[-1].window.columns
        impact = float(np.mean([f.impact_ratio for f in found]))
        self._count_loss(impact, self._recent[-1])
        return Verdict(
            Kind.SLOW_STAGE,
            f"stage {stage} works {found[-1].ratio:.2f}× as long as the other stages; no rank in it stands out",
            severity,
            Confidence.HIGH,
            tuple(columns.rank[columns.stage == stage].tolist()),
            stage=stage,
            impact_ratio=impact,
            lost_gpu_seconds=self._lost_gpu_seconds,
            cause=Cause("stage", (), "the stage's median self time against that of the other stages"),
        )

    def _slow_communication(self) -> Verdict | None:
        found = [o.transfer for o in self._recent if o.transfer]
        if not found:
            return None
        reason = (
            f"no rank is late, but a step's communication takes {milliseconds(found[-1].transfer_seconds)} "
            f"instead of {milliseconds(found[-1].usual_seconds)}"
        )
        cause = Cause("communication", (), f"{found[-1].ratio:.1f}× its own past")
        return self._everyone(Kind.SLOW_COMMUNICATION, [f.impact_ratio for f in found], reason, cause)

    def _imbalance(self) -> Verdict | None:
        found = [o.imbalance_impact_ratio for o in self._recent if o.imbalance_impact_ratio is not None]
        if not found:
            return None
        reason = "all ranks wait in turn: the work of a step is spread unevenly, and differently each time"
        return self._everyone(Kind.DATA_IMBALANCE, found, reason, Cause("unknown", (), "self time varies by step"))

    def _input_bound(self) -> Verdict | None:
        shares = [o.summary.input_seconds / o.summary.step_seconds for o in self._recent]
        found = [share for share in shares if share >= self._policy.input_bound_ratio]
        if not found:
            return None
        reason = f"all ranks wait for data, {percent(found[-1])} of each step"
        return self._everyone(Kind.INPUT_BOUND, found, reason, Cause("input", (), "data loader wait of every rank"))

    def _low_mfu(self) -> Verdict | None:
        target = self._policy.mfu_target_ratio
        known = [o.summary.mfu_ratio for o in self._recent if target and o.summary.mfu_ratio < target]
        if not known or target is None:
            return None
        reason = f"MFU {percent(known[-1])} is below the target of {percent(target)}"
        return self._everyone(Kind.LOW_MFU, [1 - mfu / target for mfu in known], reason, Cause())

    def _everyone(self, kind: Kind, impacts: Iterable[float], reason: str, cause: Cause) -> Verdict | None:
        """A verdict that names no rank, if enough of the last windows say so."""
        found = list(impacts)
        severity = self._severity(len(found))
        if self._standing(kind) and len(found) >= self._policy.windows_for_warning:
            severity = Severity.ALARM
        if severity is None:
            return None
        impact = float(np.mean(found))
        self._count_loss(impact, self._recent[-1])
        return Verdict(
            kind,
            reason,
            severity,
            Confidence.HIGH,
            impact_ratio=impact,
            lost_gpu_seconds=self._lost_gpu_seconds,
            cause=cause,
        )

    def _count_loss(self, impact: float, observation: Observation) -> None:
        window = observation.window
        self._lost_gpu_seconds += impact * window.window_seconds * window.world_size

    # -- level 0

    def _judge_stacks(self, latest: JobWindow) -> Verdict:
        windows, length = list(self._raw), self._policy.stack_windows
        if len(windows) < 2 * length:
            reason = f"no step records; {len(windows)} of {2 * length} windows of stacks gathered"
            return Verdict(Kind.INSUFFICIENT_DATA, reason, confidence=Confidence.LOW)
        halves = [self._compare_stacks(half, latest.world_size) for half in (windows[:length], windows[length:])]
        suspects = {half.suspect.rank if half.suspect else None for half in halves}
        suspect = halves[-1].suspect
        if suspect is not None and len(suspects) == 1:
            self._lost_gpu_seconds += suspect.excess_share * latest.window_seconds * latest.world_size
            return Verdict(
                Kind.SLOW_RANK,
                f"{ranks([suspect.rank])}: {suspect.cause.evidence}, and it waits less than they do",
                Severity.ALARM,
                Confidence.LOW,
                (suspect.rank,),
                impact_ratio=suspect.excess_share,
                lost_gpu_seconds=self._lost_gpu_seconds,
                cause=suspect.cause,
            )
        reason = next((half.reason for half in reversed(halves) if half.reason), "")
        if reason or suspects != {None}:
            reason = reason or "a rank differs from its peers, but not for long enough"
            return Verdict(Kind.INSUFFICIENT_DATA, reason, confidence=Confidence.LOW)
        self._lost_gpu_seconds = 0.0
        return Verdict(Kind.HEALTHY, "no rank stands out in its stacks", confidence=Confidence.LOW)

    def _compare_stacks(self, windows: list[JobWindow], world_size: int) -> StackVerdict:
        evidence = merge_evidence(windows)
        profiles = {rank: e.stacks for rank, e in evidence.items() if e.stacks is not None}
        if len(profiles) < self._policy.ranks_seen_ratio * world_size:
            return StackVerdict(reason="neither step records nor stacks of enough ranks")
        starved = {rank: e.starved_share for rank, e in evidence.items() if e.starved_share is not None}
        return judge_stacks(profiles, starved, self._policy)


def _place_of(culprits: list[int], window: JobWindow) -> str:
    """Name of the node whose ranks, all of them and no others, are the culprits; empty if there is no such node."""
    columns = window.columns
    places = set(columns.place[np.isin(columns.rank, culprits)].tolist())
    if len(culprits) < 2 or len(places) != 1 or len(np.unique(columns.place)) < 2:
        return ""
    place = places.pop()
    if set(columns.rank[columns.place == place].tolist()) != set(culprits):
        return ""
    return f"node {window.place_names.get(place, place)}"


def _frame(text: str) -> FrameSeen | None:
    """`function (file:line)` as a frame."""
    function, bracket, rest = text.partition(" (")
    file, colon, line = rest.rstrip(")").rpartition(":")
    if not bracket or not colon or not line.isdigit():
        return None
    return FrameSeen(function, file, int(line), 1.0, 1.0, "unknown")
