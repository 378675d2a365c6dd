"""How long a rank's GPU was inside collectives, by communicator and by step, from the records of the NCCL plugin.

A GPU's timer is its own. The operations tie it to the host's clock: each was found to be over when it was, or a little
later."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.step_graph.window_operations import RankOperations
from rankscope.analysis.verdicts.figures import MAX_STEP_SECONDS
from rankscope.analysis.verdicts.windows import Communicator
from rankscope.daemon.samples import CollectiveRate, GroupSpan
from rankscope.daemon.steps import nccl_reader
from rankscope.daemon.steps.long_steps import Mask, with_neighbours
from rankscope.daemon.steps.nccl_bandwidth import collective_rates
from rankscope.daemon.steps.nccl_reader import NUMBER_MASK, NcclMemory, NcclRecords, Table
from rankscope.daemon.steps.ring_reader import Records, RingError, open_memfd
from rankscope.daemon.steps.step_operations import (
    HeldOperations,
    Role,
    StepEnds,
    TimedOperations,
    have_roles,
    is_tensor_parallel,
)
from rankscope.probe import nccl_layout, ring_layout

Nanos: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]

MAX_CLOCK_NS = 1 << 62
_MESSAGES = [nccl_layout.FUNCTIONS.index(name) + 1 for name in ("SendRecv", "Send", "Recv")]


@dataclass(frozen=True)
class NcclProgress:
    """How far the memory has been read. `read` is None before the first time."""

    memory_id: int = 0
    read: int | None = None
    held: HeldOperations = field(default_factory=HeldOperations, compare=False)


@dataclass(frozen=True)
class NcclTimes:
    """Nothing where NCCL told nothing."""

    seconds: Seconds | None = None  # in collectives, per record of steps
    wait_seconds: Seconds | None = None  # in collectives and messages
    groups: tuple[GroupSpan, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
    communicators: tuple[Communicator, ...] = ()  # as they are now, whether or not a step ended
    operations: RankOperations | None = None  # of steps that are whole now


def read_nccl(
    link: str,
    owner_pid: int,
    before: NcclProgress,
    steps: Records,
    is_long: Mask | None = None,
    role: Role | None = None,
) -> tuple[NcclTimes, NcclProgress]:
    """The times of these steps and the communicators, from the memory behind a link in /proc. Raises OSError or
    RingError if that cannot be read or cannot be right."""
    fd = open_memfd(link)
    try:
        memory = nccl_reader.read_memory(fd)
        if memory.owner_pid != owner_pid:
            raise RingError("owner", f"the memory of the NCCL plugin belongs to pid {memory.owner_pid}; ignored")
        times_of_steps, progress = _read_times(fd, memory, before, steps, is_long, role)
    finally:
        os.close(fd)
    return replace(times_of_steps, communicators=nccl_reader.communicators(memory)), progress


def _read_times(
    fd: int, memory: NcclMemory, before: NcclProgress, steps: Records, is_long: Mask | None, role: Role | None
) -> tuple[NcclTimes, NcclProgress]:
    if not memory.interface:
        return NcclTimes(), before
    if before.read is None or before.memory_id != memory.memory_id or before.read > memory.written:
        # What is there belongs to steps before these.
        return NcclTimes(), NcclProgress(memory.memory_id, memory.written)
    if not len(steps):
        return NcclTimes(), before
    records = nccl_reader.read_records(fd, before.read, memory.written)
    timed_rows = operations(records.table, memory.communicators)
    return times_and_operations(timed_rows, records, memory.communicators, before, steps, is_long, role)


def times_and_operations(
    timed_rows: Operations,
    records: NcclRecords,
    communicators: Table,
    before: NcclProgress,
    steps: Records,
    is_long: Mask | None,
    role: Role | None,
) -> tuple[NcclTimes, NcclProgress]:
    """The times of these steps and, where ranks have different roles, their operations."""
    times_of_steps, progress = _times_of(timed_rows, records, communicators, before, steps, is_long)
    if role is None:
        return times_of_steps, progress
    is_whole = ((steps["flags"] & ring_layout.FLAG_NCCL) != 0) & (steps["steps"] == 1)
    held = before.held
    if not have_roles(records.table, communicators, role.world_size):
        whole, step_ns = int(is_whole.sum()), float(np.median(steps["span_ns"]))
        if not held.is_tensor_parallel and not is_tensor_parallel(records.table, role.world_size, whole, step_ns):
            return times_of_steps, progress
        held = replace(held, is_tensor_parallel=True)
    timed = _timed(timed_rows, records.table, communicators)
    # A host may issue the operations of steps that its device begins much later.
    ends = StepEnds(role.step_numbers, np.maximum.accumulate(steps["host_end_ns"]), is_whole)
    rows, held = held.advance(timed, ends, role)
    return replace(times_of_steps, operations=rows), replace(progress, held=held)


def _timed(found: Operations, records: Table, communicators: Table) -> TimedOperations:
    chosen = records[found.record]
    behind_host = found.start_ns - chosen["start_ns"].astype(np.int64)
    return TimedOperations(
        chosen,
        found.communicator,
        found.stop_ns - behind_host,
        int(behind_host.min(initial=MAX_CLOCK_NS)),
        communicators,
    )


def times(
    records: NcclRecords, communicators: Table, before: NcclProgress, steps: Records, is_long: Mask | None = None
) -> tuple[NcclTimes, NcclProgress]:
    """Of the steps of which all operations are known; by communicator, of those that are not long."""
    found = operations(records.table, communicators)
    return _times_of(found, records, communicators, before, steps, is_long)


def _times_of(
    found: Operations,
    records: NcclRecords,
    communicators: Table,
    before: NcclProgress,
    steps: Records,
    is_long: Mask | None,
) -> tuple[NcclTimes, NcclProgress]:
    ends = np.maximum.accumulate(steps["end_ns"])
    known = (steps["flags"] & ring_layout.FLAG_NCCL) != 0
    over = until(found, int(ends[-1]))
    found = found.take(slice(over))
    if not over:
        return NcclTimes(), before
    progress = replace(before, read=int(found.number[-1]))
    if not known.any():
        return NcclTimes(), progress
    # Where some were overwritten, those that are left stand for all.
    share = len(records.table) / (len(records.table) + records.overwritten)
    rates = collective_rates(found, records.table, communicators, steps, known, share)
    if records.overwritten:
        groups = group_spans(found, communicators, steps, known, share)
        return NcclTimes(groups=groups, collectives=rates), progress
    usual = known
    if is_long is not None:
        far = known & ~with_neighbours(is_long)
        usual = far if far.any() else known & ~is_long
    groups = group_spans(found, communicators, steps, usual, share)
    in_collectives, waited = (
        np.where(known, seconds_by_step(some, ends), np.nan) for some in (found.take(~found.is_message), found)
    )
    return NcclTimes(in_collectives, waited, groups, rates), progress


@dataclass(frozen=True)
class Operations:
    """Of all communicators, in the order of their numbers."""

    number: npt.NDArray[np.uint64]
    record: npt.NDArray[np.int64]  # its row
    communicator: npt.NDArray[np.int64]  # its row
    is_message: npt.NDArray[np.bool_]
    start_ns: Nanos  # of the host's clock
    stop_ns: Nanos

    def take(self, rows: object) -> Operations:
        return Operations(*(column[rows] for column in vars(self).values()))


def operations(records: Table, communicators: Table) -> Operations:
    """Those of known communicators that have a length."""
    low = (communicators["hash"] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    order = np.argsort(low, kind="stable")
    place = np.searchsorted(low[order], records["communicator"])
    clocks = np.stack([records[name] for name in ("start_ns", "stop_ns", "seen_ns")])
    is_known = (clocks < MAX_CLOCK_NS).all(axis=0) & np.isin(records["communicator"], low)
    record = np.flatnonzero(is_known)
    records, row = records[is_known], order[place[is_known]]
    start, stop, seen = (records[name].astype(np.int64) for name in ("start_ns", "stop_ns", "seen_ns"))
    # NCCL may read a stop time before the GPU has written it, and finds that of an older operation.
    is_right = (stop >= start) & (start > 0)
    ahead = np.full(len(communicators), MAX_CLOCK_NS)
    np.minimum.at(ahead, row[is_right], (seen - stop)[is_right])
    is_tied = np.abs(ahead[row]) < MAX_CLOCK_NS
    stop = np.where(is_right | ~is_tied, stop, seen - ahead[row])
    is_good = is_tied & (start > 0) & (stop >= start) & (stop - start <= MAX_STEP_SECONDS * 1e9)
    is_message = np.isin(records["function"], _MESSAGES)
    made = Operations(records["number"], record, row, is_message, start + ahead[row], stop + ahead[row])
    return made.take(is_good)


def until(found: Operations, end_ns: int) -> int:
    """How many of the first ended by then. What follows belongs to a step that is not over."""
    late = np.flatnonzero(found.stop_ns > end_ns)
    return int(late[0]) if len(late) else len(found.stop_ns)


def seconds_by_step(found: Operations, ends_ns: Nanos) -> Seconds:
    """Time in which any of the operations ran, by the step in which it ended. They overlap where they were issued
    together; and one that seems to begin before the last one of its communicator was over did not."""
    order = np.argsort(found.start_ns, kind="stable")
    start, stop = found.start_ns[order], found.stop_ns[order]
    over = np.maximum.accumulate(stop)
    begin = np.maximum(start[1:], over[:-1])
    lasted = np.concatenate([stop[:1] - start[:1], np.maximum(stop[1:] - begin, 0)])
    step = np.minimum(np.searchsorted(ends_ns, stop), len(ends_ns) - 1)
    return np.bincount(step, weights=lasted * 1e-9, minlength=len(ends_ns)).astype(np.float64)


def group_spans(
    found: Operations, communicators: Table, steps: Records, known: npt.NDArray[np.bool_], share: float
) -> tuple[GroupSpan, ...]:
    """A span per communicator and kind, of those with the most operations: they are the same on all members. `share` of
    the operations in the `known` steps is there."""
    ends = np.maximum.accumulate(steps["end_ns"])
    count = int(steps["steps"][known].sum())
    if not count:
        return ()
    step_seconds = float(steps["span_ns"][known].sum()) * 1e-9 / count
    spans: list[tuple[int, GroupSpan]] = []
    kinds = {ring_layout.GROUP_NCCL: ~found.is_message, ring_layout.GROUP_POINT_TO_POINT: found.is_message}
    for kind, of_kind in kinds.items():
        counts = np.bincount(found.communicator[of_kind], minlength=len(communicators))
        for row in np.flatnonzero(counts).tolist():
            seconds = seconds_by_step(found.take(of_kind & (found.communicator == row)), ends)[known].sum() / count
            who = communicators[row]
            number, size, position = int(who["hash"]) & NUMBER_MASK, int(who["ranks"]), int(who["rank"])
            lasted = min(float(seconds) / share, max(float(seconds), step_seconds))
            span = GroupSpan(number, size, position, kind, count, lasted, step_seconds)
            spans.append((-int(counts[row]), span))
    spans.sort(key=lambda counted: (counted[0], counted[1].number, counted[1].kind))
    return tuple(span for _, span in spans[: ring_layout.MAX_GROUPS])
