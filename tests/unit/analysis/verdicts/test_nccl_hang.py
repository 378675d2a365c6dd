"""Hangs by the counters of NCCL's communicators, as the plugin's memory has them after real kinds of hangs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rankscope.analysis.verdicts.hang import find_hang
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, FIXED
from rankscope.analysis.verdicts.verdict import Verdict, headline
from rankscope.analysis.verdicts.windows import Communicator, NcclOperation, Stall

WORLD, TENSOR, PIPELINE, DATA = 100, 200, 300, 400
SPINNING = Stall(9.0, "other", ("log_loss (/app/train.py:70)",), same_stack_looks=3, is_working=True)
# In C++ with Python's lock: py-spy finds no stack, and the probe's counters are old.
IN_CPP = Stall(9.0, is_working=False)

Rows = Mapping[int, tuple[Communicator, ...]]


def inside(number: int, position: int, function: str, sequence: int, size: int = 4, ahead: int = 0) -> Communicator:
    """In an operation; the host has issued more."""
    at = NcclOperation(function, sequence)
    before = NcclOperation(function, sequence - 1)
    started = sequence + 1
    counts = (started + ahead, started, started - 1)
    return Communicator(number, size, position, *counts, at._replace(sequence=sequence + ahead), at, before, 9.0)


def outside(number: int, position: int, function: str, sequence: int, size: int = 4, queued: int = 0) -> Communicator:
    """In none; this one was the last on the GPU."""
    last = NcclOperation(function, sequence)
    counts = (sequence + 1 + queued, sequence + 1, sequence + 1)
    return Communicator(number, size, position, *counts, last._replace(sequence=sequence + queued), last, last, 9.0)


def judge(rows: Rows, odd: Mapping[int, Stall] | None = None, departed: tuple[int, ...] = ()) -> Verdict | None:
    """Ranks spin on their devices, where the odd ones do not stand elsewhere."""
    stalls = {
        rank: replace((odd or {}).get(rank, SPINNING if any(row.is_busy for row in own) else IN_CPP), communicators=own)
        for rank, own in rows.items()
    }
    return find_hang(stalls, departed, step_seconds=0.1, known_steps=True, policy=DEFAULT_POLICY)


def found(rows: Rows, odd: Mapping[int, Stall] | None = None) -> tuple[tuple[int, ...], str]:
    verdict = judge(rows, odd)
    assert verdict is not None
    return verdict.culprits, verdict.cause.evidence


def one_missing(size: int = 4, late: int = 2) -> dict[int, tuple[Communicator, ...]]:
    rows = {rank: (inside(WORLD, rank, "AllReduce", 4711, size, ahead=rank),) for rank in range(size)}
    return rows | {late: (outside(WORLD, late, "AllReduce", 4710, size),)}


def test_the_rank_that_never_entered_is_named() -> None:
    verdict = judge(one_missing())
    assert verdict is not None
    assert verdict.culprits == (2,)
    text = "never entered AllReduce 4711 of a group of 4 (last there: AllReduce 4710); ranks 0, 1 and 3 wait in it"
    assert verdict.reason.startswith(f"no rank has advanced for 9 s; rank 2: {text}")


def test_a_large_group_is_told_in_one_sentence() -> None:
    culprits, text = found(one_missing(4096, late=17))
    assert culprits == (17,)
    assert "of a group of 4096" in text and "4095 ranks (0, 1, 2 …) wait in it" in text


def test_several_missing_ranks_are_named_together() -> None:
    rows = one_missing() | {3: (outside(WORLD, 3, "AllReduce", 4710),)}
    assert found(rows)[0] == (2, 3)


def test_ranks_missing_in_different_groups_are_all_named() -> None:
    """As the ranks of one node are: each is in a group of its own with its peers on other nodes."""
    rows = one_missing() | {rank + 4: (inside(DATA, rank, "AllReduce", 4711),) for rank in (0, 1)}
    rows[6] = (outside(DATA, 2, "AllReduce", 4710),)
    culprits, text = found(rows)
    assert culprits == (2, 6)
    assert "ranks 0, 1 and 3 wait in it, 2 more ranks in other groups, rank 6 missing in other groups" in text


def test_ranks_that_ended_or_stopped_come_first() -> None:
    verdict = judge({rank: rows for rank, rows in one_missing().items() if rank != 3}, departed=(3,))
    assert verdict is not None and verdict.culprits == (3,)
    assert found(one_missing(), {0: replace(SPINNING, is_stopped=True)})[0] == (0,)


def test_counters_of_the_flight_recorder_come_after_nccls() -> None:
    odd = {rank: replace(SPINNING, collectives_enqueued=66 + rank, collectives_completed=65) for rank in range(4)}
    assert found(one_missing(), odd)[0] == (2,)


def test_an_operation_that_the_gpu_has_not_started_is_told() -> None:
    rows = one_missing() | {2: (outside(WORLD, 2, "AllReduce", 4710, queued=3),)}
    culprits, text = found(rows)
    assert culprits == (2,)
    assert text.startswith("issued AllReduce 4711 of a group of 4, which has not started on the GPU; ranks 0, 1 and 3")


def chain() -> dict[int, tuple[Communicator, ...]]:
    """Ranks 0 to 3 and 4 to 7 are tensor groups; 2 and 5 are also a group. 2 waits there for 5."""
    rows = {rank: (inside(TENSOR, rank, "AllReduce", 90, ahead=1),) for rank in (0, 1, 3)}
    rows |= {rank: (inside(TENSOR + 1, rank - 4, "AllReduce", 90),) for rank in (4, 6, 7)}
    rows[2] = (inside(DATA, 0, "AllGather", 7, 2), outside(TENSOR, 2, "AllReduce", 89))
    rows[5] = (outside(DATA, 1, "AllGather", 6, 2), outside(TENSOR + 1, 1, "AllReduce", 89))
    return rows


def test_a_chain_of_waits_ends_at_its_cause() -> None:
    culprits, text = found(chain())
    assert culprits == (5,)
    assert text.startswith(
        "never entered AllReduce 90 of a group of 4 (last there: AllReduce 89); ranks 4, 6 and 7 wait in it, "
        "4 more ranks in other groups"
    )


def test_a_chain_without_its_end_blames_nobody_in_it() -> None:
    rows = chain() | {5: ()}
    verdict = judge(rows, {5: replace(SPINNING, phase="input", stack=("read (/app/data.py:3)",), is_working=False)})
    assert verdict is not None
    assert 2 not in verdict.culprits, "it waits for another"
    assert verdict.culprits == (5,), "by its stack"


def test_groups_that_wait_for_each_other_are_named() -> None:
    rows = {
        0: (inside(TENSOR, 0, "AllReduce", 7, 2), outside(DATA, 0, "AllGather", 2, 2, queued=1)),
        1: (inside(DATA, 1, "AllGather", 3, 2), outside(TENSOR, 1, "AllReduce", 6, 2)),
    }
    culprits, text = found(rows)
    assert culprits == ()
    assert text.startswith(
        "ranks wait for each other in different groups: rank 0 in AllReduce 7 of a group of 2, "
        "rank 1 in AllGather 3 of a group of 2"
    )


def test_different_functions_at_the_same_place_are_told() -> None:
    rows = {rank: (inside(WORLD, rank, "AllReduce", 5),) for rank in (0, 2, 3)}
    rows[1] = (inside(WORLD, 1, "AllGather", 5),)
    ended = outside(WORLD, 1, "AllGather", 5)  # small enough to end all the same
    for odd in (rows[1], (ended,)):
        culprits, text = found(rows | {1: odd})
        assert culprits == (1,)
        assert text.startswith(
            "ranks entered different operations in a group of 4: ranks 0, 2 and 3 AllReduce 5, rank 1 AllGather 5;"
        )


def test_different_sequences_of_one_function_are_told() -> None:
    rows = {0: (inside(WORLD, 0, "AllReduce", 5, 2),), 1: (inside(WORLD, 1, "AllReduce", 4, 2),)}
    culprits, text = found(rows)
    assert culprits == ()
    assert "rank 0 AllReduce 5, rank 1 AllReduce 4" in text


def test_operations_issued_together_are_no_mismatch() -> None:
    """They end in any order, and the last that started differs."""
    together = [replace(inside(WORLD, rank, "AllGather", 8 - rank % 2), started=9, finished=6) for rank in range(4)]
    culprits, text = found({rank: (row,) for rank, row in enumerate(together)})
    assert culprits == () and "different operations" not in text


def test_a_root_that_left_its_broadcast_is_not_missing() -> None:
    """It leaves when it has sent, and waits in the next collective."""
    rows = {rank: (inside(WORLD, rank, "Broadcast", 7),) for rank in (1, 3)}
    rows[0] = (replace(inside(WORLD, 0, "AllReduce", 12), started=9, finished=8),)
    rows[2] = (outside(WORLD, 2, "Broadcast", 6),)
    culprits, text = found(rows)
    assert culprits == (2,)
    assert text.startswith("never entered Broadcast 7 of a group of 4")
    left = rows | {0: (outside(WORLD, 0, "Broadcast", 7),)}
    assert found(left)[0] == (2,)


def test_different_last_functions_are_compared_by_their_number() -> None:
    """FSDP gathers and reduces in one group."""
    rows = {
        rank: (replace(inside(WORLD, rank, "AllGather", 50), issued=99, started=99, finished=98),) for rank in (0, 1)
    }
    late = replace(outside(WORLD, 2, "ReduceScatter", 48), issued=98, started=98, finished=98)
    culprits, text = found(rows | {2: (late,)})
    assert culprits == (2,)
    assert text.startswith("never entered AllGather 50 of a group of 4 (last there: ReduceScatter 48)")


def test_a_graph_is_compared_by_its_replays() -> None:
    """Its operations have the sequence of the capture."""
    at = NcclOperation("AllReduce", 3)
    inside_graph = Communicator(WORLD, 4, 0, 4, 1000, 999, at, at, at, 9.0)
    rows = {rank: (replace(inside_graph, position=rank),) for rank in (0, 1, 3)}
    culprits, text = found(rows | {2: (replace(inside_graph, position=2, started=999),)})
    assert culprits == (2,)
    assert "AllReduce 3 of a group of 4" in text


def test_a_pipeline_waits_for_the_stage_in_no_operation() -> None:
    rows = {rank: (inside(PIPELINE, rank, "Recv", 0),) for rank in range(3)}
    rows[3] = (outside(PIPELINE, 3, "Send", 0),)
    culprits, text = found(rows)
    assert culprits == (3,)
    assert text.startswith(
        "in no operation of NCCL; it is missing in Recv of a group of 4; ranks 0, 1 and 2 wait in it"
    )


def test_members_without_part_in_messages_are_no_cycle() -> None:
    rows = {
        0: (inside(PIPELINE, 0, "Recv", 0), outside(TENSOR, 0, "AllReduce", 5)),
        1: (inside(TENSOR, 1, "AllReduce", 6), outside(PIPELINE, 1, "Send", 0)),
    }
    verdict = judge(rows)
    assert verdict is not None
    assert "wait for each other in different groups" not in verdict.reason


def test_ranks_waiting_by_other_means_come_after_idle_ones() -> None:
    """Rank 0 waits in a barrier of gloo for rank 2."""
    rows = one_missing() | {0: (outside(WORLD, 0, "AllReduce", 4710),)}
    in_barrier = Stall(9.0, "communication", ("barrier (/app/train.py:3)",), same_stack_looks=3)
    assert found(rows, {0: in_barrier})[0] == (2,)


IN_COLLECTIVE = replace(IN_CPP, phase="communication", stack=("reduce_metrics (/app/train.py:9)",), same_stack_looks=3)


@pytest.mark.parametrize(("alone", "culprits"), [((3,), (3,)), ((2, 3), ())])
def test_a_rank_alone_in_its_collective_is_the_odd_one(alone: tuple[int, ...], culprits: tuple[int, ...]) -> None:
    """Seen where one rank called all_reduce with another size: the hosts of the others were in theirs, which had not
    started on their GPUs."""
    rows = {rank: (outside(WORLD, rank, "AllReduce", 4710),) for rank in range(4)}
    rows |= {rank: (inside(WORLD, rank, "AllReduce", 4711),) for rank in alone}
    named, text = found(rows, {rank: IN_COLLECTIVE for rank in range(4) if rank not in alone})
    assert named == culprits
    assert text.startswith("entered AllReduce 4711 of a group of 4, while ranks 0")
    assert "wait in another collective, or in one of another size" in text


def test_the_headline_of_a_mismatch_says_what_was_entered() -> None:
    rows = {rank: (outside(WORLD, rank, "AllReduce", 4710),) for rank in range(3)}
    rows[3] = (inside(WORLD, 3, "AllReduce", 4711),)
    verdict = judge(rows, dict.fromkeys(range(3), IN_COLLECTIVE))
    assert verdict is not None
    assert headline(verdict) == "the job hangs: rank 3 entered another collective at train.py:70 (log_loss)"


def test_when_nobody_is_missing_the_network_is_suspected() -> None:
    rows = {rank: (inside(WORLD, rank, "AllReduce", 5, ahead=rank),) for rank in range(4)}
    odd = {rank: replace(SPINNING, collectives_enqueued=66 + rank, collectives_completed=65) for rank in range(4)}
    culprits, text = found(rows, odd)
    assert culprits == ()
    assert text.startswith("all ranks are in AllReduce 5 of a group of 4, nobody is missing; check the network")


def test_a_plugin_on_some_ranks_names_only_what_reports() -> None:
    rows = one_missing()
    assert found(rows | {0: ()})[0] == (2,)
    waiting = {rank: replace(SPINNING, phase="backward") for rank in range(4)}
    verdict = judge(rows | {2: ()}, waiting)
    assert verdict is not None and verdict.culprits == (), "the one without counters may be in it as well"
    verdict = judge({0: rows[0], 1: (), 2: (), 3: ()}, waiting)
    assert verdict is not None and verdict.culprits == ()


@pytest.mark.parametrize(
    "forged",
    [
        {"position": 0},
        {"size": 5},
        {"number": WORLD + 1},
        {"unchanged_seconds": float("nan")},
        {"unchanged_seconds": FIXED.nccl_unchanged_seconds - 1},
    ],
)
def test_rows_that_do_not_fit_accuse_nobody(forged: dict[str, float]) -> None:
    (row,) = one_missing()[2]
    verdict = judge(one_missing() | {2: (replace(row, **forged),)})
    assert verdict is None or verdict.culprits != (2,) or "AllReduce" not in verdict.reason


def test_two_rows_of_one_communicator_are_not_believed() -> None:
    (row,) = one_missing()[2]
    verdict = judge(one_missing() | {2: (row, replace(row, position=3))})
    assert verdict is None or "AllReduce" not in verdict.reason


def test_a_long_evaluation_is_no_hang() -> None:
    """Nobody is in an operation, or all go from one to the next."""
    idle = {rank: (outside(WORLD, rank, "AllReduce", 4711),) for rank in range(4)}
    working = dict.fromkeys(range(4), replace(SPINNING, same_stack_looks=0))
    assert judge(idle, working) is None
    moving = {rank: (replace(rows[0], unchanged_seconds=0.0),) for rank, rows in one_missing().items()}
    assert judge(moving, working) is None
    evaluating = replace(IN_CPP, is_working=True)
    assert judge(one_missing(), {2: evaluating}) is None, "the others wait for its work"


def test_a_rank_that_works_without_end_is_a_hang() -> None:
    seconds = DEFAULT_POLICY.hang_working_seconds
    odd = {rank: replace(SPINNING, seconds_since_step=seconds) for rank in range(4)}
    odd[2] = replace(IN_CPP, is_working=True, seconds_since_step=seconds)
    assert found(one_missing(), odd)[0] == (2,)
