"""Finds collectives that are persistently slower than expected, compared with the same group's faster times and with
other groups that do the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rankscope.analysis.collectives.alpha_beta import Fit, Observations, fit_collectives, residual_ratios
from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Bools, Floats, grouped_median, join_rows, take_rows
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Severity

# Enough collectives per window that a few outliers do not determine its median.
_WINDOW_OBSERVATIONS = 5
_MAX_WINDOWS = 40


@dataclass(frozen=True)
class Anomaly:
    group: str
    kind: int
    ranks: int
    against: str  # own: its own faster times; peers: other groups of the same size
    severity: Severity
    ratio: float  # actual over expected, in the slow windows
    windows: int
    slow_windows: int
    since_seconds: float | None  # time of the first slow window, if times are known
    ongoing: bool  # the last window is slow, or has not recovered halfway
    lost_seconds: float  # beyond the expected time, in the slow windows
    lost_ratio: float  # share of all time in these collectives
    reason: str


def anomalies(
    observed: Observations, fits: Sequence[Fit] | None = None, policy: Policy = DEFAULT_POLICY
) -> tuple[Anomaly, ...]:
    """Slow communication: the residual stays above `policy.communication_ratio` in k of n windows. A benchmark that
    iterates over sizes has no windows in time, so its groups are compared only with their peers. Largest loss first."""
    fits = fit_collectives(observed) if fits is None else fits
    found = [*(_own(observed, fits, policy) if observed.in_order else ()), *_peers(observed, fits, policy)]
    # A group that became slow is also slower than its peers: reported once.
    own = {(anomaly.group, anomaly.kind) for anomaly in found if anomaly.against == "own"}
    found = [one for one in found if one.against == "own" or (one.group, one.kind) not in own]
    return tuple(sorted(found, key=lambda one: (one.severity is not Severity.ALARM, -one.lost_seconds)))


def _own(observed: Observations, fits: Sequence[Fit], policy: Policy) -> Iterable[Anomaly]:
    for fit in fits:
        mine = _usable(observed, fit)
        if fit.is_fitted:
            expected = mine.seconds / residual_ratios(mine, fit)
        elif len(mine):
            expected = _typical_of_size(mine)  # one size needs no line to be compared with itself
        else:
            continue
        windows = _windows(mine, _WINDOW_OBSERVATIONS)
        if len(windows) < policy.windows_kept:
            continue
        levels = np.array([np.median((mine.seconds / expected)[window]) for window in windows])
        # Most of the recording may be slow; the faster half of the windows shows what is possible.
        normal = float(np.median(np.sort(levels)[: (len(levels) + 1) // 2]))
        anomaly = _judge(mine, expected * normal, windows, fit, "own", policy)
        if anomaly is not None:
            yield anomaly


def _peers(observed: Observations, fits: Sequence[Fit], policy: Policy) -> Iterable[Anomaly]:
    cohorts: dict[tuple[int, int, str], list[Fit]] = {}
    for fit in fits:
        if fit.ranks > 1:
            cohorts.setdefault((fit.kind, fit.ranks, _family(fit.group)), []).append(fit)
    for members in cohorts.values():
        parts = [_usable(observed, fit) for fit in members]
        members = [fit for fit, part in zip(members, parts, strict=True) if len(part)]
        parts = [part for part in parts if len(part)]
        if len(members) < 2:
            continue
        expected = _common_expectation(parts)
        levels = np.array(
            [np.median(part.seconds / time) for part, time in zip(parts, expected, strict=True)], dtype=np.float64
        )
        # Of two, the faster one shows what is possible.
        normal = float(np.median(levels)) if len(levels) > 2 else float(levels.min())
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(levels - normal))), policy.spread_floor_ratio * normal)
        for fit, part, time, level in zip(members, parts, expected, levels.tolist(), strict=True):
            stands_out = len(levels) == 2 or (level - normal) / spread >= policy.rank_score
            if level / normal <= policy.communication_ratio or not stands_out:
                continue
            windows = _windows(part, 1)
            anomaly = _judge(part, time * normal, windows, fit, "peers", policy)
            if anomaly is not None:
                yield anomaly


def _judge(
    mine: Observations, expected: Floats, windows: list[slice], fit: Fit, against: str, policy: Policy
) -> Anomaly | None:
    levels = np.array([np.median(mine.seconds[window] / expected[window]) for window in windows])
    slow = levels > policy.communication_ratio
    severity = _persistence(slow, policy)
    if severity is Severity.NONE:
        return None
    inside = np.concatenate([np.arange(len(mine))[windows[number]] for number in np.flatnonzero(slow)])
    lost = float(np.maximum(mine.seconds[inside] - expected[inside], 0).sum())
    lost_ratio = lost / float(mine.seconds.sum())
    if lost_ratio < policy.impact_ratio:
        return None
    back = 1 + (policy.communication_ratio - 1) * policy.hysteresis
    ratio = float(np.median(levels[slow]))
    first = mine.time_seconds[windows[int(np.argmax(slow))]]
    than = "its own faster times" if against == "own" else "other groups of as many ranks"
    return Anomaly(
        group=fit.group,
        kind=fit.kind,
        ranks=fit.ranks,
        against=against,
        severity=severity,
        ratio=ratio,
        windows=len(windows),
        slow_windows=int(slow.sum()),
        since_seconds=float(first[0]) if np.isfinite(first[0]) else None,
        ongoing=bool(levels[-1] > back),
        lost_seconds=lost,
        lost_ratio=lost_ratio,
        reason=f"{fit.label} takes {ratio:.1f}× as long as {than}, in {int(slow.sum())} of {len(windows)} windows",
    )


def _persistence(slow: Bools, policy: Policy) -> Severity:
    """k of n neighbouring windows; if there are fewer than n, all of them."""
    width = min(policy.windows_kept, len(slow))
    most = int(np.convolve(slow, np.ones(width, dtype=int), mode="valid").max()) if width else 0
    if most >= policy.windows_for_alarm:
        return Severity.ALARM
    return Severity.WARNING if most >= policy.windows_for_warning else Severity.NONE


def _windows(mine: Observations, fewest: int) -> list[slice]:
    """Consecutive in time, with about equal counts."""
    count = max(min(len(mine) // fewest, _MAX_WINDOWS), 1)
    bounds = np.linspace(0, len(mine), count + 1).round().astype(int).tolist()
    return [slice(low, high) for low, high in pairwise(bounds)]


def _usable(observed: Observations, fit: Fit) -> Observations:
    """A fit's own observations, ordered in time."""
    group = observed.groups.index(fit.group)
    chosen = (observed.group == group) & (observed.kind == fit.kind) & (observed.bytes > 0)
    chosen &= (observed.seconds > 0) & np.isfinite(observed.seconds)
    if fit.is_fitted:
        chosen &= observed.ranks > 0
    mine = take_rows(observed, chosen)
    timed = len(mine) > 0 and bool(np.isfinite(mine.time_seconds).all())
    return take_rows(mine, np.argsort(mine.time_seconds, kind="stable")) if timed else mine


def _typical_of_size(mine: Observations) -> Floats:
    sizes, which = np.unique(mine.bytes, return_inverse=True)
    return grouped_median(mine.seconds, which.astype(np.int64), len(sizes))[which]


def _common_expectation(parts: list[Observations]) -> list[Floats]:
    """The expected time of each observation, from the whole cohort."""
    pooled = join_rows(parts)
    pooled = replace(pooled, group=np.zeros_like(pooled.group), groups=("",))
    fit = fit_collectives(pooled)[0]
    if fit.is_fitted:
        return [fit.predict(part.bytes, part.ranks) for part in parts]
    typical = _typical_of_size(pooled)
    bounds = np.cumsum([0, *map(len, parts)]).tolist()
    return [typical[low:high] for low, high in pairwise(bounds)]


def _family(group: str) -> str:
    """Groups that differ only in numbers are comparable: dp_0 and dp_1, but not dp_0 and tp_0."""
    return re.sub(r"\d+", "#", group)
