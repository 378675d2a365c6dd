"""Slow ranks by the critical path: who holds up the others, window by window, while a job runs or from a recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Bools, median_or_nan
from rankscope.analysis.step_graph.path_windows import MIN_WINDOW_STEPS, PathFinder, PathWindow
from rankscope.analysis.step_graph.pending_operations import PendingOperations
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown, TrafficTotal, add_traffic, summarize
from rankscope.analysis.step_graph.step_picture import StepPicture, better_picture, draw_step
from rankscope.analysis.verdicts.long_steps import LongStepHistory, Stalls
from rankscope.analysis.verdicts.path_findings import judge_common
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, FIXED, Policy
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict, ranks
from rankscope.analysis.verdicts.windows import JobWindow

# Losses are compared over the windows since a rank became slow, but not over more than these.
MAX_WINDOWS = 30
# CPU time to judge a window and each of its rows, and the share of a CPU that a job may use for it.
WINDOW_SECONDS = 1e-2
ROW_SECONDS = 7e-6
CPU_SHARE = 0.1
MAX_REST_SECONDS = 60.0
# Sums are used after this many windows without a judgement, or this many times the longest gap until now.
PATIENCE = 15
PATIENT_GAPS = 3


class PathFinding(NamedTuple):
    """The result of one more window. Columns are by rank, as in the window."""

    window: PathWindow
    slow: Bools  # costs enough in this window, and clearly more than the peers since it became slow
    lingering: Bools  # not slow, but not clearly back either
    recent: Sequence[PathWindow]  # the last ones, this one included


class PathHistory:
    """Finds the ranks that are slow in the windows up to now."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._windows: deque[PathWindow] = deque(maxlen=MAX_WINDOWS)
        self._slow: deque[Bools] = deque(maxlen=MAX_WINDOWS)

    def add(self, window: PathWindow) -> PathFinding:
        if self._windows and not np.array_equal(self._windows[-1].ranks, window.ranks):
            self._windows.clear()
            self._slow.clear()
        returns = window.returns
        self._windows.append(window)
        sizes = np.bincount(window.stages[window.is_covered], minlength=window.stages.max(initial=0) + 1)
        needed = np.where(sizes[window.stages] > 1, FIXED.path_impact_ratio, FIXED.path_alone_impact_ratio)
        self._slow.append(returns >= needed)
        slow = np.zeros(len(window.ranks), dtype=bool)
        for rank in np.flatnonzero(self._slow[-1]).tolist():
            slow[rank] = _stands_out(self._since_slow(rank), rank)
        lingering = returns >= self._policy.hysteresis * needed
        return PathFinding(window, slow, lingering & ~slow, [*self._windows][-self._policy.windows_kept :])

    def _since_slow(self, rank: int) -> list[PathWindow]:
        """The windows that cover the rank from the first in which it was slow, without a long pause since."""
        both = zip(self._windows, self._slow, strict=True)
        covering = [(window, slow) for window, slow in both if window.is_covered[rank]]
        first = pause = 0
        for back, (_, slow) in enumerate(reversed(covering)):
            pause = 0 if slow[rank] else pause + 1
            first = first if pause else back
            if pause > self._policy.windows_kept:
                break
        return [window for window, _ in covering[len(covering) - 1 - first :]]


def _stands_out(windows: Sequence[PathWindow], rank: int) -> bool:
    """True if a rank costs more than its peers beyond chance: where data is uneven, each of them is last at times."""
    stages = windows[-1].stages
    losses = np.concatenate([window.losses_ns for window in windows])
    covered = np.concatenate([np.tile(window.is_covered, (len(window.steps), 1)) for window in windows])
    is_peer = (stages == stages[rank]) & ~np.isnan(losses).all(axis=0)
    is_peer[rank] = False
    known = np.nan_to_num(losses)
    usual = np.maximum(known[:, is_peer].sum(axis=0) / covered[:, is_peer].sum(axis=0), 0.0)
    beyond = known[:, rank] - (float(np.median(usual)) if len(usual) else 0.0)
    mean, error = float(known[:, rank].mean()), float(beyond.std(ddof=1)) / np.sqrt(len(beyond))
    is_odd = not len(usual) or mean >= FIXED.path_peers_ratio * float(np.median(usual))
    return is_odd and bool(beyond.mean() >= FIXED.path_score * error)


