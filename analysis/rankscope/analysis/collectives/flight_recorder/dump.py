"""Dumps of torch's flight recorder as columns: pickles and JSON of layout 2.x, which torch 2.4 and later write.

The dumps come from training processes and are not trusted: they are read with limits, and what is kept is a few numbers
per record. Texts are interned in a `Catalog` that all dumps of a job share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.collectives.flight_recorder.catalog import MAX_RANKS, Catalog, DumpError, text_of
from rankscope.analysis.collectives.flight_recorder.plain_pickle import PlainPickleError, load_plain
from rankscope.analysis.profiles.frames import is_library
from rankscope.analysis.stats.robust import Bools, Ints

MAX_DUMP_BYTES = 64 << 20
_MAX_FRAMES = 256
# Sizes and types of tensors and frames of stacks, over all records of a dump; and what a record counts for at least.
_MAX_PARTS = 20_000_000
_RECORD_PARTS = 50
_LAYOUT = re.compile(r"(\d{1,4})\.(\d{1,4})")
# Records of these have no events to ask: they are retired when they finish or fail, and never become "completed".
_WITHOUT_EVENTS = frozenset({"gloo", "mpi", "ucc"})
_NEXT = (
    "give files that torch wrote (TORCH_FR_DUMP_TEMP_FILE, _dump_fr_trace, _dump_nccl_trace or their _json variants)"
)


class State(IntEnum):
    PENDING = 0  # entered, not finished
    ENDED = 1  # finished or failed: the backend does not say which
    COMPLETED = 2


@dataclass(frozen=True)
class Dump:
    """One rank's records, in the order in which they were made."""

    layout: str  # "2.10"
    rank: int | None  # None: the file's name says it
    groups: tuple[int, ...]  # that the rank has used; numbers of the catalog
    mentioned: tuple[int, ...]  # ranks of a group whose name the dump does not say
    group: Ints
    sequence: Ints  # among the point-to-point operations or among the collectives of its group
    is_p2p: Bools
    operation: Ints
    line: Ints  # −1: no stack was recorded
    state: Ints
    is_gapless: bool  # nothing is missing between the first record and the last
    is_from_start: bool  # and nothing before the first
    has_records: bool  # False: it was written without collectives

    def __len__(self) -> int:
        return len(self.group)


def read_dump(data: bytes, catalog: Catalog) -> Dump:
    """Raises DumpError, for any bytes."""
    return read_content(load_dump(data), catalog)


def load_dump(data: bytes) -> dict[str, Any]:
    """What the dump says, unchecked. Raises DumpError, for any bytes."""
    if len(data) > MAX_DUMP_BYTES:
        raise DumpError(f"it is larger than {MAX_DUMP_BYTES >> 20} MiB; dump without stacks, or with fewer records")
    content = _load(data)
    if not isinstance(content, dict) or "version" not in content:
        raise DumpError(f"it is not a dump of a flight recorder; {_NEXT}")
    return content


def read_content(content: dict[str, Any], catalog: Catalog) -> Dump:
    """Raises DumpError, for any content."""
    layout = _layout(content["version"])
    groups, mentioned = _groups(content.get("pg_config"), catalog)
    entries = content.get("entries")
    # JSON dumps leave out an empty list. Without a status of any group there was nothing to record.
    has_records = isinstance(entries, list) or not content.get("pg_status")
    reader = _Reader(catalog, groups)
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        try:
            reader.add(entry)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            raise DumpError(f"its record {number} is not what torch writes; {_NEXT}") from None
    rank = content.get("rank")
    is_rank = type(rank) is int and 0 <= rank < MAX_RANKS
    has_records = has_records and not _hides_completed(content)
    return reader.dump(layout, rank if is_rank else None, mentioned, has_records)


def renumber(dump: Dump, numbers: tuple[Ints, Ints, Ints]) -> Dump:
    """For another catalog, which has adopted that of the dump."""
    groups, operations, lines = numbers
    return replace(
        dump,
        groups=tuple(groups[list(dump.groups)].tolist()),
        group=groups[dump.group],
        operation=operations[dump.operation],
        line=lines[dump.line],
    )


def _load(data: bytes) -> Any:
    if data[:64].lstrip()[:1] == b"{":
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise DumpError(f"it is damaged or cut off; {_NEXT}") from None
    try:
        return load_plain(data)
    except PlainPickleError as error:
        raise DumpError(f"refused: {error}; {_NEXT}") from None


def _layout(value: Any) -> str:
    match = _LAYOUT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise DumpError(f"it is not a dump of a flight recorder; {_NEXT}")
    if int(match[1]) < 2:
        raise DumpError(
            f"layout {value} is of torch before 2.4, which numbers collectives differently; use torch ≥ 2.4"
        )
    if int(match[1]) > 2:
        raise DumpError(f"layout {value} is newer than this Rankscope (2.x); update Rankscope")
    return match[0]


def _hides_completed(content: dict[str, Any]) -> bool:
    """An empty list although collectives were enqueued: only those in flight were dumped."""
    status = content.get("pg_status")
    return content.get("entries") == [] and isinstance(status, dict) and bool(status)


