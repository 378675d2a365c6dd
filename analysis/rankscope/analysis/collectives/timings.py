"""Reads timed collectives from text: CSV, JSON, JSON lines, and the tables of nccl-tests."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, bus_factor, kind_of_note
from rankscope.analysis.collectives.alpha_beta import Observations

# Accepted column names; the first that is present is used.
_OP = ("op", "operation", "collective", "kind", "coll", "name")
_BYTES = ("bytes", "size_bytes", "size", "message_bytes", "nbytes")
_RANKS = ("ranks", "nranks", "group_size", "world_size", "n", "size_of_group")
_GROUP = ("group", "communicator", "comm", "process_group", "pg")
_WHEN = ("time", "timestamp", "when", "time_seconds", "start")
_SECONDS = {
    **dict.fromkeys(("seconds", "duration_seconds", "s", "sec"), 1.0),
    **dict.fromkeys(("ms", "milliseconds", "duration_ms", "time_ms"), 1e-3),
    **dict.fromkeys(("us", "microseconds", "duration_us", "time_us", "usec"), 1e-6),
    **dict.fromkeys(("ns", "nanoseconds", "duration_ns", "time_ns"), 1e-9),
}
_MAX_BYTES = 1 << 60
_NCCL_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_NCCL_TEST = re.compile(r"\b(\w+)_perf\b")


class UnreadableError(ValueError):
    """The message for the user: the problem, its place and the remedy."""


def read_text(text: str, *, name: str = "", op: str | None = None, ranks: int | None = None) -> Observations:
    """Raises UnreadableError. `op` and `ranks` are used if the text does not contain them."""
    body = text.lstrip("\ufeff \t\r\n")
    if not body:
        raise UnreadableError("is empty; give CSV with op,bytes,us,ranks, JSON, or the output of nccl-tests")
    if body[0] in "[{":
        return _observations(_json_records(body), op, ranks)
    if _is_nccl_tests(body):
        return _read_nccl_tests(body, name, op, ranks)
    return _observations(_csv_records(body), op, ranks)


def _json_records(body: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        lines = [line for line in body.splitlines() if line.strip()]
        try:
            content = [msgspec.json.decode(line) for line in lines]
        except (msgspec.DecodeError, RecursionError):
            raise UnreadableError(f"is not valid JSON: {error}; give a list of objects") from None
    if isinstance(content, dict):
        inner = [content[key] for key in ("collectives", "observations", "results") if key in content]
        content = inner[0] if inner else content
    if isinstance(content, dict):
        if content and all(isinstance(column, list) for column in content.values()):
            content = [dict(zip(content, row, strict=False)) for row in zip(*content.values(), strict=False)]
        else:
            content = [content]
    if not isinstance(content, list):
        raise UnreadableError("contains no list of collectives; give objects with op, bytes, us and ranks")
    for number, record in enumerate(content, 1):
        if not isinstance(record, dict):
            raise UnreadableError(f"entry {number} is not an object; give objects with op, bytes, us and ranks")
        yield f"entry {number}", record


def _csv_records(body: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    first = body.splitlines()[0]
    separator = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(body), delimiter=separator))
    except csv.Error as error:
        raise UnreadableError(f"is not valid CSV: {error}") from None
    header = [cell.strip() for cell in rows[0]]
    for number, row in enumerate(rows[1:], 2):
        if any(cell.strip() for cell in row) and not row[0].lstrip().startswith("#"):
            yield f"line {number}", dict(zip(header, row, strict=False))


def _observations(records: Iterable[tuple[str, Mapping[str, Any]]], op: str | None, ranks: int | None) -> Observations:
    groups: dict[str, int] = {}
    rows: list[tuple[int, int, int, int, float, float]] = []
    for place, record in records:
        fields = {str(key).strip().lower(): value for key, value in record.items()}
        kind = _kind(_first(fields, _OP) or op, place)
        size = _number(_first(fields, _BYTES), "bytes", place)
        if not 0 <= size < _MAX_BYTES:
            raise UnreadableError(f"{place}: bytes {size:g} is not a valid size")
        unit = next((unit for unit in _SECONDS if fields.get(unit) not in (None, "")), None)
        if unit is None:
            raise UnreadableError(f"{place}: no duration; give a column seconds, ms or us")
        seconds = _number(fields[unit], unit, place) * _SECONDS[unit]
        if seconds <= 0:
            raise UnreadableError(f"{place}: {unit} is {fields[unit]} but must be positive")
        count = _first(fields, _RANKS)
        members = _number(count, "ranks", place) if count is not None else float(ranks or -1)
        if members != -1 and not 1 <= members < 1 << 31:
            raise UnreadableError(f"{place}: ranks {members:g} is not a valid number of ranks")
        when = _first(fields, _WHEN)
        moment = _number(when, "time", place) if when is not None else math.nan
        group = groups.setdefault(str(_first(fields, _GROUP) or ""), len(groups))
        rows.append((group, kind, int(members), int(size), seconds, moment))
    if not rows:
        raise UnreadableError("contains no collectives; give rows of op, bytes, us and ranks")
    group_column, kind_column, rank_column, size_column, second_column, time_column = zip(*rows, strict=True)
    return Observations(
        group=np.array(group_column, dtype=np.int64),
        kind=np.array(kind_column, dtype=np.int64),
        ranks=np.array(rank_column, dtype=np.int64),
        bytes=np.array(size_column, dtype=np.int64),
        seconds=np.array(second_column, dtype=np.float64),
        time_seconds=np.array(time_column, dtype=np.float64),
        groups=tuple(groups),
    )


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in (None, "")), None)


def _kind(value: Any, place: str) -> int:
    if value is None:
        raise UnreadableError(f"{place}: no operation; give a column op, or --op all_reduce")
    kind = kind_of_note(str(value))
    if kind is None:
        raise UnreadableError(f"{place}: {str(value)[:40]!r} is not a collective; use all_reduce, all_gather, …")
    return int(kind)


def _number(value: Any, what: str, place: str) -> float:
    if value is None:
        raise UnreadableError(f"{place}: no {what}; give a column {what}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UnreadableError(f"{place}: {what} {str(value)[:40]!r} is not a number") from None
    if not math.isfinite(number) or isinstance(value, bool):
        raise UnreadableError(f"{place}: {what} {str(value)[:40]!r} is not a number")
    return number


def _is_nccl_tests(body: str) -> bool:
    return re.search(r"^#\s+size\s+count\s+type", body, re.M) is not None or "# nThread" in body


def _read_nccl_tests(body: str, name: str, op: str | None, ranks: int | None) -> Observations:
    """The table of `all_reduce_perf` and similar: out-of-place and in-place times are two observations."""
    lines = body.splitlines()
    header = next((line.lstrip("# ").split() for line in lines if re.match(r"#\s+size\s+count\s+type", line)), None)
    if header is None or "time" not in header:
        raise UnreadableError("looks like nccl-tests but has no line '# size count type … time algbw busbw'")
    columns = [number for number, word in enumerate(header) if word == "time"]
    members = len({match[1] for line in lines if (match := _NCCL_RANK.match(line))}) or (ranks or -1)
    rows: list[tuple[int, float]] = []
    factors: list[float] = []
    for number, line in enumerate(lines, 1):
        cells = line.split()
        if len(cells) < 5 or not cells[0].isdigit() or not cells[1].isdigit():
            continue
        if len(cells) != len(header):
            raise UnreadableError(f"line {number}: {len(cells)} columns where the header has {len(header)}")
        size = int(cells[0])
        for column in columns:
            if cells[column].upper() == "N/A":
                continue
            microseconds = _number(cells[column], "time", f"line {number}")
            if size > 0 and microseconds > 0:
                rows.append((size, microseconds * 1e-6))
                rates = [_number(cell, "bandwidth", f"line {number}") for cell in cells[column + 1 : column + 3]]
                if len(rates) == 2 and rates[0] > 1:
                    factors.append(rates[1] / rates[0])
    if not rows:
        raise UnreadableError("contains no measurements; nccl-tests print one row per size")
    if members < 0:
        raise UnreadableError("does not contain the number of ranks; give --group-size N")
    kind = _nccl_kind(lines, name, op, factors, members)
    count = len(rows)
    return Observations(
        group=np.zeros(count, dtype=np.int64),
        kind=np.full(count, kind),
        ranks=np.full(count, members),
        bytes=np.array([size for size, _ in rows], dtype=np.int64),
        seconds=np.array([seconds for _, seconds in rows]),
        time_seconds=np.full(count, np.nan),
        groups=("",),
        in_order=False,
    )


def _nccl_kind(lines: list[str], name: str, op: str | None, factors: list[float], members: int) -> int:
    """The operation is in the output of new versions, in the command line or in the file name; an all-reduce is also
    recognisable by its bus bandwidth."""
    names = [op] if op else []
    names += [match[1] for line in lines if line.startswith("#") and (match := _NCCL_TEST.search(line))]
    names.append(name)
    for text in names:
        kind = kind_of_note(text)
        if kind is not None:
            return int(kind)
    reduced = float(bus_factor(np.array([CollectiveKind.ALL_REDUCE]), np.array([members]))[0])
    if factors and members > 2 and abs(float(np.median(factors)) - reduced) < 0.02:
        return int(CollectiveKind.ALL_REDUCE)
    raise UnreadableError("does not name the collective; give --op all_reduce (or another)")
