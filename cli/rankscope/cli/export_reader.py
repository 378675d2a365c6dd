"""Reads the rows of an exported table from Prometheus, a page of time after the other.

An answer is bounded, and so are the rows of a page: what is too large is asked again in halves. So memory does not
depend on the length of the export or the size of the fleet."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rankscope.cli.export_tables import Column, Source, Table
from rankscope.cli.messages import CommandError
from rankscope.cli.prometheus_source import explained
from rankscope.common.http_client import REQUEST_FAILURES
from rankscope.operator.prometheus_api import PrometheusApi, QueryError, Series, failure_of, may_answer_less, reason

PAGE_SECONDS: Final = 6 * 3600
# A server that takes too long for an hour is not asked for less: each attempt costs it a minute.
MIN_SLOW_SECONDS: Final = 3600
QUERY_SECONDS: Final = 60.0
MAX_ANSWER_BYTES: Final = 8 << 20
MAX_PAGE_CELLS: Final = 200_000  # series times steps
QUERIES_AT_ONCE: Final = 4
RETRY_SECONDS: Final = 1.0

Key = tuple[str, ...]
Numbers = npt.NDArray[np.float64]
_FAILURES: Final = (QueryError, *REQUEST_FAILURES)


@dataclass(frozen=True)
class Missed:
    """What the server did not answer. Without a column, there are no rows."""

    table: str
    column: str
    begin: int  # Unix seconds
    end: int
    reason: str


@dataclass(frozen=True, eq=False)
class Page:
    """Rows of a table, ordered by series, then by time."""

    labels: list[Key]  # of each series
    series: npt.NDArray[np.int64]  # of each row, an index of `labels`
    unix_seconds: npt.NDArray[np.int64]  # of each row
    values: dict[str, Numbers]  # of each row, by column; NaN if it was not measured


class _TooManyRowsError(Exception):
    pass


class Reader:
    """A page is read by several queries at once. `missed` grows while pages are read."""

    def __init__(self, api: PrometheusApi, url: str, step_seconds: int) -> None:
        self._api = api
        self._url = url
        self._step = step_seconds
        self.missed: list[Missed] = []

    def check(self) -> None:
        """Raises CommandError if the server answers no query at all."""
        try:
            self._api.query("vector(1)", time.time())
        except _FAILURES as error:
            raise self._ended(error) from error

    def read(self, table: Table, begin: int, end: int) -> Iterator[Page]:
        """The steps from `begin` on and before `end`. Raises CommandError if the server is gone or refuses."""
        found: dict[Key, Numbers] | None = None
        try:
            found = self._rows(table, begin, end)
        except _TooManyRowsError:
            pass  # the halves are asked below: while it is handled, an exception holds the answer in memory
        except _FAILURES as error:
            self._miss(table, "", begin, end, self._reason(error))
            return
        if found:
            yield self._page(table, found, begin, end)
        elif found is None and end - begin > self._step:
            for half in self._halves(begin, end):
                yield from self.read(table, *half)
        elif found is None:
            self._miss(table, "", begin, end, f"there are more than {MAX_PAGE_CELLS:,} rows at a time")

    def _page(self, table: Table, found: dict[Key, Numbers], begin: int, end: int) -> Page:
        labels, own = list(found), np.stack(list(found.values()))
        series, steps = np.nonzero(~np.isnan(own))
        values = {column.name: own[series, steps] for column in table.of(Source.VALUE)}
        at = [table.labels.index(label) for label in table.key]
        keys = [tuple(row[place] for place in at) for row in labels]

        def measured(column: Column) -> Numbers:
            answered = self._series(table.query(column, self._step), begin, end)
            found = self._grid(table.key, answered, begin, end, frozenset(keys))
            nothing = np.full(own.shape[1], np.nan)
            return np.stack([found.get(key, nothing) for key in keys])[series, steps]

        with ThreadPoolExecutor(QUERIES_AT_ONCE) as pool:
            asked = {column: pool.submit(measured, column) for column in table.of(Source.QUERY)}
            for column, future in asked.items():
                try:
                    values[column.name] = future.result()
                except _FAILURES as error:
                    self._miss(table, column.name, begin, end, self._reason(error))
                    values[column.name] = np.full(len(series), np.nan)
        return Page(labels, series, begin + steps * self._step, values)

    def _rows(self, table: Table, begin: int, end: int) -> dict[Key, Numbers]:
        return self._grid(table.labels, self._series(table.query(None, self._step), begin, end), begin, end)

    def _grid(
        self,
        labels: tuple[str, ...],
        answered: Iterable[Series],
        begin: int,
        end: int,
        wanted: Collection[Key] | None = None,
    ) -> dict[Key, Numbers]:
        """A value for each step, by labels; NaN where there is none."""
        steps = -(-(end - begin) // self._step)
        found: dict[Key, Numbers] = {}
        for one in answered:
            key = tuple(one.metric.get(label, "") for label in labels)
            if wanted is not None and key not in wanted:
                continue
            row = found.get(key)
            if row is None:
                if (len(found) + 1) * steps > MAX_PAGE_CELLS and wanted is None:
                    raise _TooManyRowsError
                row = found[key] = np.full(steps, np.nan)
            try:
                numbers = np.fromiter((float(text) for _, text in one.values), np.float64, len(one.values))
            except ValueError as error:
                raise QueryError("it answers with values that are no numbers") from error
            places = (np.fromiter((at for at, _ in one.values), np.float64, len(one.values)) - begin) / self._step
            is_known = np.isfinite(numbers) & (places > -0.5) & (places < steps - 0.5)
            row[np.rint(places[is_known]).astype(np.int64)] = numbers[is_known]
        return found

    def _series(self, promql: str, begin: int, end: int) -> Iterator[Series]:
        try:
            answered = self._ask(promql, begin, end)
        except _FAILURES as error:
            least = max(self._step, MIN_SLOW_SECONDS) if isinstance(error, TimeoutError) else self._step
            if not may_answer_less(error) or end - begin <= least:
                raise
        else:
            yield from answered
            return
        for half in self._halves(begin, end):
            yield from self._series(promql, *half)

    def _ask(self, promql: str, begin: int, end: int) -> list[Series]:
        try:
            return self._api.query_range(promql, begin, end - self._step, self._step)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            time.sleep(RETRY_SECONDS)  # a server that restarts
            return self._api.query_range(promql, begin, end - self._step, self._step)

    def _halves(self, begin: int, end: int) -> tuple[tuple[int, int], tuple[int, int]]:
        steps = -(-(end - begin) // self._step)
        middle = begin + steps // 2 * self._step
        return (begin, middle), (middle, end)

    def _reason(self, error: Exception) -> str:
        """Of a page that is missed. Raises CommandError if no other page would be answered either."""
        if isinstance(error, QueryError) and error.status in (401, 403):
            raise self._ended(error) from error
        self.check()
        return reason(error)

    def _ended(self, error: Exception) -> CommandError:
        return explained(self._url, failure_of(error), reason(error))

    def _miss(self, table: Table, column: str, begin: int, end: int, why: str) -> None:
        self.missed.append(Missed(table.name, column, begin, end, why))
