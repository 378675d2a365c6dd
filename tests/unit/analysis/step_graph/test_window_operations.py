"""Operations as windows carry them: packed by the daemon of a rank, joined over ranks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.window_operations import MAX_ROWS, ROW, Seat, join, pack
from tests.support.step_programs import Layout, packed, play

JOB = play(Layout(tensor=2, pipeline=2, steps=6))
CLOCK_NS = 1_700_000_000_000_000_000


PARTS = [packed(take_rows(JOB, JOB.rank == rank), rank, unix_ns=CLOCK_NS) for rank in JOB.ranks]


def test_what_is_packed_is_joined_again() -> None:
    joined = join(PARTS)
    for name in ("rank", "step", "kind", "peer", "bytes", "queued_ns"):
        assert np.array_equal(getattr(joined, name), getattr(JOB, name)), name
    assert np.array_equal(joined.start_ns, JOB.start_ns + CLOCK_NS)
    assert np.array_equal(joined.stop_ns, JOB.stop_ns + CLOCK_NS)
    is_collective = JOB.kind == CollectiveKind.ALL_REDUCE
    assert np.array_equal(joined.sequence[is_collective], JOB.sequence[is_collective])
    members = [joined.groups[group].ranks for group in joined.group.tolist()]
    assert members == [JOB.groups[group].ranks for group in JOB.group.tolist()]


def test_an_operation_takes_28_bytes() -> None:
    assert ROW.itemsize == 28
    assert sum(len(part.rows) for part in PARTS) == 28 * len(JOB)


def test_long_stretches_are_packed_in_coarser_ticks() -> None:
    rows = take_rows(JOB, (JOB.rank == 0) & (JOB.kind == CollectiveKind.ALL_REDUCE))
    late = replace(rows, start_ns=rows.start_ns * 1000, stop_ns=rows.stop_ns * 1000)
    part = pack(replace(late, group=0 * rows.group), [Seat(1, 2, 0)], 0)
    joined = join([part])
    assert part.tick_ns > 1
    assert np.abs(joined.start_ns - late.start_ns).max() < part.tick_ns


BROKEN: list[dict[str, Any]] = [
    {"first_step": 1 << 60},
    {"start_ns": 1 << 62},
    {"tick_ns": 0},
    {"tick_ns": 1 << 31},
    {"unix_less_gpu_ns": -(1 << 62)},
    {"rows": b"x" * (ROW.itemsize + 1)},
    {"rows": bytes(ROW.itemsize * (MAX_ROWS + 1))},
    {"rank": 1 << 40},
    {"seats": (Seat(0, 2, 2),)},
    {"seats": (Seat(1 << 63, 2, 0),)},
]


@pytest.mark.parametrize("broken", BROKEN, ids=[" ".join(broken) for broken in BROKEN])
def test_a_part_that_cannot_be_right_is_left_out(broken: dict[str, Any]) -> None:
    joined = join([PARTS[0], PARTS[1]._replace(**broken)])
    assert joined.ranks == [0]


def test_rows_of_unknown_groups_are_left_out() -> None:
    assert len(join([PARTS[0]._replace(seats=())])) == 0


@settings(max_examples=60, deadline=None)
@given(
    noise=st.binary(min_size=ROW.itemsize, max_size=40 * ROW.itemsize),
    seats=st.lists(st.builds(Seat, *[st.integers(0, (1 << 64) - 1)] * 3), max_size=4),
    step=st.integers(0, 1 << 53),
    place=st.integers(0, 3),
)
def test_hostile_rows_break_nothing(noise: bytes, seats: list[Seat], step: int, place: int) -> None:
    rows = noise[: len(noise) // ROW.itemsize * ROW.itemsize]
    forged = PARTS[place]._replace(rows=rows, seats=tuple(seats) or PARTS[place].seats, first_step=step)
    with np.errstate(all="raise"):
        joined = join([*PARTS[:place], forged, *PARTS[place + 1 :]])
    assert len({len(getattr(joined, field.name)) for field in fields(joined) if field.name != "groups"}) == 1
    with np.errstate(all="ignore"):
        PathFinder().find(joined)
