"""The rules in a hurry: the same expressions, thresholds and labels, with every duration divided."""

from __future__ import annotations

import re

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000, "y": 31_536_000_000}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
# Where a duration stands: how long an alert must hold, how long Alertmanager gathers (but not when it repeats itself),
# ranges, offsets; then the steps of subqueries.
_PLACES = (
    re.compile(
        rf"(?P<before>(?<![\w-])(?:for|keep_firing_for|interval|group_wait|group_interval):\s*[\"']?|\[|\boffset\s+)(?P<duration>{_DURATION})"
    ),
    re.compile(rf"(?P<before>\[{_DURATION}:)(?P<duration>{_DURATION})"),
)


def hurry(rules: str, factor: float, least_seconds: float) -> str:
    """The text of a file of rules (or of Alertmanager's configuration) with its durations divided by `factor`.

    For trying alerts out in seconds: what is tried are the real rules, only less patient. None is made shorter than
    `least_seconds`: a range must still hold a few scrapes, so that should be several times the scrape interval."""

    def shorten(match: re.Match[str]) -> str:
        asked_ms = milliseconds(match["duration"])
        return match["before"] + f"{round(min(asked_ms, max(asked_ms / factor, least_seconds * 1000)))}ms"

    if factor != 1:
        for place in _PLACES:
            rules = place.sub(shorten, rules)
    return rules


def milliseconds(duration: str) -> int:
    """Of a duration as Prometheus writes it: 5m, 1h30m, 500ms."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    return sum(int(number) * _UNITS_MS[unit] for number, unit in parts)
