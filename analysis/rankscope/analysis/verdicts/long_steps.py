"""Stalls: a loss that sits in few steps. A rank that is late in every hundredth step is no outlier in most windows, and
where the late rank is another one each time, one is an outlier in every window by chance. So what ranks cost in long
steps is summed over minutes, and a rank is named when chance does not explain its share.

What a long step took beyond the usual is L on every rank. One rank that was late has L of it by itself, and the others,
which waited for it, have nothing. If all ranks were late together, each has L."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import exp, lgamma, log, log1p, nan
from statistics import median
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.long_steps import LATE_SHARE, RECENT_STEPS, find_long
from rankscope.analysis.stats.robust import Bools, Floats, Ints, median_or_nan
from rankscope.analysis.step_graph.path_windows import PathWindow
from rankscope.analysis.verdicts.job_summary import JobSummary
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.window_merge import merge_columns
from rankscope.analysis.verdicts.windows import RankColumns

# Windows that stalls are summed over: ten minutes of short ones.
MAX_WINDOWS = 300
# Windows after which stacks of a job are kept for the first time, and from then on at the latest.
FIRST_STACKS = 2
STACKS_EVERY = 120
STACKS_WINDOWS = 5  # in a row, as stacks come with one window in some
# How often and how long are estimates.
ROUNDED_BY = 0.05


@dataclass(frozen=True)
class Stalls:
    impact_ratio: float  # of the job's time
    every_steps: float
    seconds: float  # of one
    ranks: tuple[int, ...] = ()  # that are to blame
    stalled_ranks: int = 0

    def __str__(self) -> str:
        every = _rounded(self.every_steps)
        often = f"every {_ordinal(every)} step" if every > 1 else "every step"
        return f"in {often} for {_duration(self.seconds)}"


def _rounded(number: float) -> int:
    """To tens from 20 on, to hundreds from 200 on, where that changes little."""
    for unit in (1000, 100, 10):
        near = round(number / unit) * unit
        if number >= 2 * unit - unit / 4 and abs(near - number) <= ROUNDED_BY * number:
            return near
    return round(number)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{_rounded(seconds * 1000)} ms"


class FoundStalls(NamedTuple):
    of_ranks: Stalls | None = None  # of ranks that are late so often that it is no chance
    in_turn: Stalls | None = None  # of no rank in particular
    together: Stalls | None = None  # of all ranks in the same steps, as in a checkpoint or an evaluation


class _Window(NamedTuple):
    seconds: float
    steps: float
    windows: int = 1  # that were put together: nothing was lost in them
    lost_seconds: float = 0.0
    lost_by_some_seconds: float = 0.0  # of it, by ranks that were late when others were not
    lost_steps: float = 0.0
    is_known: bool = True  # who was late
    queued_seconds: float = 0.0  # for a CPU, by the typical rank
    # Of these ranks.
    ranks: Ints = np.empty(0, dtype=np.int64)
    late_seconds: Floats = np.empty(0)
    late_steps: Floats = np.empty(0)
    starved_seconds: Floats = np.empty(0)

    @property
    def lost_by_all_seconds(self) -> float:
        return self.lost_seconds - self.lost_by_some_seconds if self.is_known else 0.0


class LongStepHistory:
    """The long steps of a job's last windows, and what they show."""

    def __init__(self) -> None:
        self.found = FoundStalls()
        self.lost_by_all_seconds = 0.0  # in the last window
        # Of a job that does not stall, stacks are kept now and then: once it does, they show what is new.
        self.is_moment_for_stacks = False
        self._windows: deque[_Window] = deque()  # with a long step, and between them what lies between them
        self._count = 0  # of windows in it
        self._quiet_seconds, self._quiet_steps, self._quiet_windows = 0.0, 0.0, 0  # since
        self._seen = 0
        self._divided: RankColumns | None = None  # the window before, whose last step is in this one on some ranks
        self._path_steps: Floats = np.empty(0)  # the last steps of the critical path, in seconds
        self._stacks_due, self._stacks_wanted = FIRST_STACKS, STACKS_WINDOWS

    def add(self, columns: RankColumns, summary: JobSummary, policy: Policy) -> Mapping[int, float]:
        """By rank, for how long it was late in this window."""
        self._seen += 1
        # A job compiles, allocates and fills caches first.
        is_settled = self._seen > policy.windows_for_alarm
        is_long = is_settled and _has_long(summary)
        if self._divided is not None or (is_long and _is_divided(columns)):
            columns, summary = self._joined(columns, summary)
            is_long = _has_long(summary)
        late: Mapping[int, float] = {}
        if is_long:
            late = self._add_long(_attribute(columns, summary), len(columns), policy)
        else:
            steps = summary.fewest_steps if summary.step_seconds > 0 else 0.0
            self._add_quiet(steps * max(summary.step_seconds, 0.0), steps, len(columns), policy)
        if self._seen >= self._stacks_due or self.is_moment_for_stacks:
            is_long = summary.long_seconds > FIXED.stall_quiet_ratio * summary.step_seconds
            self._note_moment_for_stacks(not is_long and not any(self.found[:2]))
        return late

    def add_path(self, window: PathWindow, policy: Policy) -> tuple[Mapping[int, float], Bools]:
        """Return, by rank, for how long it was late in the steps of this window, and which of the steps are long. The
        critical path shows who was late also where a rank passes its waiting on to others."""
        self._seen += 1
        seconds = window.step_ns / 1e9
        is_long = find_long(self._path_steps, seconds)
        self._path_steps = np.append(self._path_steps, seconds)[-RECENT_STEPS:]
        late: Mapping[int, float] = {}
        if is_long.any():
            usual_seconds = float(np.median(self._path_steps))
            late = self._add_long(_attribute_path(window, is_long, usual_seconds), len(window.ranks), policy)
        else:
            self._add_quiet(float(seconds.sum()), float(len(seconds)), len(window.ranks), policy)
        if self._seen >= self._stacks_due or self.is_moment_for_stacks:
            self._note_moment_for_stacks(not is_long.any() and not any(self.found[:2]))
        return late, is_long

    def _joined(self, columns: RankColumns, summary: JobSummary) -> tuple[RankColumns, JobSummary]:
        """A long step that ends with a window is in the next one on some ranks: such a window counts together with the
        next. Until then it has no steps."""
        before, self._divided = self._divided, None
        if before is None:
            self._divided = columns
            return columns, summary._replace(step_seconds=0.0, fewest_steps=0.0, long_seconds=nan)
        both = merge_columns([before, columns])
        if not len(both):
            return columns, summary  # other ranks report now
        return both, summary._replace(
            step_seconds=median_or_nan(both.step_seconds),
            fewest_steps=float(both.steps.min()),
            long_seconds=median_or_nan(both.long_seconds),
        )

    def _add_quiet(self, seconds: float, steps: float, ranks: int, policy: Policy) -> None:
        """Most windows of most jobs: this must cost next to nothing."""
        self.lost_by_all_seconds = 0.0
        self._quiet_windows += 1
        self._quiet_seconds += seconds
        self._quiet_steps += steps
        if any(self.found):
            self.found = self._find(ranks, policy)

    def _add_long(self, window: _Window, ranks: int, policy: Policy) -> Mapping[int, float]:
        if self._quiet_windows:
            self._windows.append(_Window(self._quiet_seconds, self._quiet_steps, self._quiet_windows))
            self._count += self._quiet_windows
            self._quiet_seconds, self._quiet_steps, self._quiet_windows = 0.0, 0.0, 0
        self._windows.append(window)
        self._count += 1
        while self._count > MAX_WINDOWS and len(self._windows) > 1:
            self._count -= self._windows.popleft().windows
        self.lost_by_all_seconds = window.lost_by_all_seconds
        self.found = self._find(ranks, policy)
        return dict(zip(window.ranks.tolist(), window.late_seconds.tolist(), strict=True))

    def _note_moment_for_stacks(self, is_quiet: bool) -> None:
        self.is_moment_for_stacks = is_quiet and self._seen >= self._stacks_due
        self._stacks_wanted -= self.is_moment_for_stacks
        if not self._stacks_wanted:
            self._stacks_due = min(2 * self._seen, self._seen + STACKS_EVERY)
            self._stacks_wanted = STACKS_WINDOWS

    def _find(self, ranks: int, policy: Policy) -> FoundStalls:
        windows = [*self._windows, _Window(self._quiet_seconds, self._quiet_steps, self._quiet_windows)]
        return FoundStalls(
            _of_ranks(windows, ranks, policy),
            _in_turn([window for window in windows if not _is_contended(window, policy)], ranks, policy),
            _together(windows, ranks, policy),
        )


