from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.collectives.flight_recorder.matching import Analysis, Difference
from rankscope.analysis.collectives.flight_recorder.report import Outcome, Report, make_report, to_json
from tests.unit.analysis.collectives.flight_recorder.made_dumps import Record, analyze, content, record

CHECKPOINT = ("save_checkpoint", "/app/ckpt.py", 51)
WAITING = "scheduled"


def job(ranks: int, records: dict[int, list[Record]], groups: dict[str, Any] | None = None, **options: Any) -> Analysis:
    """Ranks that are not in `records` have done 1, 2 and wait in 3."""
    usual = [record(1), record(2), record(3, state=WAITING)]
    groups = groups or {"0": range(ranks)}
    return analyze({rank: content(records.get(rank, usual), groups, **options) for rank in range(ranks)})


def report(analysis: Analysis) -> Report:
    return make_report(analysis)


def test_the_rank_that_never_entered_is_named_with_its_line() -> None:
    late = [record(1), record(2), record(1, "nccl:barrier", group="7", description="ckpt", at=CHECKPOINT)]
    analysis = job(64, {17: late}, {"0": range(64), "7": range(64)})
    (stall,) = analysis.stalls
    (waiting,), (absent,) = stall.waiting, stall.never_entered
    assert (stall.sequence, len(waiting.ranks), waiting.line) == (3, 63, "train_step (train.py:88)")
    assert absent.ranks == (17,) and absent.last_finished is not None and absent.last_record is not None
    assert (absent.last_finished.operation.name, absent.last_finished.sequence) == ("all_reduce", 2)
    found = report(analysis)
    assert (found.outcome, found.culprits) == (Outcome.HANG, (17,))
    assert found.headline == (
        "63 ranks in all_reduce seq 3 of group 0 (default_pg), rank 17 last in save_checkpoint (ckpt.py:51)"
    )


def test_a_rank_waiting_in_another_group_is_located_there() -> None:
    elsewhere = [record(1), record(2), record(1, "nccl:barrier", group="7", state=WAITING, at=CHECKPOINT)]
    analysis = job(4, {3: elsewhere}, {"0": range(4), "7": [2, 3]})
    assert [stall.group.name for stall in analysis.stalls] == ["0", "7"]
    assert "rank 3 in barrier seq 1 of group 7" in report(analysis).headline


def test_mutual_waiting_is_distinguished_from_a_missing_rank() -> None:
    first = [record(1, group="a", state=WAITING)]
    second = [record(1, group="b", state=WAITING)]
    analysis = job(2, {0: first, 1: second}, {"a": [0, 1], "b": [0, 1]})
    found = report(analysis)
    assert (found.outcome, found.culprits) == (Outcome.HANG, ())
    assert found.headline.startswith("ranks wait for each other: rank 0 in all_reduce seq 1 of group a")


def test_the_root_of_a_chain_of_stalls_comes_first() -> None:
    """Rank 3 is outside; rank 2 waits for it in a group of two, and the others for rank 2."""
    middle = [record(1), record(2), record(1, group="tp", state=WAITING)]
    analysis = job(
        4, {2: middle, 3: [record(1), record(2), record(3, state=WAITING)][:2]}, {"0": [0, 1, 2], "tp": [2, 3]}
    )
    assert [(stall.group.name, stall.is_root) for stall in analysis.stalls] == [("tp", True), ("0", False)]
    assert report(analysis).culprits == (3,)


def test_groups_that_stall_at_the_same_place_are_one_finding() -> None:
    """A node of two ranks is dead; each was in a group with the same rank of the other nodes."""
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    dumps = {
        rank: content([record(1, group=f"dp{rank % 2}", state=WAITING)], {f"dp{rank % 2}": groups[rank % 2]})
        for rank in range(6)
    }
    found = report(analyze(dumps))
    (stall,) = found.analysis.stalls
    assert [group.name for group in stall.groups] == ["dp0", "dp1"] and stall.waiting[0].ranks == (0, 1, 2, 3, 4, 5)
    assert (found.outcome, found.culprits) == (Outcome.HANG, (6, 7))
    assert found.headline == (
        "6 ranks in all_reduce seq 1 of group dp0 (default_pg) and 1 other, ranks 6-7 without a dump"
    )


