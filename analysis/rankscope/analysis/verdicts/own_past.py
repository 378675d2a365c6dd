"""A rank that trains alone has no peers: it is compared with its own past in the run.

The past is a second row of the columns, the medians of earlier windows, so that comparison, cause and line are those of
two ranks. It shows no more than that the rank works longer than before, and its program may have more to do: so it is a
warning at most."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats
from rankscope.analysis.verdicts.findings import Observation
from rankscope.analysis.verdicts.slow_rank import screen
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.window_merge import merge_evidence
from rankscope.analysis.verdicts.windows import PAST, JobWindow, RankColumns, RankEvidence

# More than a job's baseline takes: a job begins with compilation, warm-up and full queues of prefetched input.
PAST_WINDOWS = 10
MAX_PAST_WINDOWS = 120
# Other programs take a CPU for a few seconds: a slow window counts from this one in a row.
SLOW_WINDOWS = 5
# Windows whose stacks are kept.
MAX_STACK_WINDOWS = 15
_KEYS = {"job", "rank", "stage", "place"}
_FIGURES = [field.name for field in fields(RankColumns) if field.name not in _KEYS]


class OwnPast:
    """Windows that look slow never enter it, so that a fault cannot become normal."""

    def __init__(self) -> None:
        self._rows: deque[Floats] = deque(maxlen=MAX_PAST_WINDOWS)
        self._windows: deque[JobWindow] = deque(maxlen=MAX_STACK_WINDOWS)
        self._slow_windows = 0

    def compare(self, window: JobWindow, seen: Observation, policy: Policy) -> Observation:
        """Adds to the observation of a window of one rank whether the rank is slow against its past."""
        if len(self._rows) < PAST_WINDOWS:
            self._learn(window)
            return seen
        both = _with_past(window.columns, self._usual())
        screened = screen(both, policy)
        own, usual = float(screened.compared_seconds[0]), float(screened.reference_seconds[0])
        is_slow = bool(screened.outlier[0]) and own >= FIXED.own_past_ratio * usual
        self._slow_windows = self._slow_windows + 1 if is_slow else 0
        if not own >= (1 + policy.hysteresis * (FIXED.own_past_ratio - 1)) * usual:
            self._learn(window)
        excess = screened.compared_seconds[:1] - screened.reference_seconds[:1]
        if self._slow_windows < SLOW_WINDOWS:
            return seen._replace(excess_seconds=excess)
        past = tuple(self._windows)
        beside = replace(window, columns=both, evidence=lambda: _evidence(window, past))
        return seen._replace(
            window=beside,
            screen=replace(screened, outlier=_first(screened.outlier), lingering=_first(screened.lingering)),
            excess_seconds=excess,
            remarkable=True,
            outliers=frozenset(window.columns.rank.tolist()),
            impact_ratio=float(screened.impact_ratio[0]),
        )

    def _learn(self, window: JobWindow) -> None:
        self._rows.append(np.array([getattr(window.columns, name)[0] for name in _FIGURES], dtype=np.float64))
        self._windows.append(window)

    def _usual(self) -> Floats:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a figure that was never measured
            return np.asarray(np.nanmedian(np.array(self._rows), axis=0))


def _with_past(columns: RankColumns, usual: Floats) -> RankColumns:
    figures = {
        name: np.append(getattr(columns, name), value) for name, value in zip(_FIGURES, usual.tolist(), strict=True)
    }
    keys = {name: np.repeat(getattr(columns, name), 2) for name in _KEYS - {"rank"}}
    return RankColumns(**figures, **keys, rank=np.append(columns.rank, PAST))


def _evidence(window: JobWindow, past: tuple[JobWindow, ...]) -> Mapping[int, RankEvidence]:
    rank = int(window.columns.rank[0])
    before = merge_evidence(past, [rank]).get(rank)
    return window.evidence() if before is None else {**window.evidence(), PAST: before}


def _first(flags: Bools) -> Bools:
    kept: Bools = flags & (np.arange(len(flags)) == 0)
    return kept
