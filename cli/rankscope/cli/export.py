"""`rankscope export`: the history of a fleet as Parquet files, from Prometheus."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope.analysis.fleet.tables import moment
from rankscope.analysis.quantities import count, quantity
from rankscope.cli.export_files import ExportDirectory
from rankscope.cli.export_reader import MAX_ANSWER_BYTES, PAGE_SECONDS, QUERY_SECONDS, Missed, Reader
from rankscope.cli.export_tables import TABLES, Source, Table
from rankscope.cli.messages import CommandError, Exit, overwrite, to_stderr, to_stdout
from rankscope.cli.options import add_options, add_output_argument, duration_seconds
from rankscope.cli.prometheus_source import add_source_arguments, explained, since_seconds, source
from rankscope.operator.prometheus_api import NO_SERIES, Failure

_EPILOG = f"""\
examples:
  rankscope export --prometheus http://prometheus:9090 -o history                the last week, whole days of UTC
  rankscope export --prometheus http://prometheus:9090 --since 1d -o history     every day: yesterday and today again
  rankscope export --prometheus https://mimir/prometheus --tenant ml --tables runs,losses --since 90d -o history

tables: {", ".join(table.name for table in TABLES)}
They are in DIR/TABLE/date=YYYY-MM-DD/, for DuckDB, pandas and Spark. Columns and examples: docs/export.md.
"""
_EXAMPLE = "rankscope export --prometheus http://prometheus:9090 -o history"
DAY_SECONDS: Final = 86400
MIN_STEP_SECONDS: Final = 15
MAX_STEP_SECONDS: Final = 3600
MAX_SPANS_SHOWN: Final = 5


@dataclass
class Exported:
    """What became of a table."""

    table: Table
    rows: int = 0
    bytes: int = 0
    days: int = 0
    measured: set[str] = field(default_factory=set)

    @property
    def unmeasured(self) -> list[str]:
        """Columns without any value."""
        values = self.table.of(Source.QUERY) if self.rows else ()
        return [column.name for column in values if column.name not in self.measured]


@dataclass
class Summary:
    begin: int
    end: int
    step_seconds: int
    tables: list[Exported]
    missed: list[Missed]
    kept: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_source_arguments(parser)
    add_output_argument(parser, "DIR", "a new directory, or an export", required=True)
    parser.add_argument(
        "--step", default="5m", metavar="TIME", help="time between samples (default 5m), from 15s to 1h"
    )
    parser.add_argument("--tables", default="", metavar="NAMES", help="these tables only, as in runs,losses")
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    seconds = since_seconds(arguments)
    step = _step(arguments.step)
    tables = _tables(arguments.tables)
    api = source(arguments, _EXAMPLE, QUERY_SECONDS, MAX_ANSWER_BYTES)
    reader = Reader(api, arguments.prometheus, step)
    now = time.time()
    end = int(now // step) * step + step
    # Whole days: a part of one would replace the file of the whole.
    begin = int((now - seconds) // DAY_SECONDS) * DAY_SECONDS
    summary = Summary(begin, end, step, [Exported(table) for table in tables], reader.missed)
    try:
        reader.check()
        _export(reader, ExportDirectory(arguments.output, step), summary)
    finally:
        overwrite("")
    if not any(one.rows for one in summary.tables) and not reader.missed and not summary.kept:
        raise explained(arguments.prometheus, Failure.EMPTY, NO_SERIES)
    if arguments.json:
        to_stdout(json.dumps(to_json(summary, arguments.output), allow_nan=False))
    else:
        _print(summary, arguments.output)
    return Exit.UNDECIDED if reader.missed else Exit.OK


def _step(text: str) -> int:
    seconds = duration_seconds("--step", text)
    is_whole = seconds == int(seconds) and DAY_SECONDS % seconds == 0
    if not (MIN_STEP_SECONDS <= seconds <= MAX_STEP_SECONDS and is_whole):
        raise CommandError(
            f"--step {text}: from {MIN_STEP_SECONDS}s to 1h, and a day must be a multiple of it, as of 5m"
        )
    return int(seconds)


def _tables(text: str) -> Sequence[Table]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {table.name: table for table in TABLES}
    for name in names:
        if name not in known:
            raise CommandError(f"--tables {name[:40]!r}: there is no such table; choose of {', '.join(known)}")
    return [table for table in TABLES if not names or table.name in names]


def _export(reader: Reader, directory: ExportDirectory, summary: Summary) -> None:
    """Day by day, so that an export that is interrupted leaves whole days."""
    days = range(summary.begin, summary.end, DAY_SECONDS)
    for number, day in enumerate(days):
        for made in summary.tables:
            overwrite(f"day {number + 1} of {len(days)}: {made.table.name}")
            _export_day(reader, directory, made, day, summary)


def _export_day(reader: Reader, directory: ExportDirectory, made: Exported, day: int, summary: Summary) -> None:
    end = min(day + DAY_SECONDS, summary.end)
    with directory.day(made.table, day) as file:
        for begin in range(day, end, PAGE_SECONDS):
            for page in reader.read(made.table, begin, min(begin + PAGE_SECONDS, end)):
                file.add(page)
    if file.is_cut:
        reader.missed.append(Missed(made.table.name, "", day, end, "the day has too many series"))
    if file.kept_rows:
        summary.kept.append(
            f"{made.table.name} of {file.date}: the file has {file.kept_rows:,} rows, Prometheus only {file.rows:,}"
        )
    elif file.rows:
        made.rows += file.rows
        made.bytes += file.bytes
        made.days += 1
    made.measured |= file.measured


def _print(summary: Summary, directory: Path) -> None:
    to_stdout(f"{directory}: {moment(summary.begin)} to {moment(summary.end - summary.step_seconds)}")
    rows = [("table", "rows", "size", "days")]
    rows += [(one.table.name, f"{one.rows:,}", quantity(one.bytes, "B"), str(one.days)) for one in summary.tables]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    for name, *numbers in rows:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        to_stdout("  ".join([name.ljust(widths[0]), *cells]))
    for one in summary.tables:
        if one.unmeasured:
            to_stdout(f"not measured: {', '.join(one.unmeasured)} of {one.table.name}")
    for text in summary.kept:
        to_stderr(f"note: kept {text}")
    for text in _sentences(summary.missed):
        to_stderr(f"incomplete: {text}; next step: export these days again")


def to_json(summary: Summary, directory: Path) -> dict[str, Any]:
    """The keys are documented in docs/export.md."""
    return {
        "directory": str(directory),
        "begin_unix_seconds": summary.begin,
        "end_unix_seconds": summary.end,
        "step_seconds": summary.step_seconds,
        "tables": {
            one.table.name: {"rows": one.rows, "bytes": one.bytes, "days": one.days, "not_measured": one.unmeasured}
            for one in summary.tables
        },
        "kept": summary.kept,
        "missing": list(_sentences(summary.missed)),
        "complete": not summary.missed,
    }


def _sentences(missed: Sequence[Missed]) -> Iterator[str]:
    by_place: dict[tuple[str, str], list[Missed]] = {}
    for one in missed:
        by_place.setdefault((one.table, one.column), []).append(one)
    for (table, column), all_missed in by_place.items():
        spans = [f"{moment(one.begin)} to {moment(one.end)}" for one in all_missed[:MAX_SPANS_SHOWN]]
        cut = len(all_missed) - len(spans)
        more = f" and {count(cut, 'more time')}" if cut else ""
        what = f"{column} of {table}" if column else table
        yield f"{what}: nothing from {', '.join(spans)}{more} ({all_missed[0].reason})"
