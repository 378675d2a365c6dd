"""A recorder of what NCCL and the probe write on all ranks of a job, for `rankscope analyze recording`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.daemon.procfs import RingSearch
from rankscope.daemon.steps import nccl_reader, ring_reader
from rankscope.daemon.steps.ring_reader import RingError
from rankscope.probe import ring_layout

# A recording covers these times before and after the fault, or less if it is too large.
SECONDS_BEFORE, SECONDS_AFTER = 20.0, 25.0
MAX_OPERATIONS, MAX_RECORDING_BYTES = 60_000, 1_500_000

Table = npt.NDArray[Any]


class Recorder:
    """Reads the NCCL memories and the rings of all ranks now and then, as the daemon does, and keeps what is new."""

    def __init__(self) -> None:
        self.problems: dict[int, str] = {}
        self.overwritten = 0  # before they were read
        self._processes: dict[int, str] = {}
        self._searches: dict[int, RingSearch] = {}
        self._read: dict[tuple[int, str], int] = {}
        self._records: dict[tuple[int, str], list[Table]] = {}
        self._communicators: dict[int, set[tuple[int, int, int]]] = {}

    def follow(self, pids: Sequence[int]) -> None:
        self._processes = {rank: f"/proc/{pid}" for rank, pid in enumerate(pids)}
        self._searches = {rank: RingSearch(process) for rank, process in self._processes.items()}

    @property
    def is_following(self) -> bool:
        return bool(self._processes)

    def sample(self) -> None:
        for rank in self._processes:
            try:
                self._sample(rank)
            except (OSError, RingError) as error:
                self.problems[rank] = f"{type(error).__name__}: {error}"

    def _sample(self, rank: int) -> None:
        ring = ring_reader.open_found(self._searches[rank])
        if ring is None:
            return
        try:
            descriptor = ring_reader.parse_facts(ring_reader.read_facts_text(ring) or b"{}").nccl_descriptor
            self._read_steps(rank, ring)
        finally:
            os.close(ring)
        if descriptor is None:
            return
        memory = ring_reader.open_memfd(f"{self._processes[rank]}/fd/{descriptor}")
        try:
            self._read_operations(rank, memory)
        finally:
            os.close(memory)

    def _read_steps(self, rank: int, ring: int) -> None:
        written, before = ring_reader.read_header(ring).records, self._read.get((rank, "steps"), 0)
        before = max(before, written - ring_layout.CAPACITY)
        if written > before:
            records, is_whole = ring_reader.read_records(ring, before + 1, written)
            self._keep(rank, "steps", records[is_whole], written)

    def _read_operations(self, rank: int, fd: int) -> None:
        memory, before = nccl_reader.read_memory(fd), self._read.get((rank, "nccl"), 0)
        rows = memory.communicators[["hash", "ranks", "rank"]].tolist()
        self._communicators.setdefault(rank, set()).update(rows)
        if memory.written > before:
            records = nccl_reader.read_records(fd, before, memory.written)
            self.overwritten += records.overwritten
            self._keep(rank, "nccl", records.table, memory.written)

    def _keep(self, rank: int, name: str, table: Table, written: int) -> None:
        self._records.setdefault((rank, name), []).append(table.copy())
        self._read[rank, name] = written

    def write(self, path: Path, middle_ns: int | None) -> dict[str, Any]:
        """Write what lies around a moment, or around the middle of all steps; return what it holds."""
        tables = {key: np.concatenate(parts) for key, parts in self._records.items()}
        ranks = sorted(rank for rank, name in tables if name == "nccl")
        if not ranks:
            return {"problems": self.problems, "operations": 0}
        operations, middle = MAX_OPERATIONS, middle_ns or _middle(tables)
        while True:
            arrays: dict[str, Any] = self._around(tables, ranks, middle, operations)
            np.savez_compressed(path, **arrays)
            size = path.stat().st_size
            if size <= MAX_RECORDING_BYTES:
                break
            operations = int(sum(len(arrays[f"nccl_{rank}"]) for rank in ranks) * 0.9 * MAX_RECORDING_BYTES / size)
        kept = [arrays[f"nccl_{rank}"]["issued_ns"].astype(np.int64) - middle for rank in ranks]
        return {
            "bytes": size,
            "operations": sum(map(len, kept)),
            "operations_seen": sum(len(tables[rank, "nccl"]) for rank in ranks),
            "overwritten": self.overwritten,
            "seconds": [round(float(least) / 1e9, 2) for least in _bounds(kept)],
            "problems": self.problems,
        }

    def _around(
        self, tables: dict[tuple[int, str], Table], ranks: Sequence[int], middle: int, most: int
    ) -> dict[str, Table]:
        """Select the operations of all ranks that are nearest to a moment, at most so many."""
        times = {
            key: table["issued_ns" if key[1] == "nccl" else "end_ns"].astype(np.int64) - middle
            for key, table in tables.items()
        }
        issued = np.concatenate([times[rank, "nccl"] for rank in ranks])
        # 1 is the bound on either side.
        distance = np.where(issued < 0, -issued / SECONDS_BEFORE, issued / SECONDS_AFTER) / 1e9
        reach = min(1.0, float(np.partition(distance, most)[most])) if len(distance) > most else 1.0
        first, last = -reach * SECONDS_BEFORE * 1e9, reach * SECONDS_AFTER * 1e9
        arrays: dict[str, Table] = {}
        for rank in ranks:
            for name in ("nccl", "steps"):
                if (rank, name) in tables:
                    when = times[rank, name]
                    arrays[f"{name}_{rank}"] = tables[rank, name][(when >= first) & (when < last)]
            rows = sorted(self._communicators.get(rank, ()))
            arrays[f"comms_{rank}"] = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        return arrays


def _middle(tables: dict[tuple[int, str], Table]) -> int:
    first, last = _bounds([table["end_ns"] for (_, name), table in tables.items() if name == "steps"])
    return int(first + last) // 2


def _bounds(columns: Sequence[Table]) -> tuple[int, int]:
    filled = [column for column in columns if len(column)]
    return min((int(column.min()) for column in filled), default=0), max(
        (int(column.max()) for column in filled), default=0
    )
