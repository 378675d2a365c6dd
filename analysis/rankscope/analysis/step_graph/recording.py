"""Recordings: the raw records of steps and operations of a run's ranks, in one NumPy archive.

nccl_R    the records of rank R's operations, as the NCCL plugin writes them
comms_R   its communicators: hash, number of ranks, its own position
steps_R   the records of its steps, as the probe writes them"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Ints, join_rows, take_rows
from rankscope.analysis.step_graph.operations import KIND_OF_NCCL, MESSAGES, UNKNOWN, Group, Operations, since_issued

MAX_BYTES = 1 << 30
MAX_RANKS = 1 << 14
MAX_COMMUNICATORS = 1 << 12
_OPERATION_FIELDS = ("start_ns", "stop_ns", "issued_ns", "bytes", "communicator", "sequence", "peer", "function")
_STEP_FIELDS = ("sequence", "end_ns")


class RecordingError(ValueError):
    """The file is not a recording. The message says what is missing."""


def read_recording(file: Path | BinaryIO) -> Operations:
    """Raises RecordingError, or OSError."""
    try:
        with zipfile.ZipFile(file) as archive:
            total = sum(info.file_size for info in archive.infolist())
        if total > MAX_BYTES:
            raise RecordingError(f"holds {total >> 20:,} MiB, more than {MAX_BYTES >> 20:,}")
        with np.load(file, allow_pickle=False) as archive:
            return _operations({name: archive[name] for name in archive.files})
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError("is not a recording of `nccl_R`, `comms_R` and `steps_R` in a NumPy archive") from error


def _operations(arrays: Mapping[str, npt.NDArray[Any]]) -> Operations:
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


def _communicators(arrays: Mapping[str, npt.NDArray[Any]], rank: int) -> list[tuple[int, int, int]]:
    table = arrays.get(f"comms_{rank}")
    if table is None or table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
        raise RecordingError(f"has no communicators of rank {rank}: `comms_{rank}` needs three columns of integers")
    if len(table) > MAX_COMMUNICATORS:
        raise RecordingError(f"has {len(table):,} communicators of rank {rank}, more than {MAX_COMMUNICATORS:,}")
    return [(row[0] & 0xFFFFFFFF, row[1], row[2]) for row in table.tolist()]


def _of_rank(
    arrays: Mapping[str, npt.NDArray[Any]],
    rank: int,
    members: Mapping[int, Mapping[int, int]],
    groups: tuple[Group, ...],
) -> Operations:
    records = _fields(arrays, f"nccl_{rank}", _OPERATION_FIELDS)
    steps = _fields(arrays, f"steps_{rank}", _STEP_FIELDS)
    numbers, ends = steps["sequence"], np.maximum.accumulate(steps["end_ns"])
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


def _fields(arrays: Mapping[str, npt.NDArray[Any]], name: str, wanted: tuple[str, ...]) -> dict[str, Ints]:
    table = arrays.get(name)
    missing = wanted if table is None else [field for field in wanted if field not in (table.dtype.names or ())]
    if table is None or missing:
        raise RecordingError(f"lacks {', '.join(missing)} in `{name}`")
    if table.ndim != 1 or any(table.dtype[field].kind not in "iu" for field in wanted):
        raise RecordingError(f"needs integers in `{name}`")
    return {field: table[field].astype(np.int64) for field in wanted}
