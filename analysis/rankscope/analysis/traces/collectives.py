"""The collectives of one rank as columns: what ran, in which group, how many bytes, when, and how much of it nothing
hid."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import ProcessGroup


@dataclass(frozen=True)
class Collectives:
    """One row per communication, sorted by start. -1 is "not known" in every integer column."""

    kind: Ints  # a CollectiveKind
    group: Ints  # index into groups
    sequence: Ints  # the profiler's number where it noted one for the whole group and kind; else the order of calls
    start_ns: Ints
    duration_ns: Ints
    bytes: Ints  # of the whole array, as nccl-tests counts
    group_size: Ints
    exposed_ns: Ints  # of the duration, not covered by any compute kernel (on a CPU trace: by any operator)
    kernel_row: Ints  # of Trace; -1 where it ran on the host, or left no kernel
    call_row: Ints  # of Trace: the host's annotation or note
    calls: Ints  # how many host calls this one kernel served; more than 1: NCCL grouped them
    stream: Ints
    peer: Ints  # of a point-to-point transfer
    sequence_noted: Bools  # by the profiler, so that it is the same number on every rank
    measured: Bools  # False: only the host's call was seen, so its duration says nothing about the transfer
    groups: tuple[ProcessGroup, ...]  # name "" where the trace names none: then one per stream

    def __len__(self) -> int:
        return len(self.kind)
