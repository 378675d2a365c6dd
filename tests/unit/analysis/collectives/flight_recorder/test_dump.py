from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, DumpError
from rankscope.analysis.collectives.flight_recorder.dump import Dump, State, read_dump
from tests.unit.analysis.collectives.flight_recorder.made_dumps import (
    LAYOUTS,
    as_json,
    as_pickle,
    content,
    frames,
    record,
)

RECORDS = [
    record(1, "nccl:_all_gather_base", sizes=[[8, 2]], outputs=[[64]]),
    record(2, state="started"),
    record(3, "nccl:send 0->1", is_p2p=True, group="5", description="pp", state="scheduled"),
]
GROUPS = {"0": [0, 1, 2, 3], "5": [0, 1]}


def check(dump: Dump, catalog: Catalog, dtype: str) -> None:
    assert dump.sequence.tolist() == [1, 2, 3] and dump.is_p2p.tolist() == [False, False, True]
    assert dump.state.tolist() == [State.COMPLETED, State.PENDING, State.PENDING]
    gather, reduce, send = (catalog.operations[number] for number in dump.operation.tolist())
    assert (gather.name, gather.kind) == ("_all_gather_base", CollectiveKind.ALL_GATHER)
    assert (gather.inputs, gather.outputs, gather.shapes) == ((16,), (64,), f"[8, 2] {dtype}")
    assert reduce.name == "all_reduce" and reduce.input_types == (dtype,)
    assert (send.kind, send.source, send.destination) == (CollectiveKind.SEND, 0, 1)
    world, pipeline = (catalog.groups[number] for number in dump.group[1:].tolist())
    assert (world.label, world.members) == ("0 (default_pg)", (0, 1, 2, 3))
    assert (pipeline.label, pipeline.members) == ("5 (pp)", (0, 1))
    assert dump.is_from_start and dump.has_records


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str, protocol: int) -> None:
    catalog = Catalog()
    dump = read_dump(as_pickle(content(RECORDS, GROUPS, layout=layout), protocol), catalog)
    assert dump.layout == layout
    check(dump, catalog, "float" if layout == "2.2" else "Float")
    assert {catalog.lines[number] for number in dump.line.tolist()} == {"train_step (train.py:88)"}


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_the_json_variant_has_the_same_records_without_lines(layout: str) -> None:
    catalog = Catalog()
    dump = read_dump(as_json(content(RECORDS, GROUPS, layout=layout)), catalog)
    check(dump, catalog, "Float")
    assert set(dump.line.tolist()) == {-1}


def test_a_record_without_types_is_read() -> None:
    old = [{key: value for key, value in one.items() if "dtypes" not in key} for one in RECORDS]
    catalog = Catalog()
    dump = read_dump(as_pickle(content([], GROUPS, layout="2.2") | {"entries": [{"record_id": 0, **old[1]}]}), catalog)
    assert catalog.operations[int(dump.operation[0])].input_types == ()


@pytest.mark.parametrize(
    ("version", "step"),
    [("1.5", "use torch ≥ 2.4"), ("3.0", "update Rankscope"), (7, "give files"), ("x", "give files"), (None, "give")],
)
def test_other_layouts_are_refused_with_the_next_step(version: Any, step: str) -> None:
    with pytest.raises(DumpError, match=step):
        read_dump(as_pickle(content(RECORDS, GROUPS) | {"version": version}), Catalog())


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b"[]", b'{"version": "2.10", "entries": [1]}', b"\x80\x02]."], ids=repr
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(DumpError, match="give files that torch wrote"):
        read_dump(data, Catalog())


def test_the_ranks_of_a_group_may_be_a_list() -> None:
    dump = content(RECORDS, GROUPS)
    dump["pg_config"]["0"]["ranks"] = [3, 1]
    catalog = Catalog()
    number = int(read_dump(as_pickle(dump), catalog).group[0])
    assert catalog.groups[number].members == (1, 3)


def test_gloo_describes_a_group_without_a_name() -> None:
    dump = content([record(1, "gloo:all_reduce")], {"": [0, 1, 2]})
    catalog = Catalog()
    assert read_dump(as_pickle(dump), catalog).mentioned == (0, 1, 2)
    assert [(group.name, group.members) for group in catalog.groups] == [("0", None)]


def test_the_most_recent_line_of_user_code_is_named() -> None:
    def line(stack: list[dict[str, Any]]) -> str:
        catalog = Catalog()
        dump = read_dump(as_pickle(content([record(1) | {"frames": stack}], GROUPS)), catalog)
        return catalog.lines[int(dump.line[0])]

    library = frames("f", "/app/f.py", 1)[:2]
    native = [{"name": "c10d::work", "filename": "/build/ProcessGroupNCCL.cpp", "line": 12}]
    source = [{"name": "all_reduce", "filename": "/src/pytorch/torch/distributed/distributed_c10d.py", "line": 1}]
    assert line([*native, *source, *frames("save_checkpoint", "/app/ckpt.py", 51)]) == "save_checkpoint (ckpt.py:51)"
    assert line(library) == "all_reduce (distributed_c10d.py:2810)"


def test_gloo_records_end_without_a_result() -> None:
    waiting = record(1, "gloo:all_reduce", state="scheduled", retired=False)
    ended = record(2, "gloo:all_reduce", state="scheduled", retired=True)
    timed_out = record(3, "nccl:all_reduce", state="scheduled", retired=True)
    dump = read_dump(as_pickle(content([waiting, ended, timed_out], GROUPS)), Catalog())
    assert dump.state.tolist() == [State.PENDING, State.ENDED, State.PENDING]


