"""The directory of an export: TABLE/date=YYYY-MM-DD/part-0.parquet, and schema.json.

A file is complete as soon as it has its name. It replaces that of an earlier export of the day, unless that has more
rows: Prometheus may have forgotten the beginning of the day since."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet

from rankscope.cli.export_reader import Key, Numbers, Page
from rankscope.cli.export_tables import TABLES, VERSION, Column, Source, Table, Type, description
from rankscope.cli.messages import CommandError, cannot_write
from rankscope.cli.output_file import open_output

SCHEMA_FILE: Final = "schema.json"
FILE: Final = "part-0.parquet"
MAX_SCHEMA_BYTES: Final = 1 << 20
MAX_SERIES_OF_DAY: Final = 400_000
_TABLE_KEY: Final = b"rankscope.table"
_TYPES: Final = {
    Type.TIMESTAMP: pyarrow.timestamp("ms", tz="UTC"),
    Type.STRING: pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    Type.INTEGER: pyarrow.int32(),
    Type.NUMBER: pyarrow.float64(),
    Type.BOOLEAN: pyarrow.bool_(),
}


class _Description(msgspec.Struct):
    """The part of schema.json that must fit."""

    format: str
    version: int
    step_seconds: int


class _KeptError(Exception):
    """The file of an earlier export stays."""


class ExportDirectory:
    def __init__(self, path: Path, step_seconds: int) -> None:
        """Raises CommandError for a directory that is not one of ours, before anything is written."""
        self.path = path
        self._step_seconds = step_seconds
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = {one.name for one in path.iterdir()}
            if SCHEMA_FILE in names:
                self._check(path / SCHEMA_FILE)
            elif names:
                raise CommandError(f"{path}: it has files and is no export of Rankscope; name a new directory")
            with open_output(path / SCHEMA_FILE) as file:
                file.write((json.dumps(description(TABLES, step_seconds), indent=2) + "\n").encode())
        except OSError as error:
            raise CommandError(cannot_write(error, "-o")) from error

    def _check(self, path: Path) -> None:
        with path.open("rb") as file:
            content = file.read(MAX_SCHEMA_BYTES)
        try:
            found = msgspec.json.decode(content, type=_Description)
        except msgspec.DecodeError as error:
            raise CommandError(f"{path}: not of an export of Rankscope; name a new directory") from error
        ours = description((), self._step_seconds)
        if (found.format, found.version) != (ours["format"], VERSION):
            raise CommandError(f"{path}: of another version than {VERSION}; name a new directory")
        if found.step_seconds != self._step_seconds:
            raise CommandError(
                f"{self.path}: its steps are {found.step_seconds} s; pass --step {found.step_seconds}s,"
                " or name a new directory"
            )

    @contextmanager
    def day(self, table: Table, begin: int) -> Iterator[DayFile]:
        """The file of a UTC day, which gets its name at the end. A day without rows has none."""
        date = time.strftime("%Y-%m-%d", time.gmtime(begin))
        made = DayFile(self.path / table.name / f"date={date}" / FILE, table, date, self._step_seconds)
        try:
            with suppress(_KeptError), ExitStack() as outputs:
                made.outputs = outputs
                yield made
                made.finish()
            made.bytes = made.path.stat().st_size if made.rows else 0
        except OSError as error:
            raise CommandError(cannot_write(error, "-o")) from error


class DayFile:
    outputs: ExitStack

    def __init__(self, path: Path, table: Table, date: str, step_seconds: int) -> None:
        self.path = path
        self.table = table
        self.date = date
        self.rows = 0
        self.bytes = 0
        self.kept_rows = 0  # of an earlier file that stays
        self.measured: set[str] = set()  # columns with a value in any row
        self.is_cut = False
        self._step_seconds = step_seconds
        self._writer: Any = None
        # The first and last time and the number of samples, of a table with a row per series and day.
        self._spans: dict[Key, tuple[int, int, int]] = {}

    def add(self, page: Page) -> None:
        """One row group."""
        if self.table.is_daily:
            self._add_spans(page)
        elif len(page.series):
            self._write([self._column(column, page) for column in self.table.columns])

    def finish(self) -> None:
        if self._spans:
            self._write([self._daily(column) for column in self.table.columns])
        if self._writer is None:
            return
        self._writer.close()
        before = _rows_of(self.path, self.table)
        if before > self.rows:
            self.kept_rows = before
            raise _KeptError

    def _write(self, columns: Sequence[Any]) -> None:
        if self._writer is None:
            _rows_of(self.path, self.table)  # before hours of work
            self.path.parent.mkdir(parents=True, exist_ok=True)
            output: IO[bytes] = self.outputs.enter_context(open_output(self.path))
            labels = [column.name for column in self.table.of(Source.LABEL) if column.type is Type.STRING]
            self._writer = pyarrow.parquet.ParquetWriter(
                output, schema(self.table, self._step_seconds), compression="zstd", use_dictionary=labels
            )
            self.outputs.callback(self._writer.close)  # before the output, also if the export fails
        made = pyarrow.Table.from_arrays(columns, schema=schema(self.table, self._step_seconds))
        self.measured |= {name for name, column in zip(made.column_names, columns, strict=True) if _has_value(column)}
        self._writer.write_table(made, row_group_size=max(1, made.num_rows))
        self.rows += made.num_rows

    def _column(self, column: Column, page: Page) -> Any:
        if column.source is Source.TIME:
            return _timestamps(page.unix_seconds)
        if column.source is Source.LABEL:
            of_series = [labels[self.table.labels.index(column.given)] for labels in page.labels]
            return _texts(column, of_series, page.series)
        values = page.values[column.name]
        return pyarrow.array(values if column.type is Type.NUMBER else values != 0, mask=np.isnan(values))

    def _add_spans(self, page: Page) -> None:
        present, starts, counts = np.unique(page.series, return_index=True, return_counts=True)
        for series, start, count in zip(present.tolist(), starts.tolist(), counts.tolist(), strict=True):
            labels, times = page.labels[series], page.unix_seconds[start : start + count]
            if labels not in self._spans and len(self._spans) >= MAX_SERIES_OF_DAY:
                self.is_cut = True
                return
            first, _, before = self._spans.get(labels, (int(times[0]), 0, 0))
            self._spans[labels] = (first, int(times[-1]), before + count)

    def _daily(self, column: Column) -> Any:
        if column.source is Source.LABEL:
            of_series = [labels[self.table.labels.index(column.given)] for labels in self._spans]
            return _texts(column, of_series, np.arange(len(of_series)))
        firsts, lasts, counts = (np.array(one, dtype=np.int64) for one in zip(*self._spans.values(), strict=True))
        if column.source is Source.SEEN:
            return pyarrow.array(counts * float(self._step_seconds))
        return _timestamps(firsts if column.source is Source.FIRST else lasts)


def schema(table: Table, step_seconds: int) -> Any:
    fields = [
        pyarrow.field(one.name, _TYPES[one.type], metadata={"unit": one.unit, "description": one.help})
        for one in table.columns
    ]
    return pyarrow.schema(
        fields,
        metadata={
            _TABLE_KEY: table.name,
            b"rankscope.version": str(VERSION),
            b"rankscope.step_seconds": str(step_seconds),
        },
    )


def _rows_of(path: Path, table: Table) -> int:
    """Of an earlier export; 0 if there is none. Raises CommandError for a file that is not ours."""
    if not os.path.lexists(path):
        return 0
    try:
        if path.is_symlink() or not path.is_file():
            raise CommandError(f"{path}: not a file of an export; move it away")
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise CommandError(f"{path}: not a Parquet file that can be read; move it away") from error
    if (metadata.metadata or {}).get(_TABLE_KEY) != table.name.encode():
        raise CommandError(f"{path}: not a file of an export; move it away")
    return int(metadata.num_rows)


def _timestamps(unix_seconds: Numbers | Any) -> Any:
    return pyarrow.array(unix_seconds * 1000, type=pyarrow.int64()).cast(_TYPES[Type.TIMESTAMP])


def _texts(column: Column, of_series: Iterable[str], series: Any) -> Any:
    """The texts of rows, by those of their series."""
    if column.type is Type.INTEGER:
        whole = pyarrow.array([_integer(text) for text in of_series], type=pyarrow.int32())
        return whole.take(pyarrow.array(series))
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(text, len(numbers)) for text in of_series], dtype=np.int32)
    dictionary = pyarrow.array(list(numbers), type=pyarrow.string())
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array(codes[series]), dictionary)


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _has_value(column: Any) -> bool:
    return int(column.null_count) < len(column)
