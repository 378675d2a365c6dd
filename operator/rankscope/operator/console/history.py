"""What runs did until now: a value per rank, signal and tick, the pace of each run, and marks on its time axis.

All of it is in memory, within a limit of bytes. The older it is, the less detail is kept: when room is needed, two
neighbouring ticks become their mean, where that is the smallest part of their age. Runs that ended go first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankscope.analysis.verdicts.verdict import Kind, headline
from rankscope.analysis.verdicts.window_columns import columns
from rankscope.common.text import printable
from rankscope.operator.console.answers import NAME_CHARACTERS, TEXT_CHARACTERS, Mark
from rankscope.operator.console.signals import FIGURE_ROWS, PACE, SIGNAL_ROWS, SIGNALS
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import HeldWindows, RankSeen

MAX_BYTES = 64 << 20
# Runs that are kept, ended ones included; others are counted.
MAX_RUNS = 1024
TICKS_PER_RUN = 1024
MARKS_PER_RUN = 256
DAY_SECONDS = 86_400.0
# What a daemon claims beyond it is no window.
MAX_WINDOW_SECONDS = 60.0
# A window of a rank that has sent none for so long is not repeated.
STALE_WINDOWS, STALE_SECONDS = 2.0, 1.0
# What Python needs for a tick, a rank and a mark besides their values.
TICK_BYTES, RANK_BYTES, MARK_BYTES = 400, 200, 1000
# The part of its ticks that a run loses at once: thinning looks at all of them.
THINNED_SHARE = 16

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tick:
    """A stretch of time. `values` has a row per signal and a column per rank, in the order of their first appearance
    in the run: what appeared later is missing here."""

    start: float
    end: float
    pace: tuple[float, ...]  # in the order of PACE, NaN where it is not known
    values: Values

    @property
    def bytes(self) -> int:
        return self.values.nbytes + TICK_BYTES


@dataclass(frozen=True)
class RunView:
    """A run as of its latest tick. Immutable."""

    name: str
    state: JobState
    ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    signals: tuple[str, ...]  # rows of `Tick.values`
    members: tuple[RankSeen, ...]  # its columns
    lost_today_gpu_seconds: float
    restarts: int
    ended_unix_seconds: float | None
    version: int


class _Run:
    """Changed under the lock of `History` only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: JobState
        self.ticks: list[Tick] = []
        self.marks: deque[Mark] = deque(maxlen=MARKS_PER_RUN)
        self.signals: list[int] = []  # numbers of SIGNALS by row
        self.members: dict[int, RankSeen] = {}  # by rank
        self.tick_bytes = 0
        self.restarts = 0
        self.ended: float | None = None
        self.version = 0
        self._rows: dict[int, int] = {}  # of each rank
        self._seen: tuple[RankSeen, ...] = ()  # in the latest tick
        self._seen_rows = np.arange(0)
        self._evaluated = self._since = 0.0
        self._lost = self._lost_before_today = 0.0
        self._day = -1

    @property
    def bytes(self) -> int:
        picture = self.state.picture.size_bytes if self.state.picture else 0
        return self.tick_bytes + RANK_BYTES * len(self.members) + MARK_BYTES * len(self.marks) + picture

    def take(self, state: JobState, lost: float) -> bool:
        """False if it is the state that was taken before."""
        if state.evaluated_unix_seconds == self._evaluated and self.ended is None:
            return False
        now = self._evaluated = state.evaluated_unix_seconds
        if self.ended is not None or (self._since and state.restarts > self.state.restarts):
            self.restarts += 1
            self.marks.append(Mark(unix_seconds=now, kind="restart", text="all processes were replaced"))
        if state.since_unix_seconds != self._since:
            self._since, verdict = state.since_unix_seconds, state.verdict
            text = printable(headline(verdict), TEXT_CHARACTERS)
            self.marks.append(
                Mark(
                    unix_seconds=now,
                    kind="verdict",
                    text=text,
                    verdict=verdict.kind.value,
                    severity=verdict.severity.value,
                )
            )
        self.state, self.ended = state, None
        self._count_loss(lost, now)
        self._append(state, now)
        return True

    def end(self, now: float) -> None:
        self.ended = now
        self.marks.append(Mark(unix_seconds=now, kind="end", text="the run has ended, or its daemons are silent"))
        self.state = replace(self.state, windows=())  # most of its memory
        self._lost_before_today, self._lost = self._lost_before_today - self._lost, 0.0  # counted from zero again
        self._seen = ()

    def lost_today(self, now: float) -> float:
        return self._lost - self._lost_before_today if self._day == now // DAY_SECONDS else 0.0

    def _count_loss(self, lost: float, now: float) -> None:
        if self._day not in (-1, now // DAY_SECONDS):
            self._lost_before_today = self._lost
        self._day, self._lost = int(now // DAY_SECONDS), lost

    def _append(self, state: JobState, now: float) -> None:
        windows = state.windows if isinstance(state.windows, HeldWindows) else HeldWindows({})
        held = windows.in_order
        seconds = min(max(held[0].window_seconds, 0.0), MAX_WINDOW_SECONDS) if held else 0.0
        while self.ticks and self.ticks[-1].end >= now:  # the clock was set back
            self.tick_bytes -= self.ticks.pop().bytes
        start = max(now - seconds, self.ticks[-1].end if self.ticks else 0.0)
        known = {name: value for name in PACE if (value := getattr(state, name)) is not None}
        if state.verdict.kind is Kind.HANG:
            known = {}  # the last known pace would look like progress
        pace = tuple([known.get(name, np.nan) for name in PACE])
        tick = Tick(start, now, pace, self._values(windows, seconds))
        self.ticks.append(tick)
        self.tick_bytes += tick.bytes

    def _values(self, windows: HeldWindows, seconds: float) -> Values:
        held = windows.in_order
        if not held:
            return np.empty((0, 0), dtype=np.float32)
        seen = tuple([window.who for window in held])
        if seen != self._seen:
            self._meet(seen)
        figures = columns([window.figures for window in held])[FIGURE_ROWS]
        compared = windows.compared
        if compared:
            places = {who.rank: place for place, who in enumerate(seen)}
            known = [places[rank] for rank in compared if rank in places]
            both = [compared[seen[place].rank] for place in known]
            figures[[SIGNAL_ROWS["self_seconds"], SIGNAL_ROWS["wait_seconds"]], np.array(known)[:, None]] = both
        heard = np.array([window.heard_monotonic for window in held])
        is_fresh = heard >= heard.max() - STALE_WINDOWS * seconds - STALE_SECONDS
        figures[:, ~is_fresh] = np.nan
        for number in np.flatnonzero(~np.isnan(figures).all(axis=1)).tolist():
            if number not in self.signals:
                self.signals.append(number)
        values = np.full((len(self.signals), len(self.members)), np.nan, dtype=np.float32)
        values[:, self._seen_rows] = figures[self.signals]
        return values

    def _meet(self, seen: tuple[RankSeen, ...]) -> None:
        for who in seen:
            self._rows.setdefault(who.rank, len(self._rows))
            self.members[who.rank] = who
        self._seen, self._seen_rows = seen, np.array([self._rows[who.rank] for who in seen])

    def thin(self, count: int, now: float) -> None:
        """Merge so many pairs of neighbours, or drop the oldest tick where there are no two."""
        if len(self.ticks) < 2:
            self.ticks.clear()
            self.tick_bytes = 0
            return
        starts = np.array([tick.start for tick in self.ticks])
        ends = np.array([tick.end for tick in self.ticks])
        part_of_age = (ends[1:] - starts[:-1]) / np.maximum(now - starts[:-1], 1e-3)
        merged: set[int] = set()  # the first of each pair
        for first in np.argsort(part_of_age).tolist():
            if len(merged) == count:
                break
            if not {first - 1, first + 1} & merged:
                merged.add(first)
        kept = []
        for number, tick in enumerate(self.ticks):
            if number in merged:
                kept.append(_merge(tick, self.ticks[number + 1]))
            elif number - 1 not in merged:
                kept.append(tick)
        self.ticks = kept
        self.tick_bytes = sum(tick.bytes for tick in kept)

    def view(self, now: float) -> RunView:
        signals = tuple(SIGNALS[number].name for number in self.signals)
        return RunView(
            self.name,
            self.state,
            tuple(self.ticks),
            tuple(self.marks),
            signals,
            tuple(self.members.values()),
            self.lost_today(now),
            self.restarts,
            self.ended,
            self.version,
        )


def _merge(first: Tick, second: Tick) -> Tick:
    """The mean by time, of what is known."""
    weights = (first.end - first.start, second.end - second.start)
    values = np.full(np.maximum(first.values.shape, second.values.shape), np.nan, dtype=np.float32)
    values[: first.values.shape[0], : first.values.shape[1]] = first.values
    part = values[: second.values.shape[0], : second.values.shape[1]]
    part[:] = _mean(part, second.values, *weights)
    pace = _mean(np.array(first.pace, dtype=np.float32), np.array(second.pace, dtype=np.float32), *weights)
    return Tick(first.start, second.end, tuple(pace.tolist()), values)


def _mean(first: Values, second: Values, first_weight: float, second_weight: float) -> Values:
    share = np.float32(second_weight / max(first_weight + second_weight, 1e-9))
    mean: Values = first + share * (second - first)
    np.copyto(mean, second, where=np.isnan(first))
    np.copyto(mean, first, where=np.isnan(second))
    return mean


class History:
    """A listener of the correlator. Thread-safe. `lost` must be a listener before this one."""

    def __init__(
        self,
        lost: LostSeconds,
        limit_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.time,
        keeps: Callable[[str], bool] = lambda run: True,
    ) -> None:
        """`keeps` is False of a run that another replica correlates."""
        self._lost = lost
        self._keeps = keeps
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._views: dict[str, RunView] = {}  # made on demand, for the present version
        self._listeners: list[Callable[[], None]] = []
        self.version = 0  # grows with every change
        self.forgotten_version = 0  # when a run was last removed
        self.left_out = 0  # runs for which there is no room

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(run.bytes for run in self._runs.values())

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change, in the correlator's thread; the result ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def forget_lost_runs(self) -> None:
        """Those that another replica has taken over: what was known of them would look like their present state."""
        with self._lock:
            lost = [name for name in self._runs if not self._keeps(name)]
            self.version += bool(lost)
            for name in lost:
                self._forget(name)
        if lost:
            self._tell()

    def __call__(self, states: tuple[JobState, ...]) -> None:
        self.forget_lost_runs()
        now = self._clock()
        with self._lock:
            self.version += 1
            present = {printable(state.job, NAME_CHARACTERS): state for state in states if self._keeps(state.job)}
            for name, run in self._runs.items():
                if run.ended is None and name not in present:
                    run.end(now)
                    self._changed(run)
            self.left_out = 0
            for name, state in present.items():
                self._take(name, state)
            self._make_room(now)
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()

    def _take(self, name: str, state: JobState) -> None:
        run = self._runs.get(name)
        if run is None:
            if len(self._runs) >= MAX_RUNS and not self._forget_an_ended_run():
                self.left_out += 1
                return
            run = self._runs[name] = _Run(name)
        if run.take(state, self._lost.of(state.job)):
            self._changed(run)
            if len(run.ticks) > TICKS_PER_RUN:
                run.thin(TICKS_PER_RUN // THINNED_SHARE, state.evaluated_unix_seconds)

    def _changed(self, run: _Run) -> None:
        run.version = self.version
        self._views.pop(run.name, None)

    def _make_room(self, now: float) -> None:
        total = sum(run.bytes for run in self._runs.values())
        while total > self._limit_bytes and not self._has_nothing_to_give():
            if not self._forget_an_ended_run():
                largest = max(self._runs.values(), key=lambda run: run.tick_bytes)
                largest.thin(max(1, len(largest.ticks) // THINNED_SHARE), now)
                self._views.pop(largest.name, None)
            total = sum(run.bytes for run in self._runs.values())

    def _has_nothing_to_give(self) -> bool:
        return not any(run.ticks for run in self._runs.values())

    def _forget_an_ended_run(self) -> bool:
        """The one that ended first."""
        ended = [run for run in self._runs.values() if run.ended is not None]
        if not ended:
            return False
        self._forget(min(ended, key=lambda run: run.ended or 0.0).name)
        return True

    def _forget(self, name: str) -> None:
        del self._runs[name]
        self._views.pop(name, None)
        self.forgotten_version = self.version

    def run(self, name: str) -> RunView | None:
        with self._lock:
            run = self._runs.get(name)
            return None if run is None else self._view(run)

    def changed_since(self, version: int) -> list[RunView]:
        """The runs with a later version."""
        with self._lock:
            return [self._view(run) for run in self._runs.values() if run.version > version]

    def _view(self, run: _Run) -> RunView:
        view = self._views.get(run.name)
        if view is None:
            view = self._views[run.name] = run.view(self._clock())
        return view
