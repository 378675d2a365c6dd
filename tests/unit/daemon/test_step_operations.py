"""Operations of whole steps, as a rank sends them for the critical path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.window_operations import MAX_ROWS, RankOperations, join
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, RECORD_DTYPE, Table
from rankscope.daemon.steps.step_operations import (
    BLOCK_STEPS,
    MAX_RANKS,
    MIN_RANK_ROWS,
    HeldOperations,
    Role,
    StepEnds,
    TimedOperations,
    have_roles,
    is_tensor_parallel,
)
from rankscope.probe import nccl_layout

MS = 1_000_000
BEHIND, CLOCK = 3_000 * MS, 5_000 * MS  # the GPU's clock of the host's, and that of the wall clock
STEP_MS = 10
PAIR, WORLD = 0xAAAA_0000_0000_0001, 0xBBBB_0000_0000_0002
ALL_REDUCE, RECV = (nccl_layout.FUNCTIONS.index(name) + 1 for name in ("AllReduce", "Recv"))
COMMUNICATORS = np.zeros(2, COMMUNICATOR_DTYPE)
COMMUNICATORS["hash"], COMMUNICATORS["ranks"], COMMUNICATORS["rank"] = (PAIR, WORLD), (2, 4), (1, 3)


class Rank:
    """Makes records of steps of 10 ms, and reads them in windows. Step 1 begins at 0."""

    def __init__(self, world_size: int = 4, operations: int = 3) -> None:
        self.world_size, self.operations = world_size, operations
        self.held = HeldOperations()
        self.records = 0

    def made(self, steps: Sequence[int]) -> Table:
        made = np.zeros(len(steps) * self.operations, RECORD_DTYPE)
        numbers = np.repeat(steps, self.operations)
        place = np.tile(np.arange(self.operations), len(steps))
        issued = (numbers - 1) * STEP_MS * MS + (place + 1) * STEP_MS * MS // (self.operations + 1)
        made["number"] = np.arange(self.records, self.records + len(made)) + 1
        self.records += len(made)
        made["issued_ns"] = issued
        made["start_ns"], made["stop_ns"] = issued - BEHIND + 10_000_000_000, issued - BEHIND + 10_000_000_000 + MS
        made["function"] = np.where(place % 2, RECV, ALL_REDUCE)
        made["peer"], made["sequence"], made["bytes"] = 0, numbers * 100 + place, 4096
        return made

    def read(self, steps: Sequence[int], records: Table, whole: bool = True) -> Operations | None:
        sent = self.send(steps, records, whole)
        return None if sent is None else join([sent])

    def send(self, steps: Sequence[int], records: Table, whole: bool = True) -> RankOperations | None:
        number = np.array(steps, dtype=np.int64)
        ends = StepEnds(number, number * STEP_MS * MS, np.full(len(number), whole))
        timed = TimedOperations(
            records,
            np.zeros(len(records), dtype=np.int64),
            records["stop_ns"].astype(np.int64),
            BEHIND - 10_000_000_000,
            COMMUNICATORS,
        )
        sent, self.held = self.held.advance(timed, ends, Role(3, self.world_size, number, CLOCK))
        return sent


def test_a_step_is_sent_once_it_is_whole() -> None:
    rank = Rank()
    assert rank.read([1, 2, 3], rank.made([1, 2, 3])) is None
    sent = rank.read([4, 5], rank.made([4, 5]))
    assert sent is not None
    assert sent.step.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sent.kind[:3].tolist() == [CollectiveKind.ALL_REDUCE, CollectiveKind.RECV, CollectiveKind.ALL_REDUCE]
    assert sent.start_ns[0] == STEP_MS * MS // 4 + CLOCK, "on the wall clock"
    again = rank.read([6], rank.made([6]))
    assert again is not None and set(again.step.tolist()) == {4, 5}


def test_an_operation_that_ends_late_is_waited_for() -> None:
    """The host is a step ahead of its device."""
    rank = Rank()
    records = rank.made([1, 2])
    assert rank.read([1, 2], records[:5]) is None
    sent = rank.read([3], np.concatenate([records[5:], rank.made([3])]))
    assert sent is not None and sent.step.tolist() == [1, 1, 1]
    sent = rank.read([4], rank.made([4]))
    assert sent is not None and sent.step.tolist() == [2, 2, 2, 3, 3, 3]


def test_steps_of_which_operations_are_missing_are_left_out() -> None:
    rank = Rank()
    rank.read([1, 2], rank.made([1, 2]), whole=False)
    sent = rank.read([3], rank.made([3]))
    assert sent is None
    sent = rank.read([4], rank.made([4]))
    assert sent is not None and set(sent.step.tolist()) == {3}


def test_ranks_of_a_large_job_send_the_same_steps() -> None:
    """The ranks have different numbers of operations, and their windows end in different steps."""
    chosen = []
    for operations, length in ((30, 64), (50, 61)):
        rank = Rank(world_size=1024, operations=operations)
        steps: set[int] = set()
        for first in range(1, 20 * length, length):
            window = range(first, first + length)
            sent = rank.read(window, rank.made(window))
            if sent is not None:
                steps |= set(sent.step.tolist())
                assert len(sent) <= 8 * MIN_RANK_ROWS
        chosen.append(steps)
    common = chosen[0] & chosen[1]
    assert len(common) >= 2 * BLOCK_STEPS and {step // BLOCK_STEPS for step in common}
    assert max(map(len, chosen)) * 50 / 20 <= 2 * MIN_RANK_ROWS, "and no more than the job may send"


def test_a_window_is_bounded_and_the_rest_follows() -> None:
    rank = Rank(operations=MAX_ROWS // 2)
    rank.read([1, 2, 3], rank.made([1, 2, 3]))
    sent = rank.read([4], rank.made([4]))
    assert sent is not None and len(sent) <= MAX_ROWS
    later = rank.read([5], rank.made([5]))
    assert later is None or len(later) <= MAX_ROWS


@pytest.mark.parametrize(
    ("function", "sizes", "expected"), [(ALL_REDUCE, (4, 4), False), (ALL_REDUCE, (2, 4), True), (RECV, (4, 4), True)]
)
def test_only_jobs_with_roles_send_operations(function: int, sizes: tuple[int, int], expected: bool) -> None:
    records = np.zeros(1, RECORD_DTYPE)
    records["function"] = function
    communicators = COMMUNICATORS.copy()
    communicators["ranks"] = sizes
    assert have_roles(records, communicators, 4) is expected
    assert not have_roles(records, communicators, 2 * MAX_RANKS)


def reductions(calls: int, begins: float, busy: float = 0.5, size: int = 1 << 21, steps: int = 4) -> Table:
    """All-reduces of one size in steps of 10 ms, from a share of the step on. They fill a share of the rest."""
    place = begins + (1 - begins) * np.arange(calls) / calls
    records = np.zeros(steps * calls, RECORD_DTYPE)
    records["function"], records["bytes"] = ALL_REDUCE, size
    records["start_ns"] = ((np.arange(steps)[:, None] + place) * STEP_MS * MS).ravel()
    records["stop_ns"] = records["start_ns"] + int(busy * (1 - begins) / calls * STEP_MS * MS)
    return records


@pytest.mark.parametrize(
    ("calls", "begins", "busy", "expected"),
    [
        (32, 0.0, 0.5, True),
        (200, 0.0, 0.9, True),
        (4, 0.0, 0.5, False),  # too few for layers
        (200, 0.4, 0.5, False),  # gradients: none in the forward pass
        (24, 0.15, 0.97, False),  # the same, in a step that is nearly all communication
    ],
)
def test_tensor_parallel_ranks_reduce_in_every_layer(calls: int, begins: float, busy: float, expected: bool) -> None:
    assert is_tensor_parallel(reductions(calls, begins, busy), 4, 4, STEP_MS * MS) is expected


def test_no_operations_are_those_of_no_tensor_parallel_rank() -> None:
    records = reductions(32, 0.0)
    assert not is_tensor_parallel(records[:0], 4, 4, STEP_MS * MS)
    assert not is_tensor_parallel(records, 4, 1, STEP_MS * MS), "one step shows no gap between steps"
    assert not is_tensor_parallel(records, 1, 4, STEP_MS * MS)
    assert not is_tensor_parallel(records, 2 * MAX_RANKS, 4, STEP_MS * MS)
    records["bytes"] += np.arange(len(records), dtype=np.uint64)
    assert not is_tensor_parallel(records, 4, 4, STEP_MS * MS), "buckets of gradients differ in size"


def test_a_step_that_is_known_is_not_added_again() -> None:
    """A rank without a ring hands over the step before, which begins the next one, as one that is not whole."""
    known = StepEnds(np.array([7, 8]), np.array([70, 80]), np.array([True, True]))
    steps = known.followed_by(StepEnds(np.array([8, 9]), np.array([80, 90]), np.array([False, True])))
    assert steps.number.tolist() == [7, 8, 9] and steps.is_whole.all()