def test_a_rank_without_a_dump_is_named() -> None:
    dumps = {rank: content([record(1), record(2, state=WAITING)], {"0": range(4)}) for rank in (0, 1, 3)}
    found = report(analyze(dumps))
    assert (found.outcome, found.culprits, found.analysis.no_dump) == (Outcome.HANG, (2,), (2,))
    assert found.headline == "3 ranks in all_reduce seq 2 of group 0 (default_pg), rank 2 without a dump"


def test_few_dumps_of_many_ranks_decide_nothing() -> None:
    found = report(analyze({0: content([record(1, state=WAITING)], {"0": range(8)})}))
    assert found.outcome is Outcome.INSUFFICIENT_DATA and "give the dumps of all ranks" in found.headline


def test_another_collective_under_the_same_number_is_named() -> None:
    other = [record(1), record(2), record(3, "nccl:broadcast", state=WAITING, at=CHECKPOINT)]
    analysis = job(4, {1: other})
    ((group, mismatch),) = analysis.mismatches
    assert (group.name, mismatch.sequence, mismatch.difference) == ("0", 3, Difference.OPERATION)
    found = report(analysis)
    assert (found.outcome, found.culprits) == (Outcome.HANG, (1,))
    assert found.headline == (
        "different operations in seq 3 of group 0 (default_pg): ranks 0,2-3 in all_reduce, train_step (train.py:88); "
        "rank 1 in broadcast, save_checkpoint (ckpt.py:51)"
    )
    assert analysis.groups[0].status == "mismatched"


@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        (record(3, sizes=[[5]], state=WAITING), Difference.SIZE),
        (record(3, dtype="Half", state=WAITING), Difference.TYPE),
        (record(3, sizes=[[4], [4]], state=WAITING), Difference.SIZE),
        (record(3, sizes=[[2, 2]], state=WAITING), None),
    ],
)
def test_sizes_and_types_must_agree_and_shapes_need_not(odd: Record, difference: Difference | None) -> None:
    found = [one.difference for _, one in job(3, {2: [record(1), record(2), odd]}).mismatches]
    assert found == ([difference] if difference else [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            record(1, "nccl:all_to_all", sizes=[[3]], outputs=[[5]]),
            record(1, "nccl:all_to_all", sizes=[[5]], outputs=[[3]]),
        ),
        (
            record(1, "nccl:scatter", sizes=[[4], [4]], outputs=[[4]]),
            record(1, "nccl:scatter", sizes=[], outputs=[[4]]),
        ),
        (record(1, "nccl:gather", sizes=[[4]], outputs=[[4], [4]]), record(1, "nccl:gather", sizes=[[4]], outputs=[])),
        (
            record(1, "nccl:all_gather_v", sizes=[[4]], outputs=[[7]]),
            record(1, "nccl:all_gather_v", sizes=[[3]], outputs=[[7]]),
        ),
        (record(1, "nccl:barrier", sizes=[[1]]), record(1, "nccl:barrier", sizes=[])),
    ],
    ids=["all_to_all", "scatter", "gather", "uneven all_gather", "barrier"],
)
def test_operations_whose_ranks_differ_by_nature_are_no_mismatch(first: Record, second: Record) -> None:
    found = report(job(2, {0: [first], 1: [second]}))
    assert (found.outcome, found.analysis.mismatches) == (Outcome.HEALTHY, ())


def test_the_first_of_many_mismatches_is_reported() -> None:
    shifted = [record(number, sizes=[[number + 1]]) for number in range(1, 9)]
    right = [record(number, sizes=[[number]]) for number in range(1, 9)]
    analysis = job(3, {0: right, 1: right, 2: shifted})
    ((_, mismatch),) = analysis.mismatches
    assert (mismatch.sequence, mismatch.sequences) == (1, 8)
    assert report(analysis).outcome is Outcome.MISMATCH


