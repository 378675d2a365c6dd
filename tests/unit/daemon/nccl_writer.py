"""Writes the memory of the NCCL plugin in this process."""

from __future__ import annotations

import os

import numpy as np

from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, RECORD_DTYPE
from rankscope.probe import nccl_layout
from rankscope.probe.nccl_plugin import NcclPlugin
from tests.unit.daemon.ring_writer import MS

HASH = 0x1234_5678_9ABC


class NcclWriter:
    """The plugin's side, in this process."""

    def __init__(self) -> None:
        self.plugin = NcclPlugin()
        self.descriptor = self.plugin._make_memory()
        self._records = 0
        self.count()
        self.load()

    def count(self, ranks: int = 4, **counters: int) -> None:
        row = np.zeros(1, COMMUNICATOR_DTYPE)
        row["hash"], row["ranks"], row["rank"] = HASH, ranks, ranks // 2
        for name, value in counters.items():
            row[name] = value
        os.pwrite(self.descriptor, row.tobytes(), nccl_layout.COMMUNICATORS_OFFSET)

    def load(self, interface: int = 5) -> None:
        os.pwrite(self.descriptor, nccl_layout.WANTED.pack(interface), nccl_layout.INTERFACE_OFFSET)

    def collective(self, end_ns: int, milliseconds: float, issued_ns: int = 0) -> None:
        made = np.zeros(1, RECORD_DTYPE)
        slot = self._records % nccl_layout.CAPACITY
        self._records += 1
        made["number"], made["function"], made["communicator"] = self._records, 1, HASH & 0xFFFFFFFF
        made["issued_ns"] = issued_ns
        made["bytes"], made["algorithm"], made["protocol"] = 1_000_000, 1, 3
        made["start_ns"], made["stop_ns"], made["seen_ns"] = end_ns - int(milliseconds * MS), end_ns, end_ns
        os.pwrite(self.descriptor, made.tobytes(), nccl_layout.HEADER_BYTES + slot * nccl_layout.RECORD.size)
        counters = nccl_layout.COUNTERS.pack(self._records, 0)
        os.pwrite(self.descriptor, counters, nccl_layout.COUNTERS_OFFSET)

    def skip(self, operations: int) -> None:
        """As if so many were written between two looks, and are gone."""
        self._records += operations
