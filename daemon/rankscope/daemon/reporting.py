"""Telling the operator of the machine about problems: one line each, and the same one at most once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from rankscope.daemon.assembling import PROBLEM_CHARACTERS, bounded

REPEAT_SECONDS = 60.0
REMEMBERED = 4096


class ProblemLog:
    def __init__(self, log: logging.Logger, monotonic_seconds: Callable[[], float]) -> None:
        self._log = log
        self._monotonic_seconds = monotonic_seconds
        self._told: dict[Hashable, float] = {}

    def warn(self, key: Hashable, text: str) -> None:
        """Log `text` unless this `key`, or the very same text for another one, was logged within the last minute."""
        now = self._monotonic_seconds()
        if any(now - self._told.get(said, now - REPEAT_SECONDS) < REPEAT_SECONDS for said in (key, text)):
            return
        if len(self._told) >= REMEMBERED:
            self._told = {old: at for old, at in self._told.items() if now - at < REPEAT_SECONDS}
            if len(self._told) >= REMEMBERED:
                return
        self._told[key] = self._told[text] = now
        # The text may quote a training process; a line of the log stays one line.
        self._log.warning("%s", bounded(text, 2 * PROBLEM_CHARACTERS))


class OneLine(logging.Formatter):
    """2026-01-31T12:00:00 warning rankscope.daemon.loop: text"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return " | ".join(super().format(record).splitlines())