def test_records_that_a_ring_dropped_are_not_called_missing() -> None:
    """Rank 1 has done much in another group since: nobody knows whether it entered."""
    busy = [record(number, group="7") for number in range(40, 60)]
    dumps = {
        0: content([record(1, state=WAITING)], {"0": [0, 1], "7": [1]}),
        1: content(busy, {"7": [1]}, first_record=40),
    }
    analysis = analyze(dumps)
    (stall,) = analysis.stalls
    assert (stall.never_entered, stall.unknown) == ((), (1,))
    found = report(analysis)
    assert found.outcome is Outcome.INSUFFICIENT_DATA and found.culprits == ()
    assert "no record of that time of rank 1; record more with TORCH_FR_BUFFER_SIZE" in found.headline
    # It went past what the others wait in.
    past = {0: dumps[0], 1: content([record(9), record(10)], {"0": [0, 1]}, first_record=40)}
    (stall,) = analyze(past).stalls
    assert (stall.never_entered, stall.unknown) == ((), (1,))
    # A ring keeps the newest: after seq 2 nothing came in this group.
    behind = {
        0: content([record(3, state=WAITING)], {"0": [0, 1]}),
        1: content([record(2)], {"0": [0, 1]}, first_record=40),
    }
    (stall,) = analyze(behind).stalls
    assert [absent.ranks for absent in stall.never_entered] == [(1,)]


def test_a_dump_of_active_records_only_leaves_absence_open() -> None:
    active = content([record(1, state=WAITING), record(5, state=WAITING)], {"0": [0, 1]}, record_ids=[3, 9])
    analysis = analyze({0: content([record(7, state=WAITING)], {"0": [0, 1]}), 1: active})
    assert [stall.never_entered for stall in analysis.stalls] == [()]


def test_a_collective_that_all_ranks_are_in_is_in_flight() -> None:
    found = report(job(4, {}))
    assert (found.outcome, found.culprits) == (Outcome.IN_FLIGHT, ())
    assert "4 ranks in all_reduce seq 3" in found.headline and "nobody is missing" in found.headline
    assert found.analysis.groups[0].status == "in_flight"


def test_a_collective_that_others_finished_does_not_hold_a_rank() -> None:
    """The end of seq 2 was not noticed on ranks 0 and 2 before their dumps; rank 2 is missing in seq 3."""
    lagging = [record(1), record(2, state=WAITING), record(3, state=WAITING)]
    analysis = job(3, {0: lagging, 2: lagging[:2]})
    (stall,) = analysis.stalls
    assert (stall.sequence, [absent.ranks for absent in stall.never_entered]) == (3, [(2,)])
    assert report(analysis).culprits == (2,)
    (stall,) = job(2, {0: [record(1, state=WAITING)], 1: [record(1)]}).stalls
    assert (stall.sequence, stall.finished, stall.is_in_flight) == (1, (1,), True)


def test_a_job_in_which_everything_finished_is_healthy() -> None:
    found = report(job(3, {rank: [record(1), record(2)] for rank in range(3)}))
    assert (found.outcome, found.analysis.stalls) == (Outcome.HEALTHY, ())
    assert [(one.status, one.last_entered, one.last_entered_by_all) for one in found.analysis.groups] == [
        ("complete", 2, 2)
    ]


