"""The state of communicators, from memory of the NCCL plugin to the stall that a daemon reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.windows import MAX_COMMUNICATORS, Communicator, NcclOperation, Stall
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, NcclMemory, communicators
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.operator.correlation.columns import stall_of
from rankscope.probe import nccl_layout
from tests.unit.daemon import window_makers as make

HASH = 0xAAAA_1234_5678_9ABC
ALL_REDUCE, ALL_GATHER = nccl_layout.FUNCTIONS.index("AllReduce") + 1, nccl_layout.FUNCTIONS.index("AllGather") + 1
BUSY = {"hash": HASH, "ranks": 4, "rank": 2, "issued": 9, "started": 6, "finished": 5} | {
    "last_issued": 4714 << 8 | ALL_GATHER,
    "last_started": 4711 << 8 | ALL_REDUCE,
    "last_finished": 4710 << 8 | ALL_REDUCE,
}
IDLE = BUSY | {"hash": 7, "finished": 6, "last_finished": BUSY["last_started"]}
READ = Communicator(
    HASH & (1 << 53) - 1,
    *(4, 2, 9, 6, 5),
    *(NcclOperation("AllGather", 4714), NcclOperation("AllReduce", 4711), NcclOperation("AllReduce", 4710)),
)
RANK = make.rank(1)


def memory(*rows: dict[str, int], interface: int = 5, lost: int = 0, is_listening: bool = True) -> NcclMemory:
    table = np.zeros(len(rows), COMMUNICATOR_DTYPE)
    for place, row in enumerate(rows):
        for name, value in row.items():
            table[name][place] = value
    return NcclMemory(3, os.getpid(), interface, 0, lost, is_listening, table)


def test_a_row_is_read_with_its_operations() -> None:
    assert communicators(memory(BUSY)) == (READ,)
    assert communicators(memory(BUSY, interface=0)) == ()


def test_busy_communicators_come_first_and_few_are_kept() -> None:
    rows = [IDLE | {"hash": number, "issued": 100 + number} for number in range(1, 12)]
    found = communicators(memory(*rows, BUSY))
    assert [row.number for row in found] == [READ.number, 11, 10, 9, 8, 7, 6, 5]
    assert len(found) == MAX_COMMUNICATORS


def test_a_plugin_that_does_not_listen_knows_only_busy_ones() -> None:
    assert communicators(memory(BUSY, IDLE, is_listening=False)) == (READ,)


def test_a_graph_may_start_more_than_was_issued() -> None:
    (found,) = communicators(memory(BUSY | {"issued": 1, "started": 1000, "finished": 999}))
    assert found.is_busy


def test_an_end_that_found_no_place_is_no_wait() -> None:
    same = BUSY | {"last_finished": BUSY["last_started"]}
    assert communicators(memory(same))[0].is_busy
    assert not communicators(memory(same, lost=1))[0].is_busy
    assert communicators(memory(BUSY, lost=1))[0].is_busy, "it is in another one than it left"


@pytest.mark.parametrize(
    "forged",
    [
        {"finished": 7},
        {"started": (1 << 53) + 1},
        {"issued": (1 << 64) - 1},
        {"last_issued": (1 << 64) - 1},
        {"last_finished": 1 << 40},
        {"ranks": (1 << 32) - 1},
        {"ranks": 1, "rank": 0},
    ],
)
def test_rows_that_cannot_be_right_are_dropped(forged: dict[str, int]) -> None:
    assert [row.number for row in communicators(memory(BUSY | forged, IDLE))] == [7]


@pytest.mark.parametrize("number", [0, len(nccl_layout.FUNCTIONS) + 1, 255])
def test_functions_outside_of_the_table_have_no_name(number: int) -> None:
    (found,) = communicators(memory(BUSY | {"last_started": 5 << 8 | number}))
    assert found.last_started == NcclOperation("operation", 5)


def samples(*rows: Communicator, steps: tuple[float, ...] = ()) -> RankSamples:
    made = make.steps(*steps, steps_total=40, last_step_unix_nanos=make.START)
    return RankSamples(steps=replace(made, communicators=rows))


def stalls(*windows: RankSamples) -> Iterator[Stall | None]:
    """As the operator reads them."""
    watch = StallWatch(None)
    for index, seen in enumerate(windows):
        span = make.span(index)
        stall = watch.observe(RANK, seen, span)
        yield stall_of(assemble(RANK, "node", span, 1, seen, lambda _: None, stall))


def test_a_stall_tells_how_long_an_operation_lasts() -> None:
    moved = replace(READ, issued=12)  # the host runs ahead
    done = samples(READ, steps=(0.1, 0.1))
    *_, before, last = stalls(done, samples(READ), samples(moved), samples(moved, replace(READ, number=5)))
    assert before is not None and before.communicators == (replace(moved, unchanged_seconds=4.0),)
    assert last is not None
    assert [row.unchanged_seconds for row in last.communicators] == [6.0, 0.0]


def test_an_operation_that_ends_starts_the_time_anew() -> None:
    after = replace(READ, started=7, finished=6)
    *_, last = stalls(samples(READ, steps=(0.1,)), samples(READ), samples(after))
    assert last is not None and [row.unchanged_seconds for row in last.communicators] == [0.0]


def test_windows_with_steps_carry_no_communicators() -> None:
    span, seen = make.span(0), samples(READ, steps=(0.1, 0.1))
    window = assemble(RANK, "node", span, 1, seen, lambda _: None, StallWatch(None).observe(RANK, seen, span))
    assert not window.HasField("stall")
    assert b"AllReduce" not in window.SerializeToString()


def test_a_communicator_without_operations_arrives_as_such() -> None:
    fresh = Communicator(5, 4, 2, 0, 0, 0)
    *_, last = stalls(samples(fresh, steps=(0.1,)), samples(fresh), samples(fresh))
    assert last is not None and last.communicators == (replace(fresh, unchanged_seconds=4.0),)
