"""Running a collector so that its failure is a measurement and never the end of the daemon."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rankscope.common.text import one_line, printable
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span
from rankscope.daemon.windows.window import PROBLEM_CHARACTERS

Sample = TypeVar("Sample")
Produced = TypeVar("Produced", covariant=True)


class Collector(Protocol[Produced]):
    """One source. `collect` returns what it measured since the last call, or why not, for each rank it was given."""

    @property
    def name(self) -> str: ...

    def collect(self, ranks: Sequence[RankProcess], span: Span, /) -> Mapping[RankKey, Produced | Problem]: ...


@dataclass(frozen=True)
class Collected(Generic[Sample]):
    """What one run of one collector gave. A rank in neither mapping simply had nothing to report."""

    collector: str
    samples: Mapping[RankKey, Sample] = field(default_factory=dict)
    problems: Mapping[RankKey, Problem] = field(default_factory=dict)
    duration_seconds: float = 0.0
    failure: str | None = None

    @property
    def success(self) -> bool:
        return self.failure is None


class Supervised(Generic[Sample]):
    """A collector with its duration and success. An exception out of it becomes a problem of every rank asked for."""

    def __init__(
        self,
        collector: Collector[Sample],
        poll: Callable[[], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = collector.name
        self._collector = collector
        self._poll = poll
        self._monotonic = monotonic
        self._poll_seconds = 0.0
        self._poll_failure: str | None = None

    def poll(self) -> None:
        """Work between windows; its time and its failure are charged to the window that closes next."""
        if self._poll is None:
            return
        started = self._monotonic()
        try:
            self._poll()
        except Exception as error:  # noqa: BLE001 - whatever a source does, the other sources go on
            self._poll_failure = describe(error)
        self._poll_seconds += self._monotonic() - started

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Collected[Sample]:
        started = self._monotonic()
        samples: dict[RankKey, Sample] = {}
        problems: dict[RankKey, Problem] = {}
        failure = self._poll_failure
        try:
            for key, value in self._collector.collect(ranks, span).items():
                if isinstance(value, Problem):
                    problems[key] = value
                else:
                    samples[key] = value
        except Exception as error:  # noqa: BLE001 - whatever a source does, the other sources go on
            failure = describe(error)
            text = f"the {self.name} collector failed: {failure}; it is tried again in the next window"
            samples = {}
            problems = {rank.key: Problem(self.name, "crash", text) for rank in ranks}
        duration_seconds = self._poll_seconds + self._monotonic() - started
        self._poll_seconds, self._poll_failure = 0.0, None
        return Collected(self.name, samples, problems, duration_seconds, failure)


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    return one_line(f"{type(error).__name__}: {error}", 300)


# Telling the operator of the machine about problems: one line each, and the same one at most once a minute.

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
        self._log.warning("%s", printable(text, 2 * PROBLEM_CHARACTERS))


class OneLine(logging.Formatter):
    """2026-01-31T12:00:00 warning rankscope.daemon.loop: text"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return " | ".join(super().format(record).splitlines())