def test_a_ring_that_dropped_records_is_known() -> None:
    whole = read_dump(as_pickle(content(RECORDS, GROUPS)), Catalog())
    ring = read_dump(as_pickle(content(RECORDS, GROUPS, first_record=100)), Catalog())
    active = read_dump(as_pickle(content(RECORDS, GROUPS, record_ids=[4, 9, 17])), Catalog())
    assert (whole.is_gapless, whole.is_from_start) == (True, True)
    assert (ring.is_gapless, ring.is_from_start) == (True, False)
    assert (active.is_gapless, active.is_from_start) == (False, False)


def test_a_dump_without_records_is_known() -> None:
    dump = content(RECORDS, GROUPS)
    without = {key: value for key, value in dump.items() if key != "entries"}
    assert not read_dump(as_pickle(without), Catalog()).has_records
    assert not read_dump(as_pickle(dump | {"entries": []}), Catalog()).has_records  # only those in flight, and none is
    nothing_yet = read_dump(as_json(content([], GROUPS)), Catalog())
    assert nothing_yet.has_records and nothing_yet.is_from_start


def test_text_of_a_dump_cannot_control_a_terminal() -> None:
    catalog = Catalog()
    bad = "\x1b[2J\u202e"
    records = [record(1, f"nccl:{bad}", description=bad, dtype=bad, at=(bad, f"/app/{bad}.py", 1))]
    read_dump(as_pickle(content(records, GROUPS)), catalog)
    group, operation = catalog.groups[0], catalog.operations[0]
    texts = [group.label, operation.name, operation.shapes, *operation.input_types, *catalog.lines]
    assert all(text.isprintable() for text in texts)


@pytest.mark.parametrize(
    "hostile",
    [
        {"entries": [record(1) | {"record_id": 0, "input_sizes": [[1 << 40] * 60]}]},
        {"entries": [record(1) | {"record_id": 1 << 100}]},
        {"entries": [record(1) | {"record_id": []}]},
        {"entries": [record(1) | {"record_id": True}]},
        {"entries": [record(1 << 100) | {"record_id": 0}]},
        {"entries": [record(1) | {"record_id": 0, "collective_seq_id": "1"}]},
        {"entries": [record(1) | {"record_id": 0, "input_sizes": [[1] * 65]}]},
        {"entries": [record(1) | {"record_id": 0, "input_sizes": [["a"]]}]},
        {"entries": [record(1) | {"record_id": 0, "input_sizes": [[float("nan")]]}]},
        {"entries": [record(1) | {"record_id": 0, "process_group": []}]},
        {"entries": [record(1) | {"record_id": 0, "frames": [{"name": 1, "filename": "/a.py", "line": 1}]}]},
        {"entries": [record(1) | {"record_id": 0, "frames": {"a": 1}}]},
        {"entries": [None]},
        {"entries": {"a": 1}},
        {"pg_config": [1]},
        {"pg_config": {"0": {"ranks": "[__import__('os')]"}}},
        {"pg_config": {"0": {"ranks": [[]]}}},
        {"rank": "x"},
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_records_are_refused_or_ignored(hostile: dict[str, Any]) -> None:
    try:
        dump = read_dump(as_pickle(content([], GROUPS) | hostile), Catalog())
    except DumpError as error:
        assert "give files that torch wrote" in str(error)
    else:
        assert len(dump) <= 1


def test_a_large_list_that_a_small_file_repeats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.analysis.collectives.flight_recorder.dump._MAX_PARTS", 1_000_000)
    shape = [1] * 60
    large = [shape] * 20_000
    for entry in (
        record(1) | {"input_sizes": large},
        record(1) | {"input_dtypes": ["Float"] * 10_000},
        record(1) | {"frames": frames("f", "/site-packages/f.py", 1) * 1_000},
    ):
        dump = content([], GROUPS) | {"entries": [entry | {"record_id": 0}] * 20_000}
        with pytest.raises(DumpError, match="smaller TORCH_FR_BUFFER_SIZE"):
            read_dump(as_pickle(dump), Catalog())


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: ("{" + text).encode()))
def test_arbitrary_bytes_are_refused_with_the_one_error(data: bytes) -> None:
    with pytest.raises(DumpError):
        read_dump(data, Catalog())


@given(data=st.data(), is_json=st.booleans())
def test_a_damaged_dump_is_read_or_raises_dump_error(data: st.DataObject, is_json: bool) -> None:
    whole = content(RECORDS, GROUPS)
    damaged = bytearray(as_json(whole) if is_json else as_pickle(whole))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        dump = read_dump(bytes(damaged), Catalog())
    except DumpError:
        return
    assert len(dump) == len(dump.sequence) == len(dump.state)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["completed", "[0]"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*RECORDS[0], "ranks"]), inner),
    max_leaves=12,
)


@settings(max_examples=200)
@given(
    entries=st.lists(st.dictionaries(st.sampled_from([*RECORDS[0], "record_id"]), VALUES), max_size=3) | VALUES,
    config=VALUES,
    is_json=st.booleans(),
)
def test_plain_values_are_read_or_raise_dump_error(entries: Any, config: Any, is_json: bool) -> None:
    valid = {"record_id": 0, **RECORDS[0]}
    mixed = [valid | one if isinstance(one, dict) else one for one in entries] if isinstance(entries, list) else entries
    whole = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": mixed}
    try:
        data = json.dumps(whole).encode() if is_json else as_pickle(whole)
        dump = read_dump(data, Catalog())
    except DumpError:
        return
    assert dump.group.dtype == np.int64