def _has_long(summary: JobSummary) -> bool:
    return summary.long_seconds > 0 and summary.fewest_steps * summary.step_seconds > 0


def _is_divided(columns: RankColumns) -> bool:
    """Whether some ranks have long steps in this window that others have not."""
    seconds = np.nan_to_num(columns.long_seconds * columns.steps)
    return bool(seconds.min() < FIXED.stall_divided_share * seconds.max())


def _is_contended(window: _Window, policy: Policy) -> bool:
    """Ranks that share a busy CPU are late in turn because they queue for it."""
    return window.queued_seconds >= policy.starved_share * window.lost_seconds > 0


def _of_ranks(windows: list[_Window], ranks: int, policy: Policy) -> Stalls | None:
    late, lost = _late_ranks(windows), _lost_by_some(windows)
    named = [
        place
        for place in np.flatnonzero(late.seconds >= policy.stall_share * lost).tolist()
        if late.windows[place] >= policy.windows_for_alarm
        and late.steps[place] >= policy.stalls_needed
        and late.chance(place, lost, ranks) <= FIXED.stall_chance_of_one
    ]
    if not named:
        return None
    culprits = late.ranks[named]
    found = _sum_up(windows, [np.isin(window.ranks, culprits) for window in windows], policy)
    if found is None:
        return None
    # Ranks that share a busy CPU take turns in being late: queueing names a rank only when it dominates.
    is_queued = late.starved_seconds[named].max() >= policy.starved_share * late.seconds[named].max()
    if is_queued and found.impact_ratio < 1 - 1 / policy.starved_rank_ratio:
        return None
    return replace(found, ranks=tuple(culprits.tolist()))


