"""Reads step times of runs from text, CSV, JSON and traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rankscope.analysis.stats.robust import Floats
from rankscope.cli.messages import CommandError, cannot_read

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# Common names of the step time in logs, and the unit where the name does not say.
_COLUMNS = {
    "step_seconds": "s",
    "step_time_seconds": "s",
    "step_time_s": "s",
    "step_s": "s",
    "seconds": "s",
    "step_ms": "ms",
    "step_time_ms": "ms",
    "step_time_us": "us",
    "step_us": "us",
    "duration_us": "us",
    "duration_ms": "ms",
    "step_time": "s",
    "iteration_time": "s",
    "iter_time": "s",
}
MAX_STEPS = 200_000_000
MAX_JSON_BYTES = 1 << 30
_CHUNK_BYTES = 4 << 20
_HEAD_BYTES = 1 << 20


class StepFileError(ValueError):
    """What is wrong with a file of step times; the message begins with the file name."""


def read_text(path: Path, unit: str | None) -> Floats:
    """One number per line; ignores blank lines and lines that begin with #."""
    chunks: list[Floats] = []
    number = steps = 0
    with _open(path) as file:
        while lines := file.readlines(_CHUNK_BYTES):
            try:
                values = np.fromiter(map(float, lines), np.float64, len(lines))
            except ValueError:  # not only numbers
                values = np.array(list(_numbers_of(path, lines, number)), dtype=np.float64)
            if not (values > 0).all() or not np.isfinite(values).all():
                list(_numbers_of(path, lines, number))  # raises with the line number
            number += len(lines)
            steps += len(values)
            if steps > MAX_STEPS:
                raise StepFileError(f"{path}: more than {MAX_STEPS:,} steps")
            chunks.append(values)
    return _scaled(np.concatenate(chunks) if chunks else np.zeros(0), unit or "s")


def read_csv(path: Path, column: str | None, unit: str | None) -> Floats:
    with _open(path) as file:
        rows = _rows(path, file)
        header = [name.strip() for name in next(rows)[1]]
        name, guessed = _choose_column(path, header, column)
        place = header.index(name)
        values = array("d")
        for number, row in rows:
            if len(row) <= place:
                raise StepFileError(f"{path}: line {number} has no column {name}")
            values.append(_time_of(path, row[place], f"line {number}"))
            if len(values) > MAX_STEPS:
                raise StepFileError(f"{path}: more than {MAX_STEPS:,} steps")
    return _scaled(np.array(values, dtype=np.float64), unit or guessed)


def read_json_lines(path: Path, column: str | None, unit: str | None) -> Floats:
    values = array("d")
    guessed = "s"
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            entry = _parse(path, line, f"line {number}: ")
            if isinstance(entry, dict):
                # A line without the column is another kind of record: an evaluation, a checkpoint.
                if column is None:
                    column = next((name for name in _COLUMNS if name in entry), None)
                    guessed = _COLUMNS.get(column or "", "s")
                if column is None or column not in entry:
                    continue
                entry = entry[column]
            values.append(_time_of(path, entry, f"line {number}"))
    if not values:
        wanted = f"a key {column}" if column else "a key such as step_seconds; name yours with --column"
        raise StepFileError(f"{path}: no line has {wanted}")
    return _scaled(np.array(values, dtype=np.float64), unit or _COLUMNS.get(column or "", guessed))


def read_json(path: Path, column: str | None, unit: str | None) -> Floats:
    """A list of times or of objects, an object that holds such a list, or the report of `rankscope analyze trace`."""
    with _open(path) as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise StepFileError(f"{path}: too large for JSON; write one object per line")
    content = _parse(path, text, "")
    if isinstance(content, dict) and isinstance(content.get("ranks"), list):
        return _report(path, content["ranks"])
    if isinstance(content, dict):
        for name in (column,) if column else (*_COLUMNS, "steps"):
            if isinstance(content.get(name), list):
                content, column = content[name], column or (None if name == "steps" else name)
                break
        else:
            raise StepFileError(f"{path}: a JSON object without a list {column or 'step_seconds'}; see --column")
    guessed = _COLUMNS.get(column or "", "s")
    if content and isinstance(content, list) and isinstance(content[0], dict):
        name, guessed = _choose_column(path, list(content[0]), column)
        content = [entry.get(name) if isinstance(entry, dict) else entry for entry in content]
    if not isinstance(content, list):
        raise StepFileError(f"{path}: not a list of step times but a {type(content).__name__}")
    times = [_time_of(path, entry, f"entry {number}") for number, entry in enumerate(content, 1)]
    return _scaled(np.array(times, dtype=np.float64), unit or guessed)


def by_step(ranks: Iterable[dict[int, float]]) -> Floats:
    """Ranks of one job wait for each other: their step is one step, its time the median over ranks."""
    by_number: dict[int, list[float]] = {}
    for steps in ranks:
        for number, seconds in steps.items():
            by_number.setdefault(number, []).append(seconds)
    return np.array([float(np.median(by_number[number])) for number in sorted(by_number)], dtype=np.float64)


def _report(path: Path, ranks: list[Any]) -> Floats:
    try:
        steps = [{int(s["number"]): float(s["duration_us"]) / 1e6 for s in rank["steps"]} for rank in ranks]
    except (KeyError, TypeError, ValueError):
        raise StepFileError(f"{path}: its ranks have no steps with number and duration_us") from None
    return by_step(steps)


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, list[str]]]:
    lines = (line for line in file if line.strip() and not line.startswith("#"))
    header = next(lines, "")
    delimiter = max(",;\t", key=header.count)
    reader = csv.reader((line for part in ((header,), lines) for line in part), delimiter=delimiter)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise StepFileError(f"{path}: line {reader.line_num}: {error}") from None