def _groups(config: Any, catalog: Catalog) -> tuple[dict[str, int], tuple[int, ...]]:
    """Numbers of the groups that the dump describes, by name; and the ranks of the one that has no name."""
    found: dict[str, int] = {}
    mentioned: tuple[int, ...] = ()
    for name, described in config.items() if isinstance(config, dict) else ():
        members = catalog.members(described.get("ranks")) if isinstance(described, dict) else None
        # gloo writes one description without a name, of the group that was made last.
        if not name:
            mentioned = members or ()
        elif members:
            description = described.get("desc")
            text = text_of(description) if isinstance(description, str) else ""
            found[name] = catalog.number_of_group(text_of(name), text, members)
    return found, mentioned


class _Reader:
    """The records of one dump."""

    def __init__(self, catalog: Catalog, groups: dict[str, int]) -> None:
        self._catalog = catalog
        self._described = groups
        self._groups: dict[tuple[str, str], int] = {}
        self._lines: dict[int, int | None] = {}  # by identity of a frame, which lives as long as the dump is read
        self._parts = 0
        self._rows: list[tuple[int, int, bool, int, int, int]] = []
        self._record_ids: list[int] = []

    def add(self, entry: dict[str, Any]) -> None:
        get = entry.get
        name: str = entry["profiling_name"]
        inputs, outputs = entry["input_sizes"], entry["output_sizes"]
        input_types, output_types = get("input_dtypes") or (), get("output_dtypes") or ()
        frames = (get("frames") or ())[:_MAX_FRAMES]
        # A small file can refer to one large list many times.
        self._parts += _RECORD_PARTS + len(frames) + len(input_types) + len(output_types) + len(inputs) + len(outputs)
        if self._parts <= _MAX_PARTS:
            self._parts += sum(map(len, inputs)) + sum(map(len, outputs))
        if self._parts > _MAX_PARTS:
            raise DumpError("its records are too large or too many; dump with a smaller TORCH_FR_BUFFER_SIZE")
        key = (name, tuple(map(tuple, inputs)), tuple(input_types), tuple(map(tuple, outputs)), tuple(output_types))
        is_p2p = bool(get("is_p2p", ":send " in name or ":recv " in name))
        sequence, number = entry["p2p_seq_id" if is_p2p else "collective_seq_id"], entry["record_id"]
        if type(sequence) is not int or type(number) is not int:
            raise TypeError
        if get("state") == "completed":
            state = State.COMPLETED
        elif get("retired") is True and name.partition(":")[0] in _WITHOUT_EVENTS:
            state = State.ENDED
        else:
            state = State.PENDING
        operation = self._catalog.number_of_operation(key)
        self._rows.append((self._group(entry), sequence, is_p2p, operation, self._line(frames), state))
        self._record_ids.append(number)

    def _group(self, entry: dict[str, Any]) -> int:
        name, description = entry["process_group"]
        number = self._groups.get((name, description))
        if number is None:
            number = self._described.get(name)
            if number is None:
                number = self._catalog.number_of_group(text_of(name), text_of(description), None)
            self._groups[name, description] = number
        return number

    def _line(self, frames: Sequence[dict[str, Any]]) -> int:
        """The most recent line of the user's code; −1 if no stack was recorded."""
        for frame in frames:
            number = self._lines.get(id(frame), -1)
            if number == -1:
                number = self._user_line(frame)
            if number is not None:
                return number
        return self._catalog.number_of_line(_place(frames[0])) if frames else -1

    def _user_line(self, frame: dict[str, Any]) -> int | None:
        file = frame["filename"]
        is_users = file.endswith(".py") and not is_library(file) and "torch/distributed/" not in file
        self._lines[id(frame)] = number = self._catalog.number_of_line(_place(frame)) if is_users else None
        return number

    def dump(self, layout: str, rank: int | None, mentioned: tuple[int, ...], has_records: bool) -> Dump:
        try:
            rows = np.array(self._rows, dtype=np.int64).reshape(-1, 6)
            ids = np.array(self._record_ids, dtype=np.int64)
        except OverflowError:
            raise DumpError(f"its records are not numbered as torch does it; {_NEXT}") from None
        is_gapless = bool((np.diff(ids) == 1).all()) and has_records
        return Dump(
            layout=layout,
            rank=rank,
            groups=tuple(dict.fromkeys([*self._described.values(), *self._groups.values()])),
            mentioned=mentioned,
            group=rows[:, 0],
            sequence=rows[:, 1],
            is_p2p=rows[:, 2].astype(bool),
            operation=rows[:, 3],
            line=rows[:, 4],
            state=rows[:, 5],
            is_gapless=is_gapless,
            is_from_start=is_gapless and (not len(ids) or int(ids[0]) == 0),
            has_records=has_records,
        )


def _place(frame: dict[str, Any]) -> str:
    line = frame["line"]
    if type(line) is not int:
        raise TypeError
    return f"{text_of(frame['name'])} ({text_of(PurePosixPath(frame['filename']).name)}:{line})"