def _in_turn(windows: list[_Window], ranks: int, policy: Policy) -> Stalls | None:
    late, lost = _late_ranks(windows), _lost_by_some(windows)
    if late.steps.sum() < 2 * policy.stalls_needed:
        return None
    most = int(np.argmax(late.seconds))
    if late.seconds[most] >= policy.stall_share * lost and late.chance(most, lost, ranks) < FIXED.stall_chance_of_all:
        return None
    found = _sum_up(windows, [np.full(len(window.ranks), True) for window in windows], policy)
    if found is None or found.impact_ratio < policy.jitter_impact_ratio:
        return None
    return replace(found, stalled_ranks=len(late.ranks))


def _together(windows: list[_Window], ranks: int, policy: Policy) -> Stalls | None:
    hits = [
        place
        for place, window in enumerate(windows)
        if window.lost_by_all_seconds >= policy.stall_share * window.lost_seconds > 0
    ]
    span = windows[_between(windows, hits, policy)]
    lost = sum(window.lost_by_all_seconds for window in span)
    steps = sum(
        window.lost_steps * window.lost_by_all_seconds / window.lost_seconds for window in span if window.lost_seconds
    )
    known = sum(window.lost_seconds for window in span if window.is_known)
    # Where ranks stall one by one, or most is unknown, long steps of all are not what matters.
    is_most = lost >= policy.stall_share * known and known >= FIXED.late_named_share * _lost(span)
    if not (lost > 0 and steps > 0 and is_most):
        return None
    scale, seconds = _scale(span), sum(window.seconds for window in span)
    every = sum(window.steps for window in span) / (scale * steps)
    found = Stalls(scale * lost / seconds, every, lost / steps, stalled_ranks=ranks)
    return found if found.impact_ratio >= policy.stall_note_ratio else None


def _sum_up(windows: list[_Window], of: list[Bools], policy: Policy) -> Stalls | None:
    """Of some of the ranks that were late in each window. The loss of a window is at most what it lost, also where
    several of them were late together."""
    within = _between(windows, [place for place, some in enumerate(of) if some.any()], policy)
    span, lost, steps = windows[within], 0.0, 0.0
    for window, some in zip(span, of[within], strict=True):
        if some.any():
            held = float(window.late_seconds[some].sum())
            share = min(1.0, window.lost_by_some_seconds / held)
            lost, steps = lost + share * held, steps + share * float(window.late_steps[some].sum())
    if not steps > 0:
        return None
    scale, seconds = _scale(span), sum(window.seconds for window in span)
    return Stalls(scale * lost / seconds, sum(window.steps for window in span) / (scale * steps), lost / steps)


def _scale(windows: list[_Window]) -> float:
    """Where it is not known who was late, it was as in the others."""
    return _lost(windows) / sum(window.lost_seconds for window in windows if window.is_known)


def _lost(windows: list[_Window]) -> float:
    return sum(window.lost_seconds for window in windows)


def _between(windows: list[_Window], hits: list[int], policy: Policy) -> slice:
    """The windows after the first hit, up to the last one: as many stalls as gaps between them. Empty if there are too
    few, or if they have ended."""
    nothing, needed = slice(0), policy.windows_for_alarm
    if len(hits) < max(needed, 2):
        return nothing
    ends = list(accumulate(window.windows for window in windows))
    gaps = [ends[after] - ends[before] for before, after in pairwise(hits)]
    longest = max(policy.windows_kept, FIXED.stall_gaps * median(gaps))
    if ends[-1] - ends[hits[-1]] > longest:
        return nothing
    # Those before a long gap belong to something else.
    first = max((place + 1 for place, gap in enumerate(gaps) if gap > longest), default=0)
    return slice(hits[first] + 1, hits[-1] + 1) if len(hits) - first >= needed else nothing


def _lost_by_some(windows: list[_Window]) -> float:
    return sum(window.lost_by_some_seconds for window in windows)


