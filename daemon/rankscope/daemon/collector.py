"""The interface of a collector, the wrapper that measures its duration and turns its failure into a problem, and the
log of problems."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rankscope.common.text import one_line, printable
from rankscope.daemon.config import Config
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span

LINE_CHARACTERS = 600
REPEAT_SECONDS = 60.0
LINES_PER_OWNER = 128  # in that time
MAX_KEYS = 16_384

Sample = TypeVar("Sample")


class Collector(ABC, Generic[Sample]):
    """One source of measurements. Only `name` and `collect` are required; add the class to COLLECTORS in sampler.py,
    and the name to RankSamples and PARTS of windows/window.py. The daemon does not start with one of them missing."""

    name: str  # in metrics, problems, RankSamples and PARTS

    @classmethod
    def from_config(cls, config: Config) -> Collector[Sample] | None:
        """None where the configuration turns it off."""
        return cls()

    @abstractmethod
    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, Sample | Problem]:
        """What was measured since the last call, or why not, of each rank; a rank without news is left out. A sample
        may have a `problem` of its own, beside what was measured."""

    def start(self) -> None:
        """Called once, before the first `poll`."""

    def poll(self, now_monotonic: float) -> None:
        """Called about five times a second between windows. Must not block."""

    def close(self) -> None:
        """Called once, also if `start` was not."""


def blocked(collector: str, rank: RankProcess) -> Problem:
    text = f"{rank}: it blocks those who read it, and is not read until it stops (an exec that does not end?)"
    return Problem(collector, "blocked", text)


@dataclass(frozen=True)
class CollectorStatus:
    duration_seconds: float
    success: bool


@dataclass(frozen=True)
class Collected(Generic[Sample]):
    """The result of one collector for one window."""

    collector: str
    samples: Mapping[RankKey, Sample] = field(default_factory=dict)
    problems: Mapping[RankKey, Problem] = field(default_factory=dict)
    duration_seconds: float = 0.0
    failure: str | None = None

    @property
    def status(self) -> CollectorStatus:
        return CollectorStatus(self.duration_seconds, self.failure is None)


def failure_of(action: Callable[[], object]) -> str | None:
    """Call `action`; the reason in one line if it failed."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - a source may fail in any way, and must not stop the others
        return describe(error)
    return None


class Supervised(Generic[Sample]):
    """A collector with its duration and success. An exception becomes a problem of every rank it was asked about."""

    def __init__(self, collector: Collector[Sample], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._collector = collector
        self._monotonic = monotonic
        self._poll_seconds = 0.0
        self._poll_failure: str | None = None

    def poll(self) -> None:
        """Its time and its failure are charged to the window that closes next."""
        started = self._monotonic()
        self._poll_failure = failure_of(lambda: self._collector.poll(started)) or self._poll_failure
        self._poll_seconds += self._monotonic() - started

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Collected[Sample]:
        started = self._monotonic()
        name = self._collector.name
        samples: dict[RankKey, Sample] = {}
        problems: dict[RankKey, Problem] = {}

        def read() -> None:
            for key, value in self._collector.collect(ranks, span).items():
                if not isinstance(value, Problem):
                    samples[key] = value
                problem = value if isinstance(value, Problem) else getattr(value, "problem", None)
                if problem is not None:
                    problems[key] = problem

        failure = failure_of(read)
        if failure is not None:
            text = f"the {name} collector failed: {failure}; it is tried again in the next window"
            samples = {}
            problems = {rank.key: Problem(name, "crash", text) for rank in ranks}
        failure = failure or self._poll_failure
        duration_seconds = self._poll_seconds + self._monotonic() - started
        self._poll_seconds, self._poll_failure = 0.0, None
        return Collected(name, samples, problems, duration_seconds, failure)


def describe(error: BaseException) -> str:
    """An exception in one bounded line."""
    return one_line(f"{type(error).__name__}: {error}", 300)


class ProblemLog:
    """One line for each problem, the same problem at most once a minute, and a bounded number of lines of each pod and
    user: who has a thousand problems must not hide those of others."""

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
        if len(self._logged) >= MAX_KEYS:
            self._logged = {old: at for old, at in self._logged.items() if now - at < REPEAT_SECONDS}
        self._lines[owner] += 1
        if self._lines[owner] > LINES_PER_OWNER or len(self._logged) >= MAX_KEYS:
            if self._lines[owner] == LINES_PER_OWNER + 1:
                self._log.warning("%s has more problems, which are not logged for a minute", printable(owner, 100))
            return
        self._logged.update(dict.fromkeys(known, now))
        # The text may quote a training process; a line of the log stays one line.
        self._log.warning("%s", printable(text, LINE_CHARACTERS))