def _choose_column(path: Path, header: list[str], asked: str | None) -> tuple[str, str]:
    listed = ", ".join(header[:8])[:120]
    if asked is not None:
        if asked not in header:
            raise StepFileError(f"{path}: no column {asked}; there are {listed}")
        return asked, _COLUMNS.get(asked, "s")
    for name, unit in _COLUMNS.items():
        if name in header:
            return name, unit
    if len(header) == 1:
        return header[0], "s"
    raise StepFileError(f"{path}: no column step_seconds; there are {listed}; name one with --column")


def _numbers_of(path: Path, lines: list[str], before: int) -> Iterator[float]:
    for number, line in enumerate(lines, before + 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield _time_of(path, text, f"line {number}")


def _time_of(path: Path, value: object, place: str) -> float:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds <= 0:
        raise StepFileError(f"{path}: {place}: {str(value)[:40]!r} is no step time (a finite number above zero)")
    return seconds


def _parse(path: Path, text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StepFileError(f"{path}: {place}not JSON ({str(error)[:80]})") from None


def _scaled(values: Floats, unit: str) -> Floats:
    return values * UNITS[unit]


# Runs to compare, from files and directories: traces or lists of step times.


@dataclass(frozen=True)
class Runs:
    names: tuple[str, ...]
    seconds: tuple[Floats, ...]
    notes: tuple[str, ...]


def read_runs(paths: Sequence[Path], column: str | None, unit: str | None) -> Runs:
    """Each file of step times is a run; traces in one directory are the ranks of one run."""
    names: list[str] = []
    runs: list[Floats] = []
    notes: list[str] = []
    for path in paths:
        try:
            _read_path(path, column, unit, names, runs, notes)
        except UnicodeDecodeError:
            raise StepFileError(f"{path}: not text: neither step times nor a trace") from None
        except (EOFError, zlib.error):
            raise StepFileError(f"{path}: the gzip file is damaged or cut off") from None
        except OSError as error:
            raise CommandError(f"{error.filename or path}: {cannot_read(error)}") from None
    for name, run in zip(names, runs, strict=True):
        if len(run) == 0:
            raise StepFileError(f"{name}: holds no step times")
    return Runs(tuple(names), tuple(runs), tuple(notes))


def _read_path(
    path: Path, column: str | None, unit: str | None, names: list[str], runs: list[Floats], notes: list[str]
) -> None:
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise StepFileError(f"{path}: the directory is empty")
    traces = []
    for file in files:
        kind = _kind_of(file)
        if kind == "trace":
            traces.append(file)
            continue
        names.append(str(file))
        if kind == "csv":
            runs.append(read_csv(file, column, unit))
        elif kind == "json lines":
            runs.append(read_json_lines(file, column, unit))
        else:
            runs.append(read_json(file, column, unit) if kind == "json" else read_text(file, unit))
    if traces:
        names.append(str(path))
        runs.append(_steps_of_traces(path, traces, notes))


def _steps_of_traces(path: Path, files: list[Path], notes: list[str]) -> Floats:
    from rankscope.analysis.traces.steps import find_steps
    from rankscope.cli.trace_report.files import load_traces

    loaded = load_traces(files)
    if not loaded.traces:
        broken = loaded.broken[0]
        raise StepFileError(f"{broken.path}: {broken.reason}")
    notes += [f"{broken.path} was left out: {broken.reason}" for broken in loaded.broken]
    ranks = []
    for one in loaded.traces:
        steps = find_steps(one.trace)
        # Where the end of an optimizer marks a step, the trace cuts the first step short.
        first = 1 if steps.source == "Optimizer.step" else 0
        seconds = (steps.end_ns - steps.start_ns)[first:] / 1e9
        ranks.append({int(n): float(s) for n, s in zip(steps.number[first:], seconds, strict=True) if s > 0})
    run = by_step(ranks)
    if len(run) == 0:
        raise StepFileError(f"{path}: the trace shows no steps; call profiler.step() in the loop")
    return run


def _kind_of(path: Path) -> str:
    head = _head(path)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise StepFileError(f"{path}: the file is empty")
    if b"\0" in head:
        raise StepFileError(f"{path}: a binary file; step times are text, CSV or JSON, traces JSON")
    if text[:1] in (b"{", b"["):
        return _kind_of_json(text)
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith(b"#")), b"").strip()
    try:
        float(first)
    except ValueError:
        has_words = first[:1].isalpha() or first[:1] in b"\"'_"
        if any(mark in first for mark in (b",", b";", b"\t")) or (has_words and b" " not in first):
            if not has_words:
                raise StepFileError(f"{path}: CSV without a header; add a line that names its columns") from None
            return "csv"
    return "text"


def _kind_of_json(text: bytes) -> str:
    if b'"traceEvents"' in text or text[:64].replace(b" ", b"").startswith((b'[{"ph"', b'[{"name"')):
        return "trace"
    line, _, rest = text.partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        kineto = (b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
        return "trace" if any(word in text for word in kineto) else "json"
    return "json lines" if rest.strip() else "json"


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    return zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES) if head[:2] == b"\x1f\x8b" else head