def test_groups_of_one_name_with_other_members_are_other_groups() -> None:
    """Groups that are split off a group have its name on every rank."""
    dumps = {
        rank: content([record(1, group="s", sizes=[[rank // 2 + 1]])], {"s": [rank // 2 * 2, rank // 2 * 2 + 1]})
        for rank in range(4)
    }
    analysis = analyze(dumps)
    assert [one.ranks for one in analysis.groups] == [(0, 1), (2, 3)] and not analysis.mismatches


def test_an_undescribed_default_group_has_all_ranks_as_members() -> None:
    dumps = {rank: content([record(1, "gloo:all_reduce", state=WAITING)], {}) for rank in (0, 2)} | {1: content([], {})}
    (stall,) = analyze(dumps).stalls
    assert [absent.ranks for absent in stall.never_entered] == [(1,)]
    assert stall.never_entered[0].last_record is None


def test_a_gloo_operation_ended_without_a_member_is_a_stall() -> None:
    ended = [record(number, "gloo:all_reduce", state=WAITING, retired=True) for number in (1, 2)]
    found = report(job(3, {0: ended, 1: ended[:1], 2: ended}))
    assert (found.outcome, found.culprits) == (Outcome.HANG, (1,))
    rooted = [record(1, "gloo:broadcast", state=WAITING, retired=True)]
    assert report(job(2, {0: rooted, 1: []})).outcome is Outcome.HEALTHY


def batch(sequence: int, count: int, state: str, *, size: int = 4) -> list[Record]:
    """Records inside a batch have no state of their own."""
    parts = [
        record(sequence, "nccl:_all_gather_base", sizes=[[size]], state=WAITING, retired=False) for _ in range(count)
    ]
    return [*parts, record(sequence, "nccl:ALLGATHER_coalesced", sizes=[], state=state)]


def test_a_batch_is_one_collective_with_its_end_records_state() -> None:
    done = [*batch(1, 3, "completed"), record(2)]
    assert report(job(2, {0: done, 1: done})).outcome is Outcome.HEALTHY
    hung = job(2, {0: [*done, *batch(3, 2, WAITING)], 1: done})
    (stall,) = hung.stalls
    assert (stall.sequence, stall.waiting[0].operation.name) == (3, "coalesced 2 _all_gather_base")
    assert [absent.ranks for absent in stall.never_entered] == [(1,)]
    ((_, mismatch),) = job(2, {0: batch(1, 3, WAITING), 1: batch(1, 2, WAITING)}).mismatches
    assert mismatch.sequence == 1


def test_a_batch_that_a_ring_has_cut_is_not_compared() -> None:
    cut = content([*batch(1, 3, "completed")[1:], record(2)], {"0": [0, 1]}, first_record=8)
    assert not analyze({0: content([*batch(1, 3, "completed"), record(2)], {"0": [0, 1]}), 1: cut}).mismatches


def p2p(sequence: int, operation: str, state: str = "completed", **options: Any) -> Record:
    return record(sequence, operation, is_p2p=True, state=state, **options)


def test_a_receive_without_its_send_stalls_two_ranks() -> None:
    """Each rank counts its own operations: the numbers of the two sides differ."""
    sender = [p2p(1, "nccl:recv 1<-0"), p2p(2, "nccl:send 1->2")]
    receiver = [p2p(1, "nccl:recv 2<-1"), p2p(2, "nccl:recv 2<-1", WAITING)]
    analysis = job(3, {0: [p2p(1, "nccl:send 0->1")], 1: sender, 2: receiver})
    (stall,) = analysis.stalls
    assert stall.is_p2p and stall.waiting[0].ranks == (2,) and stall.waiting[0].operation.name == "recv 2<-1"
    assert [absent.ranks for absent in stall.never_entered] == [(1,)]
    assert (
        report(analysis).headline
        == "rank 2 in recv 2<-1 seq 2 of group 0 (default_pg), rank 1 last in train_step (train.py:88)"
    )


def test_ranks_of_a_send_are_ranks_of_its_group() -> None:
    dumps = {
        7: content([p2p(1, "nccl:send 1->0", WAITING, group="pp")], {"pp": [3, 7]}),
        3: content([], {"pp": [3, 7]}),
    }
    assert report(analyze(dumps)).culprits == (3,)


def test_a_send_and_its_receive_must_have_the_same_size() -> None:
    analysis = job(2, {0: [p2p(4, "nccl:send 0->1", WAITING)], 1: [p2p(9, "nccl:recv 1<-0", WAITING, sizes=[[8]])]})
    ((_, mismatch),) = analysis.mismatches
    assert mismatch.difference is Difference.SIZE and not analysis.stalls
    same = job(2, {0: [p2p(4, "nccl:send 0->1", WAITING)], 1: [p2p(9, "nccl:recv 1<-0", WAITING)]})
    assert not same.mismatches and not same.stalls


@pytest.mark.parametrize("ends_as_p2p", [True, False])
def test_a_batch_of_sends_has_the_state_of_its_end(ends_as_p2p: bool) -> None:
    parts = [p2p(1, "nccl:send 0->1", WAITING, retired=False), p2p(1, "nccl:recv 0<-1", WAITING, retired=False)]
    done = [*parts, record(1, "nccl:coalesced", sizes=[], is_p2p=ends_as_p2p)]
    analysis = job(2, {0: done, 1: []})
    assert not analysis.stalls and not analysis.mismatches
    # Layouts before 2.7 do not count a batch, so it has the number of the send before it.
    waiting = [
        p2p(1, "nccl:send 0->1"),
        *parts,
        record(1, "nccl:coalesced", sizes=[], is_p2p=ends_as_p2p, state=WAITING),
    ]
    stalls = job(2, {0: waiting, 1: [p2p(1, "nccl:recv 1<-0")]}).stalls
    assert {stall.waiting[0].operation.name for stall in stalls} == {"send 0->1", "recv 0<-1"}


def test_a_report_is_json() -> None:
    late = [record(1), record(2)]
    found = to_json(report(job(4, {1: late})))
    assert (found["verdict"], found["culprits"], found["ranks"]) == ("hang", [1], [0, 1, 2, 3])
    (stall,) = found["stalls"]
    assert stall["never_entered"][0]["last_finished"]["sequence"] == 2
    assert stall["waiting"][0]["line"] == "train_step (train.py:88)"


@given(data=st.data())
def test_only_stopped_ranks_are_named_whatever_the_rings_kept(data: st.DataObject) -> None:
    """A job of several groups; some ranks stop at some place, the others go on until they wait for them."""
    ranks = data.draw(st.integers(2, 5), "ranks")
    groups = {"0": list(range(ranks)), "1": list(range(ranks))[:2], "2": list(range(ranks))[1:]}
    plan = data.draw(st.lists(st.sampled_from(["0", "1", "2"]), min_size=1, max_size=12), "plan")
    stops = {rank: data.draw(st.none() | st.integers(0, len(plan) - 1)) for rank in range(ranks)}
    if all(stop is not None for stop in stops.values()):
        stops[0] = None
    records: dict[int, list[Record]] = {rank: [] for rank in range(ranks)}
    blocked: set[int] = set()
    counts = dict.fromkeys(groups, 0)
    for step, name in enumerate(plan):
        counts[name] += 1
        halted = {rank for rank, stop in stops.items() if stop is not None and stop <= step}
        entering = [rank for rank in groups[name] if rank not in halted | blocked]
        finishes = entering == groups[name]
        for rank in entering:
            state = "completed" if finishes else WAITING
            records[rank].append(record(counts[name], group=name, description="", state=state))
        blocked |= set() if finishes else set(entering)
    dumps = {}
    for rank, mine in records.items():
        kept = data.draw(st.integers(1, 12), "ring")
        dropped = max(len(mine) - kept, 0)
        dumps[rank] = content(mine[dropped:], groups, first_record=dropped)
    analysis = analyze(dumps)
    stopped = {rank for rank, stop in stops.items() if stop is not None}
    for stall in analysis.stalls:
        waiting = {rank for at in stall.waiting for rank in at.ranks}
        never = {rank for absent in stall.never_entered for rank in absent.ranks}
        assert waiting <= blocked and never <= stopped | blocked
        assert not never & waiting and not stall.no_dump
        if stall.is_root:
            assert never & stopped - blocked
    assert {rank for stall in analysis.stalls for at in stall.waiting for rank in at.ranks} == blocked
    assert set(report(analysis).culprits) <= stopped and not analysis.mismatches
    if analysis.records:
        assert (report(analysis).outcome is Outcome.HEALTHY) is not bool(blocked)


@given(
    st.dictionaries(
        st.integers(0, 5),
        st.lists(
            st.builds(
                record,
                st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 3),
                st.sampled_from(
                    ["nccl:all_reduce", "gloo:barrier", "nccl:send 0->1", "nccl:recv 9<-0", "nccl:coalesced", "x"]
                ),
                group=st.sampled_from(["0", "1", "2"]),
                sizes=st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2),
                state=st.sampled_from(["completed", "started", WAITING, "?"]),
                retired=st.booleans(),
                is_p2p=st.booleans(),
            ),
            max_size=8,
        ),
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_any_records_are_analysed(records: dict[int, list[Record]], first: int) -> None:
    groups = {"0": [0, 1], "1": [4, 5, 6]}
    found = report(analyze({rank: content(mine, groups, first_record=first) for rank, mine in records.items()}))
    assert found.headline and to_json(found)["verdict"]
