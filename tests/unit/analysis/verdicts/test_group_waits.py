"""Waiting by process group: made-up jobs in which it is known who comes late, and rows that no honest rank sends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.verdicts.exposed_communication import (
    DDP,
    EXPOSED,
    NCCL,
    OVERLAPPED,
    POINT_TO_POINT,
    RECORDER,
    GroupSpans,
    Waits,
    group_waits,
)

NAN = float("nan")
Row = tuple[float, float, float, float]  # group, kind, seconds, seconds of the sampled steps


def waits_of(ranks: Sequence[Sequence[Row]], step: float | Sequence[float] = 0.1, job: Sequence[int] = ()) -> Waits:
    """`ranks` has the groups of each rank."""
    slots = max([1, *map(len, ranks)])
    table = np.full((4, slots, len(ranks)), NAN)
    for rank, rows in enumerate(ranks):
        for slot, row in enumerate(rows):
            table[:, slot, rank] = row
    seconds = np.broadcast_to(np.asarray(step, dtype=np.float64), (len(ranks),))
    jobs = np.array(job or [0] * len(ranks), dtype=np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return group_waits(GroupSpans(*table), jobs, seconds)


def on_others(waits: Waits) -> np.ndarray:
    return waits.wait_seconds - waits.transfer_seconds


def played(own: Mapping[int, float], phases: Sequence[Sequence[Sequence[int]]], transfer: float = 0.01) -> Waits:
    """Ranks that compute for `own` seconds, then take part in a collective of one group per phase. Many steps, each
    beginning when the rank is done with the one before."""
    ranks, steps = len(own), 20
    now = np.zeros(ranks)
    spent: dict[tuple[int, int], float] = {}
    for _ in range(steps):
        now += [own[rank] for rank in range(ranks)]
        for phase, groups in enumerate(phases):
            for number, members in enumerate(groups):
                done = max(now[rank] for rank in members) + transfer
                for rank in members:
                    key = (rank, 100 * phase + number)
                    spent[key] = spent.get(key, 0.0) + done - now[rank]
                    now[rank] = done
    step = now / steps
    rows = [
        [(group, EXPOSED, seconds / steps, step[rank]) for (who, group), seconds in spent.items() if who == rank]
        for rank in range(ranks)
    ]
    return waits_of(rows, step.tolist())


@pytest.mark.parametrize(
    ("millis", "is_late"),
    [((34.0, 33.7, 34.9, 31.7), False), ((36.0, 35.7, 36.9, 31.7), True), ((34.0, 31.7), False), ((35.0, 31.7), True)],
)
def test_small_differences_between_transfers_make_nobody_late(millis: Sequence[float], is_late: bool) -> None:
    """The first is of a healthy FSDP2 job on a GPU."""
    waits = waits_of([[(7, NCCL, own / 1e3, 0.037)] for own in millis], step=0.037)
    assert (waits.self_seconds.max() > 1.05 * waits.self_seconds[0]) == is_late
    assert is_late or waits.self_seconds == pytest.approx([0.037] * len(millis))


def test_the_others_wait_for_the_rank_with_shortest_spans() -> None:
    waits = waits_of([[(7, EXPOSED, seconds, 0.1)] for seconds in (0.065, 0.064, 0.005, 0.066)])
    assert on_others(waits) == pytest.approx([0.060, 0.059, 0.0, 0.061])
    assert waits.transfer_seconds == pytest.approx([0.005] * 4)
    assert waits.self_seconds == pytest.approx([0.035, 0.036, 0.095, 0.034])


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([[(0, 1), (2, 3)], [(0, 2), (1, 3)]], id="tensor pairs, then data pairs"),
        pytest.param([[(0, 1), (2, 3)]] * 3 + [[(0, 2), (1, 3)]], id="HSDP: shards gathered, then replicas reduced"),
    ],
)
def test_a_rank_delayed_by_another_group_is_not_the_culprit(culprit: int, phases: list[list[tuple[int, ...]]]) -> None:
    own = {rank: 0.1 if rank == culprit else 0.04 for rank in range(4)}
    waits = played(own, phases)
    waiting = on_others(waits)
    # In the first step everyone is level; from then on the delay has gone around.
    assert waiting[culprit] == pytest.approx(0.0, abs=0.001)
    assert all(waiting[rank] == pytest.approx(0.06, rel=0.1) for rank in range(4) if rank != culprit)
    assert int(np.argmax(waits.self_seconds)) == culprit


def test_groups_of_one_number_in_two_jobs_are_not_compared() -> None:
    rows = [[(7, EXPOSED, seconds, 0.1)] for seconds in (0.05, 0.04, 0.01, 0.01)]
    assert on_others(waits_of(rows, job=(0, 0, 1, 1))) == pytest.approx([0.01, 0.0, 0.0, 0.0])


def test_ranks_may_list_their_groups_in_any_order() -> None:
    one, other = (7.0, EXPOSED, 0.03, 0.1), (9.0, DDP, 0.02, 0.1)
    waits = waits_of([[one, other], [(9.0, DDP, 0.01, 0.1), (7.0, EXPOSED, 0.01, 0.1)]])
    assert on_others(waits) == pytest.approx([0.03, 0.0])
    assert waits.transfer_seconds == pytest.approx([0.02, 0.02])


def test_the_same_group_of_another_kind_is_another_group() -> None:
    waits = waits_of([[(7, EXPOSED, 0.03, 0.1)], [(7, DDP, 0.01, 0.1)]])
    assert on_others(waits) == pytest.approx([0.0, 0.0])


def test_pipeline_stages_are_not_compared_and_their_waits_count_fully() -> None:
    waits = waits_of([[(7, POINT_TO_POINT, 0.02, 0.1)], [(7, POINT_TO_POINT, 0.05, 0.1)]])
    assert waits.wait_seconds == pytest.approx([0.02, 0.05])
    assert waits.transfer_seconds.tolist() == [0.0, 0.0]
    assert waits.self_seconds == pytest.approx([0.08, 0.05])


@pytest.mark.parametrize(
    ("kind", "transfer"), [(EXPOSED, 0.02), (DDP, 0.02), (OVERLAPPED, 0.0), (RECORDER, 0.0), (NCCL, 0.0)]
)  # fmt: skip
def test_a_transfer_beside_other_work_takes_nothing_from_the_step(kind: int, transfer: float) -> None:
    waits = waits_of([[(7, kind, 0.05, 0.1)], [(7, kind, 0.02, 0.1)]])
    assert on_others(waits) == pytest.approx([0.03, 0.0])
    assert waits.transfer_seconds == pytest.approx([transfer, transfer])
    assert waits.self_seconds == pytest.approx([0.07 - transfer, 0.1 - transfer])


def test_overlapped_spans_longer_than_a_step_show_the_late_rank() -> None:
    waits = waits_of([[(7, OVERLAPPED, seconds, 0.1)] for seconds in (0.19, 0.13, 0.40)])
    assert waits.wait_seconds == pytest.approx([0.06, 0.0, 0.1])
    assert waits.self_seconds == pytest.approx([0.04, 0.1, 0.0])


def test_spans_are_held_against_the_steps_they_were_sampled_in() -> None:
    """Sampled steps took 120 ms where all steps of the window took 100 ms on average."""
    waits = waits_of([[(7, EXPOSED, 0.06, 0.12)], [(7, EXPOSED, 0.012, 0.12)]])
    assert waits.wait_seconds == pytest.approx([0.05, 0.01])


def test_members_that_do_not_report_are_not_guessed_at() -> None:
    waits = waits_of([[(7, EXPOSED, 0.06, 0.1)], [(7, EXPOSED, 0.05, 0.1)], []])
    assert on_others(waits)[:2] == pytest.approx([0.01, 0.0])
    assert np.isnan([waits.wait_seconds[2], waits.transfer_seconds[2], waits.self_seconds[2]]).all()
    alone = waits_of([[(7, EXPOSED, 0.06, 0.1)]])
    assert (alone.wait_seconds[0], alone.transfer_seconds[0]) == pytest.approx((0.06, 0.06))


@pytest.mark.parametrize(
    "row",
    [
        (7, EXPOSED, NAN, 0.1),
        (7, EXPOSED, np.inf, 0.1),
        (7, EXPOSED, -0.5, 0.1),
        (7, EXPOSED, 0.01, 0.0),
        (7, EXPOSED, 0.01, -0.1),
        (7, EXPOSED, 0.01, NAN),
        (7, EXPOSED, 0.01, 5e-324),
        (7, 0, 0.01, 0.1),
        (7, 1.5, 0.01, 0.1),
        (7, 1e300, 0.01, 0.1),
        (7, NAN, 0.01, 0.1),
        (-7, EXPOSED, 0.01, 0.1),
        (7.5, EXPOSED, 0.01, 0.1),
        (1e300, EXPOSED, 0.01, 0.1),
        (np.inf, EXPOSED, 0.01, 0.1),
        (NAN, EXPOSED, 0.01, 0.1),
    ],
)
def test_an_impossible_row_is_dropped_and_compared_with_nothing(row: Row) -> None:
    waits = waits_of([[row], [(7, EXPOSED, 0.06, 0.1)], [(7, EXPOSED, 0.05, 0.1)]])
    assert np.isnan(waits.wait_seconds[0]) and np.isnan(waits.self_seconds[0])
    assert on_others(waits)[1:] == pytest.approx([0.01, 0.0])


def test_a_huge_figure_counts_as_a_wait_of_one_step() -> None:
    for kind in (EXPOSED, OVERLAPPED, POINT_TO_POINT, DDP, RECORDER, NCCL):
        waits = waits_of([[(7, kind, 1e300, 0.1)] * 8, [(7, kind, 0.0, 0.1)]])
        assert waits.wait_seconds.tolist() == [0.1, 0.0]
        assert waits.self_seconds.tolist() == [0.0, 0.1]


@pytest.mark.parametrize("step", [NAN, np.inf])
def test_without_a_step_time_nothing_is_known(step: float) -> None:
    waits = waits_of([[(7, EXPOSED, 0.01, 0.1)], [(7, EXPOSED, 0.02, 0.1)]], step=(step, 0.1))
    assert np.isnan(waits.wait_seconds[0])
    assert waits.wait_seconds[1] == pytest.approx(0.02)


_ODD = st.sampled_from([NAN, np.inf, -np.inf, -1.0, 0.0, 5e-324, 1e300, 0.5])
_SECONDS = st.floats(0.0, 1.0) | _ODD
_ROWS = st.tuples(
    st.integers(0, 3).map(float) | _ODD, st.integers(0, 6).map(float) | _ODD, _SECONDS, st.floats(0.01, 1.0) | _ODD
)
_RANKS = st.lists(st.tuples(st.lists(_ROWS, max_size=8), st.floats(1e-9, 1e6), st.integers(0, 1)), max_size=12)


@given(_RANKS, st.randoms(use_true_random=False))
def test_any_rows_divide_the_step_regardless_of_rank_order(
    ranks: list[tuple[list[Row], float, int]], random: Random
) -> None:
    order = list(range(len(ranks)))
    random.shuffle(order)
    rows, steps, jobs = [rank[0] for rank in ranks], [rank[1] for rank in ranks], [rank[2] for rank in ranks]
    waits = waits_of(rows, steps, jobs)
    moved = waits_of([rows[i] for i in order], [steps[i] for i in order], [jobs[i] for i in order])
    for name in ("wait_seconds", "transfer_seconds", "self_seconds"):
        values = getattr(waits, name)
        assert np.array_equal(values[order], getattr(moved, name), equal_nan=True)
        known = values[~np.isnan(values)]
        assert (known >= 0).all() and np.isfinite(known).all()
    known = ~np.isnan(waits.wait_seconds)
    total = (waits.self_seconds + waits.wait_seconds)[known]
    assert total == pytest.approx(np.array(steps)[known])
    assert (waits.transfer_seconds[known] <= waits.wait_seconds[known]).all()


@pytest.mark.parametrize("kind", [EXPOSED, DDP])
def test_a_stall_that_samples_miss_is_known_from_nccl(kind: int) -> None:
    # Measured on an H200: one CUDA graph a step, and rank 2 sleeps for 400 ms in every tenth. The samples are of usual
    # steps: 24 ms of 25.8 ms in a collective on every rank.
    in_nccl = (0.0552, 0.0550, 0.0231, 0.0551)
    waits = waits_of([[(9, NCCL, spent, 0.0574), (7, kind, 0.024, 0.0258)] for spent in in_nccl], step=0.0574)
    assert waits.self_seconds == pytest.approx([0.0022, 0.0024, 0.0343, 0.0023], abs=1e-9)
    assert waits.transfer_seconds == pytest.approx([0.0231] * 4)


def test_transfers_that_nccl_has_no_time_for_are_not_counted() -> None:
    waits = waits_of([[(9, NCCL, 0.01, 0.1), (7, EXPOSED, 0.05, 0.1)], [(9, NCCL, 0.03, 0.1), (7, EXPOSED, 0.05, 0.1)]])
    assert waits.transfer_seconds == pytest.approx([0.01, 0.01])
    assert on_others(waits) == pytest.approx([0.0, 0.02])
