"""The operations of whole steps, for the critical path: NCCL's records of one rank, gathered until a step has all of
them. Only for jobs whose ranks have different roles, or exchange activations in every layer: where all ranks meet once
the gradients are there, sums show as much.

All ranks send the same steps without asking each other: what they choose follows from the number of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, join_rows, take_rows
from rankscope.analysis.step_graph.operations import KIND_OF_NCCL, MESSAGES, UNKNOWN, Operations
from rankscope.analysis.step_graph.window_operations import MAX_ROWS, RankOperations, Seat, pack
from rankscope.daemon.steps.nccl_reader import NUMBER_MASK, Table

# Rows of all ranks of a job in a window, and of one rank.
JOB_ROWS = 1 << 14
MIN_RANK_ROWS, MAX_RANK_ROWS = 1 << 7, 1 << 12
# Larger jobs were not tried: the operator looks at some replicas of them, and at the data groups of all ranks.
MAX_RANKS = 4096
MAX_HELD_ROWS = 4 * MAX_ROWS
MAX_STEPS_KNOWN = 1 << 12
# Steps are sent in blocks, as long as those in which NCCL is asked for its times.
BLOCK_STEPS = 8
# Layers of tensor parallel ranks make so many all-reduces of one size a step, forward and backward. Gradients are
# reduced in the backward pass only, so that a larger share of each step has none.
MIN_LAYER_CALLS = 16
MAX_FREE_RATIO = 0.2
# The same of work outside of operations: 0.2 to 0.45 on recordings of Megatron-LM, 0.5 and more where gradients are
# reduced, however much of the step they take.
MAX_FREE_WORK_RATIO = 0.45


@dataclass(frozen=True)
class Role:
    """A rank, and how its steps and times compare with those of others."""

    rank: int
    world_size: int
    step_numbers: Ints  # of the records of steps, the same on all ranks
    clock_ns: int  # the wall clock less the host's


@dataclass(frozen=True)
class StepEnds:
    """The last steps of a rank, by the number that is the same on all ranks."""

    number: Ints
    end_ns: Ints
    is_whole: Bools  # all operations of the step are recorded

    def followed_by(self, later: StepEnds) -> StepEnds:
        if len(self.number):
            later = take_rows(later, later.number > self.number[-1])
        return take_rows(join_rows([self, later]), slice(-MAX_STEPS_KNOWN, None))


@dataclass(frozen=True)
class TimedOperations:
    """Records of NCCL whose times are right. The GPU's clock is behind the host's."""

    records: Table
    communicator: Ints  # row of `communicators`
    stop_ns: Ints  # by the GPU's clock
    behind_host_ns: int
    communicators: Table

    @property
    def numbers(self) -> Ints:
        """Numbers of the communicators."""
        return np.asarray((self.communicators["hash"] & np.uint64(NUMBER_MASK)).astype(np.int64))


def _no_steps() -> StepEnds:
    return StepEnds(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_))


@dataclass(frozen=True)
class HeldOperations:
    """Operations whose steps may have more of them."""

    rows: Operations | None = None
    issued_ns: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    steps: StepEnds = field(default_factory=_no_steps)
    read: int = 0  # number of the last record
    sent: int = 0  # the last step that is over
    behind_host_ns: int = 0
    is_tensor_parallel: bool = False  # by the operations of an earlier window

    def advance(
        self, timed: TimedOperations, steps: StepEnds, role: Role
    ) -> tuple[RankOperations | None, HeldOperations]:
        """The operations of the steps that are whole now."""
        known_before = int(self.steps.number[-1]) if len(self.steps.number) else 0
        steps = self.steps.followed_by(steps)
        is_new = timed.records["number"] > self.read
        records = timed.records[is_new]
        if not len(records) and self.rows is None:
            return None, replace(self, steps=steps)
        new_rows, issued = _operations(timed, is_new, role.rank), records["issued_ns"].astype(np.int64)
        rows = new_rows if self.rows is None else join_rows([self.rows, new_rows])
        issued = np.concatenate([self.issued_ns, issued])
        if not len(steps.number):
            return None, replace(self, rows=rows, issued_ns=issued)
        column = np.searchsorted(steps.end_ns, issued)
        number = np.append(steps.number, steps.number[-1] + 1)[column]
        rows = replace(rows, step=number)
        # A step that gets no more in a whole window, once it is over, has all.
        newest = number[len(number) - len(records) :]
        over = min(known_before, int(newest.min(initial=known_before + 1)) - 1)
        chosen, over = self._choose(number, steps, over, role.world_size)
        later = number > over
        if np.count_nonzero(later) > MAX_HELD_ROWS:
            later[:-MAX_HELD_ROWS] = False
        read = int(records["number"].max(initial=self.read))
        behind_host_ns = timed.behind_host_ns if len(records) else self.behind_host_ns
        held = HeldOperations(
            take_rows(rows, later), issued[later], steps, read, over, behind_host_ns, self.is_tensor_parallel
        )
        if not chosen.any():
            return None, held
        order = np.argsort(issued[chosen], kind="stable")
        sent = take_rows(rows, np.flatnonzero(chosen)[order])
        return _packed(sent, timed, behind_host_ns + role.clock_ns), held

    def _choose(self, number: Ints, steps: StepEnds, over: int, world_size: int) -> tuple[Bools, int]:
        """The rows to send, and the last step that they settle."""
        is_over = (number > self.sent) & (number <= over)
        whole = steps.number[steps.is_whole]
        is_whole = is_over & np.isin(number, whole)
        budget = min(max(JOB_ROWS // max(world_size, 1), MIN_RANK_ROWS), MAX_RANK_ROWS)
        excess = np.count_nonzero(is_whole) / budget
        if excess > 1:
            # NCCL is asked in one block of so many; of these, one in so many is sent.
            whole_share = np.count_nonzero(steps.is_whole) / len(steps.number)
            every = 2 ** round(math.log2(1 / whole_share)) * 2 ** math.ceil(math.log2(excess))
            is_whole &= number // BLOCK_STEPS % every == 0
        chosen, sizes = np.unique(number[is_whole], return_counts=True)
        chosen, sizes = chosen[sizes <= MAX_ROWS], sizes[sizes <= MAX_ROWS]
        fits = np.cumsum(sizes) <= MAX_ROWS
        if not fits.all():
            over = int(chosen[fits][-1])
        return is_whole & np.isin(number, chosen[fits]), over


def _operations(timed: TimedOperations, wanted: Bools, rank: int) -> Operations:
    records = timed.records[wanted]
    start, issued = records["start_ns"].astype(np.int64), records["issued_ns"].astype(np.int64)
    kind = _kinds(records)
    is_message = np.isin(kind, MESSAGES)
    return Operations(
        rank=np.full(len(records), rank, dtype=np.int64),
        step=np.zeros(len(records), dtype=np.int64),
        group=timed.numbers[timed.communicator[wanted]],
        kind=kind,
        sequence=records["sequence"].astype(np.int64),
        peer=np.where(is_message, records["peer"].astype(np.int64), UNKNOWN),
        bytes=np.minimum(records["bytes"], 1 << 53).astype(np.int64),
        start_ns=start,
        stop_ns=timed.stop_ns[wanted],
        queued_ns=np.maximum(start + timed.behind_host_ns - issued, 0),
        groups=(),
    )


def have_roles(records: Table, communicators: Table, world_size: int) -> bool:
    """True if ranks send messages, or meet in groups that are smaller than the job."""
    if world_size > MAX_RANKS:
        return False
    is_message = np.isin(_kinds(records), MESSAGES)
    return bool(is_message.any() or ((communicators["ranks"] > 1) & (communicators["ranks"] < world_size)).any())


def is_tensor_parallel(records: Table, world_size: int, steps: int, step_ns: float) -> bool:
    """True if the ranks reduce activations in every layer, by the operations of so many steps: neither a large part of
    a step passes without, nor a large part of what the rank works outside of operations."""
    is_sum = _kinds(records) == CollectiveKind.ALL_REDUCE
    sums = records[is_sum]
    if not 1 < world_size <= MAX_RANKS or steps < 2 or len(sums) < MIN_LAYER_CALLS * steps:
        return False
    _, size, calls = np.unique(sums["bytes"], return_inverse=True, return_counts=True)
    if calls.max() < MIN_LAYER_CALLS * steps:
        return False
    chosen = np.flatnonzero(is_sum)[size == np.argmax(calls)]
    worked = _worked_ns(records)

    def longest(times: Ints) -> float:
        return float(np.median(np.sort(np.diff(np.sort(times[chosen])))[-steps:]))  # about one in each step

    starts = records["start_ns"].astype(np.int64)
    is_free = longest(starts) >= MAX_FREE_RATIO * step_ns
    return not is_free and longest(worked) < MAX_FREE_WORK_RATIO * float(worked.max()) / steps


def _worked_ns(records: Table) -> Ints:
    """Time in which no operation ran, until the start of each."""
    order = np.argsort(records["start_ns"], kind="stable")
    start = records["start_ns"][order].astype(np.int64)
    over = np.maximum.accumulate(np.maximum(records["stop_ns"][order].astype(np.int64), start))
    worked = np.zeros(len(records), dtype=np.int64)
    worked[order[1:]] = np.cumsum(np.maximum(start[1:] - over[:-1], 0))
    return worked


def _kinds(records: Table) -> Ints:
    function = records["function"].astype(np.int64)
    return np.asarray(KIND_OF_NCCL[np.where(function < len(KIND_OF_NCCL), function, 0)])


def _packed(rows: Operations, timed: TimedOperations, unix_less_gpu_ns: int) -> RankOperations | None:
    """Add the rank's seats in its communicators; None if none of these exists any more."""
    table = timed.communicators
    seats = dict(
        zip(timed.numbers.tolist(), zip(table["ranks"].tolist(), table["rank"].tolist(), strict=True), strict=True)
    )
    numbers = np.array(sorted(seats), dtype=np.int64)
    rows = take_rows(rows, np.isin(rows.group, numbers))
    if not len(rows):
        return None
    rows = replace(rows, group=np.searchsorted(numbers, rows.group))
    return pack(rows, [Seat(number, *seats[number]) for number in numbers.tolist()], unix_less_gpu_ns)