class _LateRanks(NamedTuple):
    ranks: Ints
    seconds: Floats
    steps: Floats
    starved_seconds: Floats
    windows: Ints

    def chance(self, place: int, lost_seconds: float, ranks: int) -> float:
        """That any of the ranks is late as often as this one, if each stall may be of any rank."""
        seen = round(self.steps[place])  # a little of a stall may be common to all ranks
        stalls = max(round(self.steps[place] * lost_seconds / self.seconds[place]), seen)
        if ranks < 2:
            return 1.0
        logs = [
            lgamma(stalls + 1)
            - lgamma(n + 1)
            - lgamma(stalls - n + 1)
            - n * log(ranks)
            + (stalls - n) * log1p(-1 / ranks)
            for n in range(seen, stalls + 1)
        ]
        return min(1.0, ranks * sum(map(exp, logs)))


def _late_ranks(windows: list[_Window]) -> _LateRanks:
    names = ("ranks", "late_seconds", "late_steps", "starved_seconds")
    of, *figures = (np.concatenate([np.empty(0), *(getattr(window, name) for window in windows)]) for name in names)
    ranks, place = np.unique(of.astype(np.int64), return_inverse=True)
    late, steps, starved = (np.bincount(place, figure, len(ranks)).astype(np.float64) for figure in figures)
    return _LateRanks(ranks, late, steps, starved, np.bincount(place, minlength=len(ranks)))


def _attribute(columns: RankColumns, summary: JobSummary) -> _Window:
    lost_seconds = min(summary.long_seconds, summary.step_seconds) * summary.fewest_steps
    steps = np.nan_to_num(columns.steps)
    late = np.clip(np.nan_to_num(columns.late_seconds) * steps, 0.0, lost_seconds)
    # Of its long steps, one rank that is late holds all and the others nothing; late together, each holds all. This is
    # so also where one of the steps is in the next window on some ranks.
    has_long = (columns.long_seconds > 0) & (steps > 0)
    long_seconds = np.where(has_long, columns.long_seconds * steps, np.inf)
    held = np.minimum(late / long_seconds, 1.0)[has_long]
    common_share = float(held.min(initial=1.0))
    if len(held) > 1:
        common_share = min(common_share, max(float(held.sum()) - 1.0, 0.0) / (len(held) - 1))
    own = np.where(has_long, np.maximum(late - common_share * long_seconds, 0.0), 0.0)
    lost_steps, counted = (
        np.clip(np.nan_to_num(ratio), 0.0, 1.0) * steps for ratio in (columns.long_ratio, columns.late_ratio)
    )
    # Of the ranks that tell of long steps at all.
    unknown = np.isnan(columns.late_seconds[has_long]).sum()
    is_told = float(late.sum()) >= FIXED.late_known_share * lost_seconds > 0
    is_known = unknown < FIXED.late_unknown_ratio * len(held) or is_told
    is_known = bool(is_known and len(held) >= FIXED.late_known_share * len(late))
    is_late = is_known & (own > FIXED.late_share * lost_seconds) & (counted > 0)
    share = own[is_late] / late[is_late]
    return _Window(
        summary.step_seconds * summary.fewest_steps,
        summary.fewest_steps,
        lost_seconds=lost_seconds,
        lost_by_some_seconds=min(float(own[is_late].sum()), (1 - common_share) * lost_seconds),
        lost_steps=median_or_nan(lost_steps),
        is_known=is_known,
        queued_seconds=float(np.nan_to_num(median_or_nan(columns.starved_seconds * steps))),
        ranks=columns.rank[is_late],
        late_seconds=own[is_late],
        late_steps=counted[is_late] * share,
        starved_seconds=(np.nan_to_num(columns.starved_seconds) * steps)[is_late],
    )


def _attribute_path(window: PathWindow, is_long: Bools, usual_seconds: float) -> _Window:
    seconds = window.step_ns / 1e9
    excess = np.maximum(seconds[is_long] - usual_seconds, 0.0)
    lost_seconds = float(excess.sum())
    losses = np.clip(np.nan_to_num(window.losses_ns[is_long]) / 1e9, 0.0, excess[:, None])
    late = losses.sum(axis=0)
    late_steps = (losses >= LATE_SHARE * excess[:, None]).sum(axis=0).astype(np.float64)
    is_late = (late > FIXED.late_share * lost_seconds) & (late_steps > 0)
    return _Window(
        float(seconds.sum()),
        float(len(seconds)),
        lost_seconds=lost_seconds,
        lost_by_some_seconds=min(float(late[is_late].sum()), lost_seconds),
        lost_steps=float(np.count_nonzero(is_long)),
        is_known=window.compared >= FIXED.path_compared_share,
        ranks=window.ranks[is_late],
        late_seconds=late[is_late],
        late_steps=late_steps[is_late],
        starved_seconds=np.zeros(np.count_nonzero(is_late)),
    )
