"""Reads the memory of the NCCL plugin. It is hostile input, like the probe's ring."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.verdicts.windows import MAX_COMMUNICATORS, Communicator, NcclOperation
from rankscope.daemon.steps.ring_reader import SEALS_NEEDED, RingError, dtype_of, seals_of
from rankscope.probe import nccl_layout

RECORD_DTYPE = dtype_of(nccl_layout.RECORD)
COMMUNICATOR_DTYPE = dtype_of(nccl_layout.COMMUNICATOR)

MAX_RECORDS = 1 << 53
MAX_OPERATIONS = 1 << 53
MAX_SEQUENCES = 1 << 32
MAX_RANKS = 10_000_000
NUMBER_MASK = (1 << 53) - 1  # so that it survives as a float
OTHER_FUNCTION = "operation"

Table: TypeAlias = npt.NDArray[np.void]


@dataclass(frozen=True)
class NcclMemory:
    memory_id: int
    owner_pid: int
    interface: int  # 0: NCCL has not loaded the plugin
    written: int
    lost: int
    is_listening: bool  # to operations, as of the last step
    communicators: Table


@dataclass(frozen=True)
class NcclRecords:
    table: Table  # by number; those that are being written or are gone are left out
    overwritten: int  # before they were read


def read_memory(fd: int) -> NcclMemory:
    """Check everything that holds for the whole memory; raises RingError."""
    if seals_of(fd) & SEALS_NEEDED != SEALS_NEEDED:
        raise RingError("unsealed", "the memory of the NCCL plugin is not sealed against resizing; ignored")
    size = os.fstat(fd).st_size
    if size != nccl_layout.MEMORY_BYTES:
        raise RingError("corrupt", f"the memory of the NCCL plugin is {size} bytes long")
    head = os.pread(fd, nccl_layout.HEADER_BYTES, 0)
    fixed = head[: nccl_layout.FIXED.size]
    magic, version, *sizes, owner_pid, memory_id = nccl_layout.FIXED.unpack(fixed)
    if magic != nccl_layout.MAGIC:
        raise RingError("corrupt", "the memory of the NCCL plugin begins with something else")
    if version != nccl_layout.VERSION:
        raise RingError("version", f"NCCL plugin of version {version}; this daemon reads {nccl_layout.VERSION}")
    if sizes != [nccl_layout.HEADER_BYTES, nccl_layout.RECORD.size, nccl_layout.CAPACITY]:
        raise RingError("corrupt", "the memory of the NCCL plugin has another layout")
    if nccl_layout.CHECKSUM.unpack_from(head, len(fixed))[0] != zlib.crc32(fixed):
        raise RingError("corrupt", "the checksum of the NCCL plugin's memory is wrong")
    written, lost = nccl_layout.COUNTERS.unpack_from(head, nccl_layout.COUNTERS_OFFSET)
    if written > MAX_RECORDS:
        raise RingError("corrupt", f"the NCCL plugin claims {written} records")
    (wanted,) = nccl_layout.WANTED.unpack_from(head, nccl_layout.WANTED_OFFSET)
    (interface,) = nccl_layout.WANTED.unpack_from(head, nccl_layout.INTERFACE_OFFSET)
    rows = np.frombuffer(head, COMMUNICATOR_DTYPE, nccl_layout.COMMUNICATORS, nccl_layout.COMMUNICATORS_OFFSET)
    good = (rows["hash"] != 0) & (rows["rank"] < rows["ranks"])
    is_listening = wanted & nccl_layout.WANT_OPERATIONS == nccl_layout.WANT_OPERATIONS
    return NcclMemory(memory_id, owner_pid, interface, written, lost, is_listening, rows[good])


def communicators(memory: NcclMemory) -> tuple[Communicator, ...]:
    """The state of those with more than one member, busy ones first, then by operations. While the plugin does not
    listen, only busy ones: the others may have issued operations that it did not see."""
    if not memory.interface:
        return ()
    found = [row for row in (_communicator(row, memory.lost) for row in memory.communicators) if row is not None]
    known = [row for row in found if row.is_busy or memory.is_listening]
    known.sort(key=lambda row: (not row.is_busy, -row.issued, row.number))
    return tuple(known[:MAX_COMMUNICATORS])


def _communicator(row: np.void, lost: int) -> Communicator | None:
    """None where it cannot be right."""
    size, position = int(row["ranks"]), int(row["rank"])
    issued, started, finished = (int(row[name]) for name in ("issued", "started", "finished"))
    lasts = [int(row[f"last_{name}"]) for name in ("issued", "started", "finished")]
    # A CUDA graph starts an operation more often than it is issued.
    is_right = 2 <= size <= MAX_RANKS and finished <= started and max(issued, started) <= MAX_OPERATIONS
    if not is_right or max(lasts) >> 8 >= MAX_SEQUENCES:
        return None
    if started - finished <= lost and lasts[1] == lasts[2]:
        finished = started  # it has ended as well: the plugin had no place to note it
    done = (issued, started, finished)
    last_issued, last_started, last_finished = map(_operation, lasts, done)
    number = int(row["hash"]) & NUMBER_MASK
    return Communicator(number, size, position, *done, last_issued, last_started, last_finished)


def _operation(word: int, count: int) -> NcclOperation | None:
    """The last of so many."""
    number, names = word & 0xFF, nccl_layout.FUNCTIONS
    function = names[number - 1] if 0 < number <= len(names) else OTHER_FUNCTION
    return NcclOperation(function, word >> 8) if count else None


def read_records(fd: int, after: int, written: int) -> NcclRecords:
    """Records `after` + 1 to `written`, or the last that are still there."""
    capacity = nccl_layout.CAPACITY
    first = max(after, written - capacity)
    wanted = np.arange(written - first, dtype=np.uint64) + np.uint64(first + 1)
    until_end = min(len(wanted), capacity - first % capacity)
    raw = _pread_slots(fd, first % capacity, until_end) + _pread_slots(fd, 0, len(wanted) - until_end)
    found = np.frombuffer(raw, RECORD_DTYPE)
    return NcclRecords(found[found["number"] == wanted[: len(found)]], first - after)


def _pread_slots(fd: int, slot: int, count: int) -> bytes:
    size = nccl_layout.RECORD.size
    return os.pread(fd, count * size, nccl_layout.HEADER_BYTES + slot * size) if count else b""
