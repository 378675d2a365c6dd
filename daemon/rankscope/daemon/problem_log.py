"""The daemon's log: one line for each problem, the same problem at most once a minute, and a bounded number of lines of
each pod and user: who has a thousand problems must not hide those of others."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

from rankscope.common.text import one_line, printable

LINE_CHARACTERS = 600
REPEAT_SECONDS = 60.0
LINES_PER_OWNER = 128  # in that time
KEYS_KEPT = 16_384


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    return one_line(f"{type(error).__name__}: {error}", 300)


class ProblemLog:
    def __init__(self, log: logging.Logger, monotonic_seconds: Callable[[], float]) -> None:
        self._log = log
        self._monotonic_seconds = monotonic_seconds
        self._logged: dict[Hashable, float] = {}
        self._lines: Counter[str] = Counter()
        self._counted_since = monotonic_seconds()

    def warn(self, key: Hashable, text: str, owner: str = "") -> None:
        """Log `text` unless this `key`, or the same text for another one, was logged within the last minute, or `owner`
        has had its share of lines."""
        now = self._monotonic_seconds()
        known = (key, hash(text))
        if any(now - self._logged.get(each, now - REPEAT_SECONDS) < REPEAT_SECONDS for each in known):
            return
        if now - self._counted_since >= REPEAT_SECONDS:
            self._lines.clear()
            self._counted_since = now
        if len(self._logged) >= KEYS_KEPT:
            self._logged = {old: at for old, at in self._logged.items() if now - at < REPEAT_SECONDS}
        self._lines[owner] += 1
        if self._lines[owner] > LINES_PER_OWNER or len(self._logged) >= KEYS_KEPT:
            if self._lines[owner] == LINES_PER_OWNER + 1:
                self._log.warning("%s has more problems, which are not logged for a minute", printable(owner, 100))
            return
        self._logged.update(dict.fromkeys(known, now))
        # The text may quote a training process; a line of the log stays one line.
        self._log.warning("%s", printable(text, LINE_CHARACTERS))
