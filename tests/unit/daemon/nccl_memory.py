"""The memory of NCCL's plugin with made records: operations of a rank by its GPU's clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, RECORD_DTYPE
from rankscope.probe import nccl_layout
from rankscope.probe.nccl_plugin import NcclPlugin

MS, SECOND = 1_000_000, 1_000_000_000
# Groups of all four ranks and of two.
WORLD, HALF = 0x1234_5678_9ABC, 0x4321_0000_0001
GPU_AHEAD_NS = 3600 * SECOND
# Start, stop and issue by the host's clock, bytes, group, sequence, function.
Row: TypeAlias = tuple[int, int, int, int, int, int, int]


class Memory:
    """The plugin's memory, of this process."""

    def __init__(self, has_halves: bool = True) -> None:
        self._plugin = NcclPlugin()
        self.descriptor = self._plugin._make_memory()
        self._written = 0
        groups = np.zeros(2, COMMUNICATOR_DTYPE)
        groups["hash"], groups["ranks"], groups["rank"] = (WORLD, HALF), (4, 2), (2, 1)
        os.pwrite(self.descriptor, groups[: 1 + has_halves].tobytes(), nccl_layout.COMMUNICATORS_OFFSET)
        os.pwrite(self.descriptor, nccl_layout.WANTED.pack(5), nccl_layout.INTERFACE_OFFSET)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def write(self, rows: Sequence[Row]) -> None:
        table = np.zeros(len(rows), RECORD_DTYPE)
        start, stop, issued, moved, group, sequence, function = np.array(rows, dtype=np.int64).reshape(-1, 7).T
        table["number"] = self._written + 1 + np.arange(len(rows))
        table["start_ns"], table["stop_ns"] = start + GPU_AHEAD_NS, stop + GPU_AHEAD_NS
        table["issued_ns"], table["seen_ns"] = issued, stop
        table["bytes"], table["communicator"], table["sequence"] = moved, group & 0xFFFFFFFF, sequence
        table["function"], table["peer"] = function, -1
        slot = self._written % nccl_layout.CAPACITY
        self._written += len(rows)
        while len(table):
            part, table = table[: nccl_layout.CAPACITY - slot], table[nccl_layout.CAPACITY - slot :]
            os.pwrite(self.descriptor, part.tobytes(), nccl_layout.HEADER_BYTES + slot * nccl_layout.RECORD.size)
            slot = 0
        os.pwrite(self.descriptor, nccl_layout.COUNTERS.pack(self._written, 0), nccl_layout.COUNTERS_OFFSET)
