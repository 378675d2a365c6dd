"""The daemon's log: one line for each problem, and the same problem at most once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from rankscope.common.text import one_line, printable

LINE_CHARACTERS = 600
REPEAT_SECONDS = 60.0
KEYS_KEPT = 4096


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    return one_line(f"{type(error).__name__}: {error}", 300)


class ProblemLog:
    def __init__(self, log: logging.Logger, monotonic_seconds: Callable[[], float]) -> None:
        self._log = log
        self._monotonic_seconds = monotonic_seconds
        self._logged: dict[Hashable, float] = {}

    def warn(self, key: Hashable, text: str) -> None:
        """Log `text` unless this `key`, or the same text for another one, was logged within the last minute."""
        now = self._monotonic_seconds()
        if any(now - self._logged.get(known, now - REPEAT_SECONDS) < REPEAT_SECONDS for known in (key, text)):
            return
        if len(self._logged) >= KEYS_KEPT:
            self._logged = {old: at for old, at in self._logged.items() if now - at < REPEAT_SECONDS}
            if len(self._logged) >= KEYS_KEPT:
                return
        self._logged[key] = self._logged[text] = now
        # The text may quote a training process; a line of the log stays one line.
        self._log.warning("%s", printable(text, LINE_CHARACTERS))