def judge_path(windows: Sequence[PathWindow], policy: Policy = DEFAULT_POLICY) -> Verdict:
    """The ranks that were slow in enough windows of a row, or stalled."""
    needed = policy.windows_for_alarm
    if len(windows) < needed:
        return Verdict(Kind.INSUFFICIENT_DATA, f"{len(windows)} windows of whole steps; a verdict needs {needed}")
    compared = median_or_nan(np.array([window.compared for window in windows[-policy.windows_kept :]]))
    if not compared >= FIXED.path_compared_share:
        return Verdict(Kind.INSUFFICIENT_DATA, too_little_compared(compared))
    history, long_steps = PathHistory(policy), LongStepHistory()
    slow = np.array([history.add(window).slow for window in windows])
    stalls: Stalls | None = None
    for window in windows:
        long_steps.add_path(window, policy)
        stalls = long_steps.found.of_ranks or stalls
    last = range(needed, len(windows) + 1)
    counts = np.array([slow[max(0, end - policy.windows_kept) : end].sum(axis=0) for end in last])
    culprits = np.flatnonzero((counts >= needed).any(axis=0))
    if not len(culprits) and stalls is not None:
        verb = "stalls" if len(stalls.ranks) == 1 else "stall"
        reason = f"{ranks(stalls.ranks)} {verb} {stalls}; {stalls.impact_ratio:.0%} of the time would come back"
        return Verdict(Kind.SLOW_RANK, reason, Severity.ALARM, culprits=stalls.ranks, impact_ratio=stalls.impact_ratio)
    if not len(culprits):
        last_slow = slow[-(needed - 1) :].all(axis=0)
        if last_slow.any():
            names = tuple(windows[0].ranks[last_slow].tolist())
            reason = f"{ranks(names)} held up the others in the last {needed - 1} windows; a verdict needs {needed}"
            return Verdict(Kind.INSUFFICIENT_DATA, reason)
        common = judge_common(windows, np.asarray(slow.any(axis=1)), policy)
        return common or Verdict(Kind.HEALTHY, "no rank holds up the others on the critical path")
    during = np.flatnonzero(slow[:, culprits].any(axis=1))
    shown = windows[int(during[0]) : int(during[-1]) + 1]
    lost = sum(float(np.nan_to_num(window.losses_ns)[:, culprits].sum()) for window in shown)
    impact = lost / sum(float(window.step_ns.sum()) for window in shown)
    names = tuple(windows[0].ranks[culprits].tolist())
    reason = (
        f"{impact:.0%} of the time of steps {shown[0].steps[0]:,} to {shown[-1].steps[-1]:,} would come back if "
        f"{ranks(names)} worked as the peers"
    )
    return Verdict(Kind.SLOW_RANK, reason, Severity.ALARM, culprits=names, impact_ratio=impact)


def where_steps_go(windows: Sequence[PathWindow], culprits: Collection[int] = ()) -> StepBreakdown | None:
    """The mean step of the windows in which a culprit costs enough, or of all windows where there is none."""
    windows = [window for window in windows if np.array_equal(window.ranks, windows[-1].ranks)]
    if not windows:
        return None
    accused = np.isin(windows[-1].ranks, list(culprits))
    slow = [window for window in windows if (window.returns[accused] >= FIXED.path_impact_ratio).any()]
    return summarize([window.parts for window in slow or windows], culprits, windows[-1].ranks.tolist())


def too_little_compared(share: float) -> str:
    return f"only {share:.0%} of the work on the critical path can be compared with that of a peer"


