from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.collectives.flight_recorder.catalog import DumpError
from rankscope.analysis.collectives.flight_recorder.report import Outcome, Report
from rankscope.analysis.collectives.flight_recorder.tail import MAX_GROUPS, MAX_TAIL_BYTES, make_tail, match_tails
from tests.unit.analysis.collectives.flight_recorder.made_dumps import (
    LAYOUTS,
    Record,
    as_json,
    as_pickle,
    content,
    hung_job,
    record,
)

WAITING = "scheduled"


def match(records: dict[int, list[Record]], groups: dict[str, Any] | None = None, **options: Any) -> Report:
    groups = groups or {"0": range(len(records))}
    return match_tails({rank: make_tail(as_pickle(content(each, groups, **options))) for rank, each in records.items()})


def entries(tail: bytes) -> list[Record]:
    found: list[Record] = json.loads(tail)["entries"]
    return found


def test_a_hung_jobs_tails_name_the_rank_that_never_entered() -> None:
    found = match_tails({rank: make_tail(dump) for rank, dump in hung_job().items()})
    assert (found.outcome, found.culprits) == (Outcome.HANG, (17,))
    waiting = "63 ranks in all_reduce seq 1041 of group 0 (default_pg)"
    assert found.headline == f"{waiting}, rank 17 last in barrier seq 3 of group 1 (ckpt)"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_matched(layout: str) -> None:
    waits = [record(1), record(2, state=WAITING)]
    found = match({0: waits, 1: waits, 2: [record(1)]}, layout=layout)
    assert (found.outcome, found.culprits) == (Outcome.HANG, (2,))


def test_a_tail_keeps_each_groups_last_records_without_stacks() -> None:
    records = [record(number) for number in range(500)] + [record(1, group="tp", description="tp")]
    kept = entries(make_tail(as_pickle(content(records, {"0": [0, 1], "tp": [0, 1]}))))
    assert [one["collective_seq_id"] for one in kept] == [*range(436, 500), 1]
    assert not any("frames" in one for one in kept)


def test_a_lagging_rank_is_named_although_both_rings_are_cut() -> None:
    busy = [record(number, group="tp") for number in range(400)]
    groups = {"0": range(3), "tp": range(3)}
    ahead = [record(1), record(2), *busy, record(3, state=WAITING)]
    found = match({0: ahead, 1: ahead, 2: [record(1), record(2), *busy]}, groups)
    assert (found.outcome, found.culprits) == (Outcome.HANG, (2,))


def test_the_first_of_many_records_in_flight_is_kept() -> None:
    """The host runs ahead of the device, so the record that explains the hang is not among the last."""
    queue = [record(number, state=WAITING) for number in range(41, 300)]
    odd = [record(41, "nccl:barrier", state=WAITING)]
    past = [record(number) for number in range(1, 41)]
    found = match({0: past + queue, 1: past + queue, 2: past + odd})
    assert (found.outcome, found.culprits) == (Outcome.HANG, (2,))
    assert found.headline.startswith("different operations in seq 41 of group 0")


def test_a_tail_without_the_newest_records_accuses_nobody() -> None:
    """Sends that were cut off are not missing."""
    sends = [record(number, "nccl:send 0->1", is_p2p=True, state=WAITING) for number in range(200)]
    receives = [record(number, "nccl:recv 1<-0", is_p2p=True, state=WAITING) for number in range(20)]
    past = [record(number) for number in range(100)]
    found = match({0: sends, 1: [*past, *receives, *(record(100 + one, state=WAITING) for one in range(50))]})
    assert 0 not in found.culprits


def test_a_rank_without_any_collective_has_not_entered() -> None:
    waits = [record(1, state=WAITING)]
    assert match({0: waits, 1: waits, 2: []}).culprits == (2,)


def test_a_recorder_that_ended_collectives_without_events_is_matched() -> None:
    """gloo retires a record when it ends."""
    done = [record(number, "gloo:all_reduce", state=WAITING, retired=True) for number in (1, 2)]
    waits = [*done, record(3, "gloo:all_reduce", state=WAITING, retired=False)]
    assert match({0: waits, 1: waits, 2: done}).culprits == (2,)


def test_tails_are_small_whatever_the_dump_holds() -> None:
    many_groups = [record(one, group=f"g{one}", description="d" * 300) for one in range(1000)]
    assert len({one["process_group"][0] for one in entries(make_tail(as_pickle(content(many_groups, {}))))}) <= 64
    wide = [record(one, sizes=[[4]] * 300) for one in range(64)]
    crowded = content([record(1)], {"0": range(16384)})
    for dump in (content(many_groups, {}), content(wide, {"0": [0]}), crowded):
        tail = make_tail(as_pickle(dump))
        assert entries(tail) and len(tail) <= MAX_TAIL_BYTES
    assert MAX_GROUPS == 64


@pytest.mark.parametrize(
    "change",
    [
        {"profiling_name": "x" * 100_000},
        {"input_sizes": [[1]] * 100_000},
        {"input_sizes": [[2**70]]},
        {"process_group": {"a": 1, "b": 2}},
        {"state": [[[]]]},
        {"frames": []},
    ],
)
def test_a_hostile_record_is_refused_or_cleaned(change: Record) -> None:
    dump = content([record(1)], {"0": [0, 1]})
    dump["entries"][0] |= change
    try:
        tail = make_tail(as_pickle(dump))
    except DumpError:
        return
    assert len(tail) <= MAX_TAIL_BYTES
    match_tails({0: tail, 1: tail})


def test_a_list_that_contains_itself_takes_no_time() -> None:
    nested: Any = []
    for _ in range(60):
        nested = [nested, nested]
    dump = content([record(1)], {"0": [0, 1]})
    dump["pg_config"]["0"]["ranks"] = nested
    assert entries(make_tail(as_pickle(dump)))


def test_an_unreadable_tail_counts_as_a_missing_one() -> None:
    tails = {rank: make_tail(dump) for rank, dump in hung_job(8, 3).items()}
    spoiled = [
        b"",
        b"{",
        b"[" * 10_000,
        pickle.dumps(print),
        b'{"version": "2.10", "entries": [1]}',
        b"{" + b" " * 2**17,
    ]
    for bad in spoiled:
        found = match_tails(tails | {3: bad})
        assert (found.culprits, found.analysis.no_dump) == ((3,), (3,))
    assert match_tails({}).outcome is Outcome.INSUFFICIENT_DATA


def test_a_dump_without_collectives_is_refused_with_the_reason() -> None:
    dump = content([], {"0": [0, 1]})
    dump["pg_status"] = {"0": {"last_enqueued_collective": 7}}
    with pytest.raises(DumpError, match="without collectives"):
        make_tail(as_json(dump))


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=400), at=st.integers(0, 3000))
def test_any_bytes_give_a_tail_or_a_reason(data: bytes, at: int) -> None:
    dump = bytearray(hung_job(2, 1)[0])
    dump[at : at + len(data)] = data
    try:
        tail = make_tail(bytes(dump))
    except DumpError:
        return
    match_tails({0: tail, 1: data})
