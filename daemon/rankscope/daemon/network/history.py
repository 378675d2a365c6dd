"""Counters over time: how much they grew in the last minute, and in a usual minute before it.

A counter that becomes smaller was reset or has wrapped: what it counted meanwhile is not known, and adds nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

RECENT_SECONDS: Final = 60.0
PAST_SECONDS: Final = 1800.0
# Fewer minutes than this do not show what is usual. They overlap.
MIN_PAST_MINUTES: Final = 3


@dataclass(frozen=True)
class _Moment:
    monotonic_seconds: float
    totals: Mapping[str, int]


class CounterHistory:
    """Counters of one port or namespace, which are read every `interval_seconds`."""

    def __init__(self, interval_seconds: float) -> None:
        self._per_minute = max(1, round(RECENT_SECONDS / interval_seconds))
        self._moments: deque[_Moment] = deque(maxlen=self._per_minute + max(1, round(PAST_SECONDS / interval_seconds)))
        self._raw: dict[str, int] = {}

    def add(self, counters: Mapping[str, int], now: float) -> None:
        before = self._moments[-1].totals if self._moments else {}
        totals = {
            name: before.get(name, 0) + max(0, value - self._raw.get(name, value)) for name, value in counters.items()
        }
        self._raw = dict(counters)
        self._moments.append(_Moment(now, totals))

    @property
    def seconds(self) -> float:
        """What `recent` covers: a minute, or less where there is less."""
        if not self._moments:
            return 0.0
        return self._moments[-1].monotonic_seconds - self._moments[self._first_recent].monotonic_seconds

    @property
    def _first_recent(self) -> int:
        return max(0, len(self._moments) - 1 - self._per_minute)

    def recent(self) -> dict[str, int]:
        """By how much each counter grew in the last minute."""
        if len(self._moments) < 2:
            return {}
        return _grown(self._moments[self._first_recent], self._moments[-1])

    def usual(self, name: str, since: float) -> float | None:
        """By how much a counter grew in the median minute between `since` and the last minute. None where that is too
        short."""
        return _median([grown for grown in self._minutes(name, since) if grown is not None])

    def usual_ratio(self, part: str, whole: str, since: float, least: int) -> float | None:
        """The median of one counter's growth as a share of another's, over minutes in which that grew by `least`."""
        minutes = zip(self._minutes(part, since), self._minutes(whole, since), strict=True)
        return _median([some / all_ for some, all_ in minutes if some is not None and all_ and all_ >= least])

    def _minutes(self, name: str, since: float) -> list[int | None]:
        """Growth in each minute; minutes overlap."""
        past = list(self._moments)[: self._first_recent + 1]
        totals = [moment.totals.get(name) for moment in past if moment.monotonic_seconds >= since]
        pairs = zip(totals, totals[self._per_minute :], strict=False)
        return [None if first is None or last is None else max(0, last - first) for first, last in pairs]


def _grown(first: _Moment, last: _Moment) -> dict[str, int]:
    return {name: max(0, total - first.totals.get(name, total)) for name, total in last.totals.items()}


def _median(values: list[float] | list[int]) -> float | None:
    return float(median(values)) if len(values) >= MIN_PAST_MINUTES else None
