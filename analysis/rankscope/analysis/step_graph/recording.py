"""Recordings: the raw records of steps and operations of a run's ranks, in one NumPy archive.

nccl_R        the records of rank R's operations, as the NCCL plugin writes them
comms_R       its communicators: hash, number of ranks, its own position
steps_R       the records of its steps, as the probe writes them
live_verdict  the verdict when the recording ended, in words"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Ints, join_rows, take_rows
from rankscope.analysis.step_graph.operations import KIND_OF_NCCL, MESSAGES, UNKNOWN, Group, Operations, since_issued

MAX_BYTES = 1 << 30
MAX_RANKS = 1 << 14
MAX_COMMUNICATORS = 1 << 12
_OPERATION_FIELDS = ("start_ns", "stop_ns", "issued_ns", "bytes", "communicator", "sequence", "peer", "function")
_STEP_FIELDS = ("sequence", "end_ns")
_VERDICT = "live_verdict"
MAX_VERDICT_CHARACTERS = 300

Table = npt.NDArray[Any]
_NO_STEPS: Table = np.zeros(0, dtype=[(name, np.uint64) for name in _STEP_FIELDS])
_NO_COMMUNICATORS: Table = np.zeros((0, 3), dtype=np.uint64)


class RecordingError(ValueError):
    """The file is not a recording. The message says what is missing."""


class Recording(NamedTuple):
    operations: Operations
    live_verdict: str  # empty if it was not known


class RecordedTables:
    """Gathers the tables of a run's ranks, part by part, and writes them."""

    def __init__(self) -> None:
        self.operations = 0
        self.size_bytes = 0
        self._parts: dict[str, list[Table]] = {}

    def add(self, rank: int, steps: Table | None, operations: Table | None, communicators: Table | None) -> None:
        """None where there are no new rows. Raises RecordingError for a table that cannot be right."""
        self._add("steps", rank, steps)
        self._add("nccl", rank, operations)
        self._add("comms", rank, communicators)
        self.operations += 0 if operations is None else len(operations)

    def _add(self, kind: str, rank: int, table: Table | None) -> None:
        if table is None:
            return
        if kind == "comms":
            _check_communicators(table, rank)
        else:
            _fields({kind: table}, kind, _STEP_FIELDS if kind == "steps" else _OPERATION_FIELDS)
        parts = self._parts.setdefault(f"{kind}_{rank}", [])
        if parts and parts[0].dtype != table.dtype:
            raise RecordingError(f"has other columns than before in `{kind}_{rank}`")
        if len(self._parts) > 3 * MAX_RANKS:
            raise RecordingError(f"has more than {MAX_RANKS:,} ranks")
        parts.append(table)
        self.size_bytes += table.nbytes

    @property
    def ranks(self) -> list[int]:
        """The ranks that have operations."""
        return sorted(int(name.removeprefix("nccl_")) for name in self._parts if name.startswith("nccl_"))

    def joined(self) -> dict[str, Table]:
        """The arrays of the file. Steps that end before the first operation are left out: a rank may hold the steps of
        an hour."""
        arrays: dict[str, Table] = {}
        for rank in self.ranks:
            operations = arrays[f"nccl_{rank}"] = np.concatenate(self._parts[f"nccl_{rank}"])
            steps = self._join(f"steps_{rank}", _NO_STEPS)
            arrays[f"steps_{rank}"] = steps[steps["end_ns"] >= operations["issued_ns"].min()]
            arrays[f"comms_{rank}"] = np.unique(self._join(f"comms_{rank}", _NO_COMMUNICATORS), axis=0)
        return arrays

    def _join(self, name: str, default: Table) -> Table:
        return np.concatenate(self._parts.get(name, [default]))


def write_recording(file: Path | IO[bytes], arrays: Mapping[str, Table], live_verdict: str = "") -> None:
    """Raises OSError."""
    named: dict[str, Any] = {**arrays, _VERDICT: np.array(live_verdict)}
    np.savez_compressed(file, **named)


def read_recording(file: Path | IO[bytes]) -> Recording:
    """Raises RecordingError, or OSError."""
    try:
        with zipfile.ZipFile(file) as archive:
            total = sum(info.file_size for info in archive.infolist())
        if total > MAX_BYTES:
            raise RecordingError(f"holds {total >> 20:,} MiB, more than {MAX_BYTES >> 20:,}")
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return Recording(_operations(arrays), _live_verdict(arrays))
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError("is not a recording of `nccl_R`, `comms_R` and `steps_R` in a NumPy archive") from error


def _live_verdict(arrays: Mapping[str, Table]) -> str:
    verdict = arrays.get(_VERDICT)
    is_text = verdict is not None and verdict.ndim == 0 and verdict.dtype.kind == "U"
    return str(verdict)[:MAX_VERDICT_CHARACTERS] if is_text else ""


