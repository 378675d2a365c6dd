"""Steps of a rank whose loop marks none: no optimizer steps, so the probe has no ring. Where NCCL's plugin records the
operations, their period is the step (operation_period.py), and steps get records like those of the probe's ring."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.analysis.stats.long_steps import find_long
from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.verdicts.figures import MAX_STEP_SECONDS
from rankscope.daemon.samples import Column, ProbeFacts, StepSample
from rankscope.daemon.steps import long_steps, nccl_reader, step_columns
from rankscope.daemon.steps.host_pace import HostSteps
from rankscope.daemon.steps.long_steps import RecentSteps
from rankscope.daemon.steps.nccl_reader import NcclMemory, NcclRecords, Table
from rankscope.daemon.steps.nccl_times import MAX_CLOCK_NS, NcclProgress, Operations, operations, times_and_operations
from rankscope.daemon.steps.operation_period import Meetings, Period, find_period
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE, Records, RingError, open_memfd
from rankscope.daemon.steps.step_operations import Role
from rankscope.probe import nccl_layout, ring_layout

# A period counts once it has been the same in so many looks, and for as long: a start-up that loads and broadcasts a
# model repeats itself too.
MIN_LOOKS = 3
MIN_SECONDS = 20.0
# Noise may hide it. After so many looks without it, the loop is another.
MAX_LOOKS_WITHOUT = 5
# A loop without a period is looked at ever less often: a look at the whole memory takes 10 to 30 ms.
MAX_PAUSE = 15
# What is known is looked for in the last steps and what is new.
CONTEXT_STEPS = 16
# Of an operation; the training process writes it.
MAX_BYTES = 1 << 40


@dataclass(frozen=True)
class PeriodProgress:
    """What is known of a rank's period, from look to look."""

    memory_id: int = 0
    shape: tuple[int, ...] = ()
    since_ns: int = 0  # the end of the first step that was seen
    looks: int = 0  # with a period of this shape
    looks_without: int = 0  # since then
    pause: int = 0  # looks to leave out
    number: int = 0  # of the last step that was handed on
    last_end_ns: int | None = None  # of that step, by the host's clock
    context: int = 0  # the number of the record with which the next look begins
    recent: RecentSteps = field(default_factory=RecentSteps)
    host: HostSteps = field(default_factory=HostSteps)
    nccl: NcclProgress = field(default_factory=NcclProgress)

    @property
    def is_known(self) -> bool:
        return self.last_end_ns is not None

    def after_look(self, look: _Look) -> PeriodProgress:
        if look.shape and look.shape == self.shape:
            return replace(self, looks=self.looks + 1, looks_without=0)
        if self.looks_without < MAX_LOOKS_WITHOUT and (self.is_known or not look.shape):
            return replace(self, looks_without=self.looks_without + 1)
        if not look.shape:
            without = self.looks_without + 1
            pause = min(without // MAX_LOOKS_WITHOUT, MAX_PAUSE)
            return PeriodProgress(self.memory_id, looks_without=without, pause=pause)
        return PeriodProgress(self.memory_id, look.shape, int(look.timed.stop_ns[look.ends[0]]), looks=1)


def read_unmarked_steps(
    link: str, owner_pid: int, before: PeriodProgress, role: Role, since_unix_nanos: int
) -> tuple[StepSample | None, PeriodProgress]:
    """The steps since the last look, at first those that ended since that time; None while no steps are known. Raises
    OSError or RingError if the memory behind a link in /proc cannot be read or cannot be right."""
    if before.pause:
        return None, replace(before, pause=before.pause - 1)
    fd = open_memfd(link)
    try:
        memory = nccl_reader.read_memory(fd)
        if memory.owner_pid != owner_pid:
            raise RingError("owner", f"the memory of the NCCL plugin belongs to pid {memory.owner_pid}; ignored")
        if not memory.interface:
            return None, before
        if before.memory_id != memory.memory_id:
            before = PeriodProgress(memory.memory_id)
        look = _look(fd, memory, before.context, role.world_size)
        if before.is_known and look.shape != before.shape:
            look = _look(fd, memory, 0, role.world_size)
    finally:
        os.close(fd)
    progress = before.after_look(look)
    if look.period is None or look.shape != progress.shape:
        return _without_new_steps(progress, memory, role), progress
    last_ns = int(look.timed.stop_ns[look.ends[-1]])
    if not progress.is_known and (progress.looks < MIN_LOOKS or last_ns - progress.since_ns < MIN_SECONDS * 1e9):
        return None, progress
    steps, numbers = _step_records(look, look.period.numbers)
    is_new = numbers > progress.number
    if not progress.is_known:
        is_new &= steps["end_ns"] + role.clock_ns >= since_unix_nanos
    # A record of no length begins the first step.
    first = max(int(is_new.argmax()) - 1, 0) if is_new.any() else len(steps) - 1
    steps, numbers = steps[first:], numbers[first:]
    steps["span_ns"][0], steps["flags"][0] = 0, ring_layout.FLAG_DEVICE
    return _sample(steps, numbers, look, memory, progress, role)


@dataclass(frozen=True)
class _Look:
    records: NcclRecords
    timed: Operations
    ends: Ints  # rows of `timed` that end steps
    period: Period | None

    @property
    def shape(self) -> tuple[int, ...]:
        return () if self.period is None else self.period.shape


def _look(fd: int, memory: NcclMemory, after: int, world_size: int) -> _Look:
    """At the records after that number, as far as they are still there."""
    records = nccl_reader.read_records(fd, max(after, memory.written - nccl_layout.CAPACITY), memory.written)
    timed = operations(records.table, memory.communicators)
    order, period = _period(timed, records.table, memory.communicators, world_size)
    return _Look(records, timed, order[:0] if period is None else order[period.ends], period)


def _sample(
    steps: Records,
    numbers: Ints,
    look: _Look,
    memory: NcclMemory,
    before: PeriodProgress,
    role: Role,
) -> tuple[StepSample, PeriodProgress]:
    """Of the steps after the first record."""
    new = steps[1:]
    step_seconds = new["span_ns"] * 1e-9
    is_long = find_long(before.recent.step_seconds, step_seconds)
    role = replace(role, step_numbers=numbers)
    later = look.timed.take(look.timed.stop_ns > steps["end_ns"][0])
    nccl, nccl_progress = times_and_operations(
        later, look.records, memory.communicators, before.nccl, steps, np.append(False, is_long), role
    )
    is_whole = np.ones(len(new), dtype=np.bool_)
    rows = step_columns.columns(new, is_whole, is_whole, None if nccl.seconds is None else nccl.seconds[1:])
    unknown = np.full(len(new), np.nan)
    wait_seconds = unknown if nccl.wait_seconds is None else nccl.wait_seconds[1:]
    host = before.host
    if before.is_known:  # the first steps may be unlike the others
        ones = np.ones(len(new))
        host = host.followed_by(rows.host_seconds, step_seconds, rows.run_ahead_seconds, ones)
    end_ns = int(steps["end_ns"][-1])
    sample = StepSample(
        **vars(rows),
        steps_total=int(numbers[-1]),
        steps_lost=max(0, int(numbers[0]) - before.number) if before.is_known else 0,
        last_step_unix_nanos=end_ns + role.clock_ns,
        facts=ProbeFacts(),
        figures=host.pace(),
        groups=nccl.groups,
        collectives=nccl.collectives,
        long_steps=long_steps.sum_up(
            is_long, before.recent, step_seconds, wait_seconds, rows.checkpoint_seconds, rows.run_ahead_seconds
        ),
        communicators=nccl_reader.communicators(memory),
        operations=nccl.operations,
    )
    return sample, replace(
        before,
        number=int(numbers[-1]),
        last_end_ns=end_ns,
        context=int(look.timed.number[look.ends[-CONTEXT_STEPS:][0]]),
        recent=before.recent.followed_by(step_seconds, wait_seconds, unknown),
        host=host,
        nccl=nccl_progress,
    )


def _without_new_steps(progress: PeriodProgress, memory: NcclMemory, role: Role) -> StepSample | None:
    """Noise hides the period, or the loop has ended."""
    if progress.last_end_ns is None:
        return None
    nothing = np.zeros(0, RECORD_DTYPE)
    none = np.zeros(0, dtype=np.bool_)
    return StepSample(
        **vars(step_columns.columns(nothing, none, none)),
        steps_total=progress.number,
        steps_lost=0,
        last_step_unix_nanos=progress.last_end_ns + role.clock_ns,
        facts=ProbeFacts(),
        communicators=nccl_reader.communicators(memory),
    )


def _step_records(look: _Look, numbers: Ints) -> tuple[Records, Ints]:
    """A record for each operation that ends a step, as the probe writes them on a GPU."""
    timed, ends = look.timed, look.ends
    issued = _issued_ns(timed, look.records.table)
    host_end, end = np.maximum.accumulate(issued[ends]), np.maximum.accumulate(timed.stop_ns[ends])
    span = np.diff(end, prepend=end[:1])
    is_good = (span > 0) & (span <= MAX_STEP_SECONDS * 1e9) & (np.diff(numbers, prepend=numbers[:1] - 1) > 0)
    is_good[0] = True
    steps = np.zeros(len(ends), RECORD_DTYPE)
    for name in ring_layout.SECONDS:
        steps[name] = np.nan
    steps["sequence"], steps["end_ns"], steps["host_end_ns"], steps["span_ns"] = numbers, end, host_end, span
    steps["host_seconds"] = np.minimum(np.diff(host_end, prepend=host_end[:1]) * 1e-9, MAX_STEP_SECONDS)
    steps["run_ahead_seconds"] = _run_ahead_seconds(timed, issued, host_end)
    steps["flags"], steps["steps"] = ring_layout.FLAG_DEVICE | ring_layout.FLAG_NCCL, 1
    return steps[is_good], numbers[is_good]


def _run_ahead_seconds(timed: Operations, issued_ns: Ints, host_end_ns: Ints) -> Column:
    """By step, the longest time from the issue of an operation to its start."""
    step = np.searchsorted(host_end_ns, issued_ns)
    is_known = step < len(host_end_ns)
    lead = np.clip((timed.start_ns - issued_ns) * 1e-9, 0.0, MAX_STEP_SECONDS)
    ahead = np.zeros(len(host_end_ns))
    np.maximum.at(ahead, step[is_known], lead[is_known])
    return ahead


def _issued_ns(timed: Operations, table: Table) -> Ints:
    issued: Ints = np.minimum(table["issued_ns"][timed.record], MAX_CLOCK_NS).astype(np.int64)
    return issued


def _period(timed: Operations, table: Table, communicators: Table, world_size: int) -> tuple[Ints, Period | None]:
    """The rows of the operations in which all ranks meet, as they were issued, and their period."""
    meets = (communicators["ranks"] == world_size)[timed.communicator] & ~timed.is_message
    order = np.argsort(_issued_ns(timed, table), kind="stable")
    others = np.cumsum(~meets[order])
    rows, others = order[meets[order]], others[meets[order]]
    if world_size < 2 or not len(rows):
        return rows, None
    chosen = table[timed.record[rows]]
    meetings = Meetings(
        communicator=chosen["communicator"].astype(np.int64),
        function=chosen["function"].astype(np.int64),
        bytes=np.minimum(chosen["bytes"], MAX_BYTES).astype(np.int64),
        sequence=chosen["sequence"].astype(np.int64),
        start_ns=timed.start_ns[rows],
        stop_ns=timed.stop_ns[rows],
        others=others,
    )
    return rows, find_period(meetings)
