"""The graph of a step: who waits for whom, the path, and replays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import UNKNOWN, Group, Operations
from rankscope.analysis.step_graph.roles import find_stages
from tests.support.step_programs import Layout, play

REDUCE, SEND, RECV = CollectiveKind.ALL_REDUCE, CollectiveKind.SEND, CollectiveKind.RECV
PAIR = Group("pair", (0, 1))


def operations(*rows: tuple[int, int, int, int, int, int], groups: tuple[Group, ...] = (PAIR,)) -> Operations:
    """Rank, kind, sequence, peer, start and stop of each; all in step 1 of the first group."""
    rank, kind, sequence, peer, start, stop = np.array(rows, dtype=np.int64).T
    same = np.ones(len(rows), dtype=np.int64)
    return Operations(rank, same, 0 * same, kind, sequence, peer, 4 * same, start, stop, 0 * same, groups)


def collective(rank: int, sequence: int, start: int, stop: int) -> tuple[int, int, int, int, int, int]:
    return rank, REDUCE, sequence, UNKNOWN, start, stop


def message(rank: int, kind: CollectiveKind, start: int, stop: int) -> tuple[int, int, int, int, int, int]:
    return rank, kind, UNKNOWN, 1 - rank, start, stop


def test_the_path_goes_through_the_ranks_that_arrive_last() -> None:
    graph = StepGraph.build(
        operations(
            collective(0, 0, 0, 100), collective(0, 1, 150, 400), collective(1, 0, 90, 100), collective(1, 1, 380, 400)
        )
    )
    path = graph.path()
    late = graph.last[path]
    assert graph.operations.rank[late].tolist() == [1, 1], "rank 1 arrives last, twice"
    assert graph.own_ns[late].tolist() == [280, 0] and graph.transfer_ns[path].tolist() == [20, 10]


def test_transfers_take_another_time_in_a_replay() -> None:
    rows = (collective(0, 0, 0, 100), collective(0, 1, 150, 400), collective(1, 0, 90, 100), collective(1, 1, 380, 400))
    graph = StepGraph.build(operations(*rows))
    transfer = np.stack([graph.transfer_ns, 3 * graph.transfer_ns], axis=1)
    stops = graph.replay(np.repeat(graph.own_ns[:, None], 2, axis=1), transfer)
    assert stops[:, 0].tolist() == [100, 400, 100, 400]
    assert stops[:, 1].tolist() == [120, 120 + 280 + 60, 120, 120 + 280 + 60]


@pytest.mark.parametrize("layout", [Layout(data=3), Layout(tensor=2, pipeline=2, data=2), Layout(pipeline=4)])
def test_every_nanosecond_of_the_path_has_one_owner(layout: Layout) -> None:
    graph = StepGraph.build(play(layout))
    path = graph.path()
    begin = graph.operations.start_ns[graph.last[path[-1]]]
    owned = graph.transfer_ns[path].sum() + graph.own_ns[graph.last[path]].sum()
    assert owned == graph.operations.stop_ns.max() - begin


def test_a_replay_moves_what_depends_on_the_change() -> None:
    graph = StepGraph.build(
        operations(
            collective(0, 0, 0, 100), collective(0, 1, 150, 400), collective(1, 0, 90, 100), collective(1, 1, 380, 400)
        )
    )
    faster = np.array([0, 50, 0, 30])
    assert graph.replay(faster[:, None])[:, 0].tolist() == [100, 170, 100, 170], (
        "rank 0 is last then: 100 + 50, and the transfer of 20"
    )


@pytest.mark.parametrize("layout", [Layout(data=3), Layout(tensor=2, pipeline=2, data=2), Layout(pipeline=4)])
def test_a_replay_without_a_change_is_what_was(layout: Layout) -> None:
    graph = StepGraph.build(play(layout))
    assert (graph.replay(graph.own_ns[:, None])[:, 0] == graph.operations.stop_ns).all()


def test_what_is_received_is_there_after_it_is_sent() -> None:
    """NCCL records that both are over when the first of them is."""
    graph = StepGraph.build(
        operations(
            message(0, SEND, 10, 20), message(0, RECV, 10, 20), message(1, RECV, 5, 20), message(1, SEND, 90, 95)
        )
    )
    assert graph.operations.stop_ns.tolist() == [20, 95, 20, 95]
    assert graph.last.tolist() == [0, 3, 0, 3]


def test_of_messages_in_one_kernel_the_last_one_counts() -> None:
    """Rank 0 sends to rank 1 and receives from rank 2 in one kernel, which rank 2 keeps waiting."""
    rows = np.array(
        [
            (0, RECV, 2, 10, 100),
            (0, SEND, 1, 10, 100),
            (1, RECV, 0, 20, 30),
            (2, SEND, 0, 90, 100),
            (0, SEND, 1, 120, 130),
        ]
    )
    for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4]):
        rank, kind, peer, start, stop = rows[order].T
        same = np.ones(len(rows), dtype=np.int64)
        three = (Group("three", (0, 1, 2)),)
        made = Operations(rank, same, 0 * same, kind, -same, peer, same, start, stop, 0 * same, three)
        graph = StepGraph.build(made)
        assert graph.operations.kind[graph.before[4]] == RECV


def test_a_root_leaves_before_the_last_arrives() -> None:
    rows = ((0, CollectiveKind.BROADCAST, 0, UNKNOWN, 0, 10), (1, CollectiveKind.BROADCAST, 0, UNKNOWN, 50, 60))
    graph = StepGraph.build(operations(*rows))
    assert graph.last.tolist() == [0, 1] and graph.transfer_ns.tolist() == [10, 10]


def test_an_operation_of_one_rank_alone_waits_for_nobody() -> None:
    graph = StepGraph.build(operations(collective(0, 7, 0, 10), collective(1, 8, 0, 10)))
    assert graph.meetings.number.tolist() == [UNKNOWN, UNKNOWN] and graph.meetings.lonely == 2
    assert graph.last.tolist() == [0, 1]


def test_ranks_that_claim_one_collective_twice_are_not_matched() -> None:
    graph = StepGraph.build(operations(collective(0, 0, 0, 10), collective(0, 0, 20, 30), collective(1, 0, 0, 10)))
    assert graph.meetings.count == 0


def test_times_that_contradict_each_other_end() -> None:
    """A hostile recording: operations without a duration, and all at the same time."""
    rows = [collective(rank, sequence, 5, 5) for rank in (0, 1) for sequence in (*range(20), *range(19, -1, -1))]
    graph = StepGraph.build(operations(*rows))
    assert len(graph.path()) <= len(graph) and len(graph.replay(graph.own_ns[:, None])) == len(graph)


def test_messages_are_matched_where_a_step_lacks_one() -> None:
    recorded = play(Layout(pipeline=2, steps=20, noise=0.0))
    lost = np.flatnonzero((recorded.kind == RECV) & (recorded.step == 10))[0]
    graph = StepGraph.build(take_rows(recorded, np.delete(np.arange(len(recorded)), lost)))
    unmatched = graph.operations.step[graph.meetings.number == UNKNOWN]
    assert set(unmatched.tolist()) == {10}


def test_steps_that_were_not_recorded_part_the_path() -> None:
    recorded = play(Layout(data=2, steps=40))
    graph = StepGraph.build(take_rows(recorded, (recorded.step < 15) | (recorded.step > 25)))
    assert np.unique(graph.meetings.stretch).tolist() == [0, 1]
    path = graph.path()
    for stretch, steps in ((0, range(1, 15)), (1, range(26, 41))):
        rows = path[graph.meetings.stretch[path] == stretch]
        assert set(graph.operations.step[rows].tolist()) == set(steps)
    assert (graph.own_ns[graph.last[path]] < 1e9).all(), "the pause is no work of a rank"


def test_an_operation_counts_to_the_step_that_most_ranks_see() -> None:
    """A host ahead of the others issues the first operation of a step before it ends the one before."""
    recorded = play(Layout(data=4, steps=10))
    step = recorded.step.copy()
    early = np.flatnonzero((recorded.rank == 1) & (step == 5))
    step[early] = 4
    graph = StepGraph.build(replace(recorded, step=step))
    assert graph.meetings.step[early].tolist() == [5] * len(early)


# Roles.


@pytest.mark.parametrize("pairs", [False, True], ids=["one communicator", "a communicator for each pair"])
def test_stages_follow_from_who_sends_first(pairs: bool) -> None:
    layout = Layout(tensor=2, pipeline=4, data=2, steps=4, pairs=pairs)
    stages = find_stages(StepGraph.build(play(layout)))
    assert stages == {rank: layout.place(rank)[2] for rank in range(layout.world)}


def test_a_ring_has_no_stages() -> None:
    """Context parallel attention sends its keys around a ring."""
    ring, rows = Group("ring", (0, 1, 2)), []
    for rank in range(3):
        for turn in range(6):
            start = 100 * turn
            rows.append((rank, SEND, UNKNOWN, (rank + 1) % 3, start, start + 50))
            rows.append((rank, RECV, UNKNOWN, (rank - 1) % 3, start, start + 50))
    graph = StepGraph.build(operations(*rows, groups=(ring,)))
    assert find_stages(graph) == {0: 0, 1: 0, 2: 0}
