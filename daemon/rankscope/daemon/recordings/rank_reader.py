"""New records of one rank since the last look, from the probe's ring and the NCCL plugin's memory. Both are hostile
input; records are sent on as they are, but for those that are not whole."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.daemon import procfs
from rankscope.daemon.blocking_reads import BlockedError
from rankscope.daemon.procfs import RingSearch
from rankscope.daemon.steps import nccl_reader, ring_reader
from rankscope.daemon.steps.ring_reader import RingError
from rankscope.probe import nccl_layout, ring_layout

Table = npt.NDArray[Any]

NO_PROBE = "no records of the probe: the rank is starting, or runs without it; start the job with `rankscope run`"
NO_NCCL = "NCCL has not loaded the plugin: the rank uses another backend, or has not communicated yet"
_NO_STEPS: Table = np.zeros(0, dtype=ring_reader.RECORD_DTYPE)


@dataclass(frozen=True)
class NewRecords:
    """Tables with the columns of the probe and the plugin."""

    steps: Table
    operations: Table
    communicators: Table  # hash, number of ranks, own position
    overwritten: int
    problem: str = ""  # why there are no operations

    @property
    def is_empty(self) -> bool:
        return not (len(self.steps) or len(self.operations) or self.overwritten)


class RankReader:
    """Starts with what the memories hold; reads what is new in each call of `read`."""

    def __init__(self, process: str, owner_pid: int) -> None:
        """`process` is the folder of a process in /proc, `owner_pid` its pid in its own namespace."""
        self._process = process
        self._owner_pid = owner_pid
        self._search = RingSearch(process)
        self._ring_id = self._memory_id = 0
        self._steps_read = self._operations_read = 0

    def read(self) -> NewRecords:
        try:
            return procfs.BLOCKING.call(self._process, self._read)
        except BlockedError:
            return _nothing("the process blocks those who read it")
        except RingError as error:
            return _nothing(str(error))
        except OSError as error:
            return _nothing(f"its memory cannot be read: {error.strerror or error}")

    def _read(self) -> NewRecords:
        ring = ring_reader.open_found(self._search, procfs.MAX_DESCRIPTORS)
        if ring is None:
            return _nothing(NO_PROBE)
        try:
            steps = self._new_steps(ring)
            facts = ring_reader.parse_facts(ring_reader.read_facts_text(ring) or b"{}")
        finally:
            os.close(ring)
        if facts.nccl_descriptor is None:
            return _nothing(facts.nccl_reason or NO_NCCL, steps)
        memory = ring_reader.open_memfd(f"{self._process}/fd/{facts.nccl_descriptor}")
        try:
            return self._with_operations(memory, steps)
        finally:
            os.close(memory)

    def _new_steps(self, ring: int) -> Table:
        header = ring_reader.read_header(ring)
        if header.owner_pid != self._owner_pid:
            raise RingError("owner", f"the ring belongs to pid {header.owner_pid}; ignored")
        if header.ring_id != self._ring_id or header.records < self._steps_read:
            self._ring_id, self._steps_read = header.ring_id, 0
        first = max(self._steps_read, header.records - ring_layout.CAPACITY) + 1
        self._steps_read = header.records
        if first > header.records:
            return _NO_STEPS
        records, is_whole = ring_reader.read_records(ring, first, header.records)
        return records[is_whole]

    def _with_operations(self, fd: int, steps: Table) -> NewRecords:
        memory = nccl_reader.read_memory(fd)
        if memory.owner_pid != self._owner_pid:
            raise RingError("owner", f"the memory of the NCCL plugin belongs to pid {memory.owner_pid}; ignored")
        if not memory.interface:
            return _nothing(NO_NCCL, steps)
        is_known = memory.memory_id == self._memory_id and self._operations_read <= memory.written
        first = self._operations_read if is_known else max(0, memory.written - nccl_layout.CAPACITY)
        self._memory_id, self._operations_read = memory.memory_id, memory.written
        records = nccl_reader.read_records(fd, first, memory.written)
        rows = memory.communicators
        members = np.stack([rows[name].astype(np.uint64) for name in ("hash", "ranks", "rank")], axis=1)
        return NewRecords(steps, records.table, members, records.overwritten)


def to_npy(table: Table) -> bytes:
    """The empty string for a table without rows."""
    if not len(table):
        return b""
    file = io.BytesIO()
    np.save(file, table, allow_pickle=False)
    return file.getvalue()


def _nothing(problem: str, steps: Table | None = None) -> NewRecords:
    operations = np.zeros(0, dtype=nccl_reader.RECORD_DTYPE)
    steps = _NO_STEPS if steps is None else steps
    return NewRecords(steps, operations, np.zeros((0, 3), dtype=np.uint64), 0, problem)
