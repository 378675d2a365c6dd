"""The time before the history in memory begins, from Prometheus, where its address is configured.

A request never waits for Prometheus: it gets what is known, and a note where something is missing. Queries are made in
threads of their own, one at a time for each run, with a deadline and a limit for the size of an answer. A query selects
the series of one run by its labels, and the caller of this module has authorised that run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.common.http_client import REQUEST_FAILURES
from rankscope.common.metric_table import label
from rankscope.common.run_names import run_labels
from rankscope.common.text import one_line, printable
from rankscope.operator.console.history import DAY_SECONDS, RunView, Values
from rankscope.operator.console.signals import PACE, RUN_SIGNALS, SIGNAL_ROWS, SIGNALS
from rankscope.operator.prometheus_api import PrometheusApi, QueryError, Series, quoted

log = logging.getLogger(__name__)

MAX_HISTORY_SECONDS: Final = 7 * DAY_SECONDS
# A query's step is one of these. A day in 450 columns is 288 steps. Prometheus answers with 11,000 at most.
STEPS_SECONDS: Final = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 86_400)
# So that the same time a moment later is the same question.
ALIGNED_STEPS: Final = 16
# A value is the mean of the time before it: of a step, but of several scrapes.
MIN_WINDOW_SECONDS: Final = 60
MAX_POINTS: Final = 400_000  # of all series of an answer
ANSWER_BYTES: Final = 32 << 20
QUERY_SECONDS: Final = 10.0
QUERIES_AT_ONCE: Final = 4
# How long an answer is not asked for again: one with values, and a failure.
KEPT_SECONDS, FAILED_SECONDS = 60.0, 15.0
MAX_KEPT_BYTES: Final = 32 << 20
MAX_KEPT_ANSWERS: Final = 64
REASON_CHARACTERS: Final = 200
COHORT: Final = "cohort"  # in place of a rank: the median of its cohort
_MAX_VALUE: Final = 2.0**53

Key = tuple[str, str]  # a signal, and a rank, COHORT, or nothing for the run itself


@dataclass(frozen=True, eq=False)
class Older:
    """Columns of equal length before the history in memory. `note` says in a sentence what is missing."""

    ends: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    step_seconds: float = 0.0
    values: Mapping[Key, Values] = field(default_factory=dict)
    note: str = ""

    def rows(self, keys: Sequence[Key]) -> Values:
        """A row per column of time, a column per key; NaN where nothing is known."""
        unknown = np.full(len(self.ends), np.nan, dtype=np.float32)
        columns = [self.values.get(key, unknown) for key in keys]
        rows: Values = np.array(columns, dtype=np.float32).reshape(len(keys), len(self.ends)).T
        return rows

    def since(self, moment: float) -> Older:
        """Without columns that end before that, and without those in which nothing is known before the first that has
        a value."""
        is_known = np.zeros(len(self.ends), dtype=bool)
        for column in self.values.values():
            is_known |= ~np.isnan(column)
        is_known &= self.ends > moment
        first = int(np.argmax(is_known)) if is_known.any() else len(self.ends)
        values = {key: column[first:] for key, column in self.values.items()}
        return replace(self, ends=self.ends[first:], values=values)

    @property
    def bytes(self) -> int:
        return sum(column.nbytes + 200 for column in self.values.values())


NOTHING: Final = Older()
MISSING: Final = "Older history is missing. Prometheus:"
READING: Final = Older(note="Older history is being read from Prometheus.")


@dataclass(frozen=True)
class Question:
    run: str
    promql: str
    begin: float
    end: float
    step_seconds: int


class PrometheusHistory:
    """Thread-safe. Without an address it has nothing."""

    def __init__(self, url: str = "", request_seconds: float = QUERY_SECONDS, answer_bytes: int = ANSWER_BYTES) -> None:
        self._limits = (request_seconds, answer_bytes)
        self._lock = threading.Lock()
        self._answers: dict[Question, tuple[float, Older]] = {}  # with the monotonic time until which each counts
        self._under_way: set[str] = set()  # runs
        self._failure = ""  # the latest
        self.url = ""
        self.use(url)

    def use(self, url: str) -> None:
        """Raises ValueError for an address that is none; empty for no Prometheus."""
        if url:
            self._api = PrometheusApi(url, *self._limits)
        self.url = url

    def reaches(self, view: RunView, since: float) -> bool:
        """Whether Prometheus is asked for what is shown since a moment, in Unix seconds; 0 is all that is in memory."""
        return bool(self.url and view.ticks) and 0 < since < view.ticks[0].start

    def of_ranks(self, view: RunView, signal: str, since: float, columns: int) -> Older:
        """A signal of every rank, with the keys (signal, rank)."""
        columns = max(1, min(columns, MAX_POINTS // max(1, len(view.members))))
        return self._older(view, [_named(_by_rank(signal), signal)], since, columns)

    def of_rank(self, view: RunView, rank: int, cohort: Iterable[int], since: float, columns: int) -> Older:
        """Every signal of a rank, with the keys (signal, rank) and (signal, COHORT)."""
        own, others = f'rank="{rank}"', f'rank=~"{"|".join(map(str, cohort))}"'
        parts = []
        for signal in view.signals:
            parts.append(_named(_by_rank(signal, own), signal))
            parts.append(_named(f"quantile by (cluster) (0.5, {_by_rank(signal, others)})", signal, COHORT))
        return self._older(view, parts, since, columns)

    def of_run(self, view: RunView, since: float, columns: int) -> Older:
        """The pace of a run, with the keys (signal, "")."""
        pace = [signal for signal in RUN_SIGNALS if signal.name in PACE]
        parts = [_named(f"max by (cluster) ({signal.promql})", signal.name) for signal in pace]
        return self._older(view, parts, since, columns)

    def _older(self, view: RunView, parts: Sequence[str], since: float, columns: int) -> Older:
        if not self.reaches(view, since) or not parts:
            return NOTHING
        last = view.ticks[-1].end
        begin = max(since, last - MAX_HISTORY_SECONDS)
        step = next((step for step in STEPS_SECONDS if step * columns >= last - begin), STEPS_SECONDS[-1])
        if begin > view.ticks[0].start - step:
            return NOTHING
        window = f"{max(step, MIN_WINDOW_SECONDS)}s"
        # The run comes last: nothing is replaced in its name.
        promql = " or ".join(parts).replace("$window", window).replace("$run", _matchers(view.name))
        aligned = begin - begin % (ALIGNED_STEPS * step)
        return self._ask(Question(view.name, promql, aligned, view.ticks[0].start, step)).since(begin)

    def _ask(self, question: Question) -> Older:
        with self._lock:
            until, older = self._answers.get(question, (0.0, READING))
            is_free = question.run not in self._under_way and len(self._under_way) < QUERIES_AT_ONCE
            if time.monotonic() >= until and is_free:
                self._under_way.add(question.run)
                threading.Thread(target=self._query, args=(question,), name="rankscope-older", daemon=True).start()
        return older

    def _query(self, question: Question) -> None:
        older = Older(note=f"{MISSING} the query failed.")
        try:
            older = self._queried(question)
        except (*REQUEST_FAILURES, QueryError) as error:
            older = Older(note=f"{MISSING} {one_line(str(error) or type(error).__name__, REASON_CHARACTERS)}")
        finally:
            with self._lock:
                self._keep(question, older)
                self._under_way.discard(question.run)

    def _keep(self, question: Question, older: Older) -> None:
        if older.note != self._failure:
            self._failure = older.note
            log.warning("%s: %s", self.url, older.note or "Prometheus answers again")
        kept_seconds = FAILED_SECONDS if older.note else KEPT_SECONDS
        before = self._answers.pop(question, (0.0, older))[1]
        # Values that were read before still hold.
        kept = before if older.note and not before.note else older
        self._answers[question] = (time.monotonic() + kept_seconds, kept)
        while len(self._answers) > MAX_KEPT_ANSWERS or self._held_bytes() > MAX_KEPT_BYTES:
            del self._answers[next(iter(self._answers))]

    def _held_bytes(self) -> int:
        return sum(older.bytes for _, older in self._answers.values()) if len(self._answers) > 1 else 0

    def _queried(self, question: Question) -> Older:
        """Raises QueryError, or one of REQUEST_FAILURES."""
        step = question.step_seconds
        columns = int(-(-(question.end - question.begin) // step))
        ends = question.end - step * np.arange(columns - 1, -1, -1, dtype=np.float64)
        found = self._api.query_range(question.promql, ends[0], ends[-1], step)
        clusters = {series.metric.get("cluster", "") for series in found}
        if len(clusters) > 1:
            names = ", ".join(sorted(printable(name, 40) or "(none)" for name in clusters)[:3])
            raise QueryError(f"it has this run in several clusters ({names}); name one that has those of this cluster")
        values = {}
        for series in found[: MAX_POINTS // columns + 1]:
            key = (series.metric.get("signal", ""), series.metric.get("rank", ""))
            values[key] = _column(series, ends[0], step, columns)
        return Older(ends, step, values)


def _column(series: Series, begin: float, step: float, columns: int) -> Values:
    column = np.full(columns, np.nan, dtype=np.float32)
    for moment, text in series.values:
        place = (moment - begin) / step
        value = float(text)  # or NaN, +Inf
        if -0.5 < place < columns - 0.5 and 0 <= value <= _MAX_VALUE:
            column[round(place)] = value
    return column


# PromQL.


def _matchers(run: str) -> str:
    return ",".join(f"{name}={quoted(label(value))}" for name, value in run_labels(run).items())


def _by_rank(signal: str, matcher: str = "") -> str:
    promql = SIGNALS[SIGNAL_ROWS[signal]].promql
    return f"max by (cluster, rank) ({promql.replace('$run', f'$run,{matcher}') if matcher else promql})"


def _named(expression: str, signal: str, rank: str = "") -> str:
    named = f'label_replace({expression}, "signal", "{signal}", "", "")'
    return f'label_replace({named}, "rank", "{rank}", "", "")' if rank else named