class LivePath:
    """The critical path of a job while it runs: takes the operations of windows as they come, and judges whenever all
    ranks have sent a few more steps."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._history = PathHistory(policy)
        self._compared: deque[float] = deque(maxlen=policy.windows_kept)
        self._windows: deque[PathWindow] = deque(maxlen=policy.windows_kept)
        self._traffic: Mapping[str, TrafficTotal] = {}
        self._pending = PendingOperations()
        self._suspects: deque[frozenset[int]] = deque(maxlen=policy.windows_kept)
        self._finder = PathFinder()
        self._stages: dict[int, int] = {}
        self._picture: StepPicture | None = None
        self._judged = -1  # the last step that was in a window
        self._is_fed = False
        self._missed = 0  # windows without a judgement
        self._patience = PATIENCE
        self._rested_unix_seconds = 0.0

    @property
    def is_known(self) -> bool:
        """Operations arrive, and are enough to judge by."""
        return self._is_fed and self._finder.is_matched and self._missed <= self._patience

    def breakdown(self, verdict: Verdict) -> StepBreakdown | None:
        """Return where the steps of the last windows go; None if the job is not judged by the path."""
        culprits = verdict.culprits if verdict.kind is Kind.SLOW_RANK else ()
        known = where_steps_go(self._windows, culprits) if self.is_known else None
        return None if known is None else replace(known, totals=self._traffic)

    def add(self, window: JobWindow) -> None:
        """Looks at one rank only until there are operations: most jobs have none."""
        if not self._is_fed and not window.operations(True):
            return
        self._is_fed = True
        self._pending.add(window.operations(False))

    def with_stages(self, window: JobWindow) -> JobWindow:
        """Fill in the stages that the operations show, where the program declares none."""
        columns, stages = window.columns, self._stages
        if not stages or (columns.stage >= 0).any():
            return window
        ranks = columns.rank.tolist()
        if any(rank not in stages for rank in ranks):
            return window
        stage = np.array([stages[rank] for rank in ranks], dtype=np.int64)
        return replace(window, columns=replace(columns, stage=stage))

    def picture(self, culprits: Sequence[int]) -> StepPicture | None:
        """A step of the last window, or of an earlier one that shows more of the culprits; None where the job is not
        judged by the path. Nobody but a culprit is in focus."""
        picture = self._picture if self.is_known else None
        if picture is None or picture.focus is None or picture.focus.rank in culprits:
            return picture
        return replace(picture, focus=None, lost_ns=0)

    def take(self, window: JobWindow) -> PathFinding | Verdict | None:
        """Judge the steps since the last call; None until all ranks have sent enough of them."""
        judged = self._window(window)
        if judged is None:
            self._missed += 1
            return None
        self._patience = max(self._patience, PATIENT_GAPS * self._missed)
        self._missed = 0
        self._compared.append(judged.compared)
        self._windows.append(judged)
        compared = median(self._compared)
        if compared < FIXED.path_compared_share:
            return Verdict(Kind.INSUFFICIENT_DATA, too_little_compared(compared))
        finding = self._history.add(judged)
        self._suspects.append(frozenset(judged.ranks[finding.slow | finding.lingering].tolist()))
        return finding

    def draw(self, culprits: Sequence[int]) -> None:
        """Draw a step of the last window, and forget its operations. `culprits` are those of the verdict on it."""
        steps, self._finder.judged = self._finder.judged, None
        if steps is not None:
            self._picture = better_picture(self._picture, draw_step(steps, culprits), culprits)

    def _window(self, window: JobWindow) -> PathWindow | None:
        if window.end_unix_seconds < self._rested_unix_seconds:
            return None
        ranks = window.columns.rank.tolist()
        complete = self._pending.last_common_step(ranks)
        if complete is None or complete < self._judged + MIN_WINDOW_STEPS:
            return None
        suspects = frozenset[int]().union(*self._suspects)
        sample = self._pending.take(ranks, self._judged, complete, suspects)
        if sample is None:
            return None
        cpu_seconds = WINDOW_SECONDS + len(sample.operations) * ROW_SECONDS
        rest_seconds = min(cpu_seconds / CPU_SHARE, MAX_REST_SECONDS)
        self._rested_unix_seconds = window.end_unix_seconds + rest_seconds
        judged = self._finder.find(sample.operations, sample.outside_ns)
        if judged is None:
            return None
        self._stages = self._finder.stages
        if sample.late_ns is not None:
            self._stages = self._pending.replicas.stages(self._stages)
            judged = judged.among(window.columns.rank, self._stages, sample.late_ns)
            seen = self._finder.judged
            if seen is not None:
                self._pending.replicas.check([group.name for group in seen.graph.operations.groups], seen.kinds)
        self._count_traffic(judged, complete - self._judged if self._judged >= 0 else len(judged.steps))
        self._judged = complete
        self._pending.drop(complete)
        return judged

    def _count_traffic(self, window: PathWindow, steps: int) -> None:
        breakdown = where_steps_go([window])
        if breakdown is not None:
            self._traffic = add_traffic(self._traffic, breakdown, steps)