def _operations(arrays: Mapping[str, Table]) -> Operations:
    ranks = sorted(int(found[1]) for found in map(re.compile(r"nccl_(\d{1,7})").fullmatch, arrays) if found)
    if not ranks:
        raise RecordingError("has no operations of NCCL: no array `nccl_R`")
    if len(ranks) > MAX_RANKS:
        raise RecordingError(f"has {len(ranks):,} ranks, more than {MAX_RANKS:,}")
    members: dict[int, dict[int, int]] = {}
    for rank in ranks:
        for low_hash, size, position in _communicators(arrays, rank):
            if 0 <= position < size:
                members.setdefault(low_hash, {})[position] = rank
    if not members:
        raise RecordingError("has no communicator with a valid size and position")
    names = sorted(members)
    groups = tuple(Group(f"{name:08x}", tuple(sorted(members[name].values()))) for name in names)
    operations = join_rows([_of_rank(arrays, rank, members, groups) for rank in ranks])
    return replace(operations, queued_ns=since_issued(operations.rank, operations.queued_ns))


def _communicators(arrays: Mapping[str, Table], rank: int) -> list[tuple[int, int, int]]:
    table = arrays.get(f"comms_{rank}")
    if table is None:
        raise RecordingError(f"has no communicators of rank {rank}: there is no array `comms_{rank}`")
    _check_communicators(table, rank)
    return [(row[0] & 0xFFFFFFFF, row[1], row[2]) for row in table.tolist()]


def _check_communicators(table: Table, rank: int) -> None:
    if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
        raise RecordingError(f"needs three columns of integers in `comms_{rank}`")
    if len(table) > MAX_COMMUNICATORS:
        raise RecordingError(f"has {len(table):,} communicators of rank {rank}, more than {MAX_COMMUNICATORS:,}")


def _of_rank(
    arrays: Mapping[str, Table],
    rank: int,
    members: Mapping[int, Mapping[int, int]],
    groups: tuple[Group, ...],
) -> Operations:
    records = _fields(arrays, f"nccl_{rank}", _OPERATION_FIELDS)
    fields = ("sequence", _end_field(arrays.get(f"steps_{rank}")))
    steps = _fields(arrays, f"steps_{rank}", fields)
    numbers, ends = steps["sequence"], np.maximum.accumulate(steps[fields[1]])
    column = np.searchsorted(ends, records["issued_ns"])
    step = np.append(numbers, numbers[-1:] + 1)[column] if len(numbers) else np.zeros(len(column), dtype=np.int64)
    kind = KIND_OF_NCCL[np.where(records["function"] < len(KIND_OF_NCCL), records["function"], 0)]
    is_message = np.isin(kind, MESSAGES)
    known = np.array(sorted(members), dtype=np.int64)
    group = np.minimum(np.searchsorted(known, records["communicator"]), len(known) - 1)
    is_known = known[group] == records["communicator"]
    peers = [
        members[name].get(position, UNKNOWN) if is_sent else UNKNOWN
        for name, position, is_sent in zip(known[group].tolist(), records["peer"].tolist(), is_message, strict=True)
    ]
    operations = Operations(
        rank=np.full(len(kind), rank, dtype=np.int64),
        step=step,
        group=group,
        kind=kind,
        sequence=np.where(is_message, UNKNOWN, records["sequence"]),
        peer=np.array(peers, dtype=np.int64),
        bytes=records["bytes"],
        start_ns=records["start_ns"],
        # Every operation takes some time.
        stop_ns=np.maximum(records["stop_ns"], records["start_ns"] + 1),
        queued_ns=records["start_ns"] - records["issued_ns"],
        groups=groups,
    )
    return take_rows(operations, np.flatnonzero(is_known)[np.argsort(records["issued_ns"][is_known], kind="stable")])


def _end_field(table: Table | None) -> str:
    """The host's end of a step, if it is recorded: a host may be several steps ahead of its device."""
    names = () if table is None else table.dtype.names or ()
    return "host_end_ns" if "host_end_ns" in names else "end_ns"


def _fields(arrays: Mapping[str, Table], name: str, wanted: tuple[str, ...]) -> dict[str, Ints]:
    table = arrays.get(name)
    missing = wanted if table is None else [field for field in wanted if field not in (table.dtype.names or ())]
    if table is None or missing:
        raise RecordingError(f"lacks {', '.join(missing)} in `{name}`")
    if table.ndim != 1 or any(table.dtype[field].kind not in "iu" for field in wanted):
        raise RecordingError(f"needs integers in `{name}`")
    return {field: table[field].astype(np.int64) for field in wanted}
