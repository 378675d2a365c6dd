"""The reader against json.load: whatever the formatting, the columns hold what the file says, to the nanosecond."""

from __future__ import annotations

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.analysis.traces.reader import json_stream
from rankscope.analysis.traces.reader.metadata import MAX_MEMBERS
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import ABSENT, Category, ProcessGroup, Trace
from rankscope.common.text import printable
from tests.shared_data import H200, shared

CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.DRIVER,
    "cuda_sync": Category.SYNC,
    "user_annotation": Category.USER_ANNOTATION,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
}
HOST_ONLY = (Category.CPU_OP, Category.USER_ANNOTATION, Category.PYTHON)
DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


def row_of(event: dict[str, Any], base_ns: int) -> tuple[Any, ...]:
    """What the columns should hold of one event, worked out slowly."""
    category = CATEGORIES.get(event.get("cat", ""), Category.OTHER)
    noted = event.get("args") or {}
    told = {} if category in HOST_ONLY else noted
    process, thread = (value if isinstance(value, int) else ABSENT for value in (event["pid"], event["tid"]))
    device, stream = told.get("device", ABSENT), told.get("stream", ABSENT)
    if category in DEVICE_WORK:
        device, stream = (process if device == ABSENT else device), (thread if stream == ABSENT else stream)
        process, thread = device, stream
    if category == Category.GPU_ANNOTATION and device == ABSENT:
        device = process
    return (
        base_ns + round(event["ts"] * 1000),
        round(event["dur"] * 1000),
        category,
        printable(event["name"]),
        process,
        thread,
        device,
        stream,
        told.get("correlation", ABSENT),
        noted.get("External id", ABSENT),
        told.get("bytes", ABSENT),
    )


def rows_of(trace: Trace) -> list[tuple[Any, ...]]:
    columns = (
        trace.start_ns + trace.base_ns,
        trace.duration_ns,
        trace.category,
        [trace.names[index] for index in trace.name],
        *(trace.process, trace.thread, trace.device, trace.stream),
        *(trace.correlation, trace.external_id, trace.size_bytes),
    )
    return list(zip(*(list(column) for column in columns), strict=True))


def expected_rows(text: bytes) -> list[tuple[Any, ...]]:
    whole = json.loads(text, parse_float=Decimal)
    rows = [row_of(event, whole.get("baseTimeNanoseconds", 0)) for event in whole["traceEvents"] if event["ph"] == "X"]
    return sorted(rows, key=lambda row: (row[0], -row[1]))


@pytest.mark.parametrize("name", ["nccl_world1_3steps", "gloo_2ranks_rank0", "gloo_2ranks_rank1"])
def test_our_own_traces_read_as_json_reads_them(name: str) -> None:
    packed = (H200 / f"{name}.json.gz").read_bytes()
    trace = read_trace(packed)
    assert rows_of(trace) == expected_rows(gzip.decompress(packed))
    assert trace.repairs == ()
    assert trace.devices[0].name == "NVIDIA H200"


@pytest.mark.parametrize("rank", [0, 1])
def test_borrowed_traces_read_as_json_reads_them(rank: int) -> None:
    packed = (shared("hta_pair") / f"rank-{rank}.json.gz").read_bytes()
    trace = read_trace(packed)
    assert rows_of(trace) == expected_rows(gzip.decompress(packed))
    assert (trace.rank, trace.world_size, trace.backend, trace.repairs) == (rank, 128, "nccl", ())
    noted = trace.collectives
    first = {key: trace.named(int(getattr(noted, key)[0])) for key in ("collective", "element_type")}
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    calls = [each for each in events if each["name"].startswith("nccl:") and "Input Dims" in each["args"]]
    calls.sort(key=lambda each: (each["ts"], -each["dur"]))
    assert first["collective"] == calls[0]["name"].removeprefix("nccl:")
    assert noted.in_elements.tolist() == [each["args"]["Input Dims"][0][0] for each in calls]


def write_differently(whole: dict[str, Any], how: random.Random) -> bytes:
    """The same JSON: pretty, minified, one event a line, keys and members in any order."""
    events = [dict(how.sample(list(event.items()), len(event))) for event in whole["traceEvents"]]
    shuffled = dict(how.sample(list({**whole, "traceEvents": events}.items()), len(whole)))
    style = how.choice(["pretty", "minified", "lines", "odd"])
    if style == "pretty":
        return json.dumps(shuffled, indent=how.choice([1, 2, "\t"]), ensure_ascii=how.random() < 0.5).encode()
    if style == "minified":
        return json.dumps(shuffled, separators=(",", ":")).encode()
    separator = {"lines": ",\n", "odd": " \r\n , \t"}[style]
    body = separator.join(json.dumps(event) for event in events)
    others = {key: value for key, value in shuffled.items() if key != "traceEvents"}
    return (json.dumps(others)[:-1] + (", " if others else "") + f'"traceEvents" : [ {body}\n]  \n}}').encode()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['a "quoted" name', "back\\slash", '},{"ph":"X"', "], ", '"traceEvents": [', "é🙂", "\\", '\\"']
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "External id": st.integers(0, 2**40),
        "device": st.integers(0, 7),
        "stream": st.integers(-1, 99),
        "correlation": st.integers(0, 2**31),
        "bytes": st.integers(0, 2**50),
        "own": anything,
        "grid": st.lists(st.integers(0, 9), max_size=3),
    },
)
event = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "s", "f", "M", "C"]),
        "name": texts,
        "pid": st.integers(0, 9) | st.just("Spans"),
        "tid": st.integers(0, 2**40) | st.just(""),
        "ts": st.integers(0, 10**16 // 6) | st.integers(0, 7 * 10**15).map(lambda ns: ns / 1000),
        "dur": st.integers(0, 10**9) | st.integers(0, 10**9).map(lambda ns: ns / 1000),
    },
    optional={"cat": st.sampled_from([*CATEGORIES, "Trace", "fwdbwd"]), "args": arguments, "other": anything},
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(event, max_size=30), seed=st.integers(0, 2**32), piece=st.sampled_from([16, 200, 3000]), packed=...
)
def test_any_events_in_any_formatting_give_the_same_columns(
    monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]], seed: int, piece: int, packed: bool
) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", piece)
    whole = {"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
    whole["distributedInfo"] = {"backend": "nccl", "rank": 3, "world_size": 8}
    text = write_differently(whole, random.Random(seed))
    blocks = [text[start : start + 50] for start in range(0, len(text), 50)]
    trace = read_trace(gzip.compress(text, 1) if packed else blocks)
    assert sorted(rows_of(trace)) == sorted(expected_rows(text))
    assert (trace.rank, trace.world_size, trace.backend, trace.repairs) == (3, 8, "nccl", ())
    ends = [(start, -duration) for start, duration in zip(trace.start_ns, trace.duration_ns, strict=True)]
    assert ends == sorted(ends)


def read_events(*events: dict[str, Any], **others: Any) -> Trace:
    return read_trace(json.dumps({**others, "traceEvents": list(events)}).encode())


def span(**fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": 0, "dur": 1, **fields}


@pytest.mark.parametrize(
    ("written", "nanoseconds"),
    [
        ("1682725898236567", 1682725898236567000),
        ("1682725898236567.123", 1682725898236567123),  # a float would be off by up to 125 ns
        ("1682725898236567.9", 1682725898236567900),
        ('"1682725898236567.123"', 1682725898236567123),
        ("3844040914744.049", 3844040914744049),
        ("-0.001", -1),
        ("1.5e3", 1500000),
    ],
)
def test_a_time_is_exact_to_the_nanosecond_in_any_notation(written: str, nanoseconds: int) -> None:
    text = json.dumps({"traceEvents": [span(ts="TS")]}).replace('"TS"', written)
    trace = read_trace(text.encode())
    assert trace.base_ns + int(trace.start_ns[0]) == nanoseconds
    assert abs(int(trace.start_ns[0])) <= 1_000_000_000, "near the base, so that floats of it stay exact"


def test_many_unix_times_with_three_decimals_are_exact() -> None:
    microseconds = [f"{1682725898236567 + 13 * place}.{place % 1000:03}" for place in range(500)]
    body = ",".join(f'{{"ph":"X","name":"k","ts":{text},"dur":1.001}}' for text in microseconds)
    trace = read_trace(f'{{"traceEvents":[{body}]}}'.encode())
    assert (trace.start_ns + trace.base_ns).tolist() == [int(text.replace(".", "")) for text in microseconds]


def test_beginnings_and_ends_become_whole_events() -> None:
    trace = read_events(
        {"ph": "E", "pid": 1, "tid": "main", "ts": 1},  # began before the trace
        {"ph": "B", "name": "outer", "pid": 1, "tid": "main", "ts": 10},
        {"ph": "B", "name": "inner", "pid": 1, "tid": "main", "ts": 11},
        {"ph": "B", "name": "other", "pid": 1, "tid": "aside", "ts": 12},
        {"ph": "E", "pid": 1, "tid": "main", "ts": 13},
        {"ph": "E", "pid": 1, "tid": "main", "ts": 20},
        {"ph": "E", "pid": 1, "tid": "aside", "ts": 30},
        {"ph": "B", "name": "unfinished", "pid": 1, "tid": "main", "ts": 40},
    )
    spans = {
        trace.named(int(name)): int(duration) for name, duration in zip(trace.name, trace.duration_ns, strict=True)
    }
    assert spans == {"outer": 10_000, "inner": 2_000, "other": 18_000}
    assert trace.repairs == ("begin or end event without its counterpart dropped: 2 times",)


@pytest.mark.parametrize(
    ("written", "name", "category"),
    [
        ("Kernel", "gemm", Category.KERNEL),
        ("Memcpy", "Memcpy HtoD", Category.MEMCPY),
        ("Runtime", "cudaLaunchKernel", Category.RUNTIME),
        ("Operator", "aten::add", Category.CPU_OP),
        ("Operator", "ProfilerStep#3", Category.USER_ANNOTATION),
        ("Operator", "nccl:all_reduce", Category.USER_ANNOTATION),
        (None, "hipLaunchKernel", Category.RUNTIME),
        ("hip_runtime", "hipLaunchKernel", Category.RUNTIME),
        (None, "cuLaunchKernel", Category.DRIVER),
        (None, "custom", Category.OTHER),
        (["odd"], "custom", Category.OTHER),
    ],
)
def test_old_and_foreign_categories_are_known(written: Any, name: str, category: Category) -> None:
    trace = read_events(span(cat=written, name=name))
    assert trace.category.tolist() == [category]


def test_an_old_traces_kernel_runs_on_its_threads_stream() -> None:
    trace = read_events(
        span(cat="Kernel", pid=1, tid=7, args={"correlation": 5}),
        span(cat="kernel", pid=0, tid=9, args={"device": 2, "stream": 20}, ts=1),
        span(cat="cuda_sync", pid=0, tid=9, args={"device": 0, "stream": 4294967295}, ts=2),
        span(cat="gpu_user_annotation", pid=3, tid=7, ts=3),
    )
    assert trace.device.tolist() == [1, 2, 0, 3]
    assert trace.stream.tolist() == [7, 20, ABSENT, ABSENT]
    assert trace.thread.tolist() == [7, 20, 9, 7]


NOTED = {
    "Collective name": "_allgather_base",
    "In msg nelems": 1024,
    "Out msg nelems": "4096",
    "Group size": 4,
    "dtype": "BFloat16",
    "Process Group Name": "3",
    "Process Group Description": "fsdp",
    "Process Group Ranks": "[0, 2, ..., 6]",
    "Global rank start": 0,
    "Global rank stride": 2,
    "Rank": 2,
    "Seq": 17,
    "Is asynchronized op": True,
    "External id": 5,
}


def test_what_the_profiler_notes_about_collectives_is_kept() -> None:
    trace = read_events(
        span(ts=None, name="left out", args={"Collective name": "barrier"}),
        span(ts=5, name="later", cat="kernel", args={"Collective name": "send", "Dst Rank": 3, "dtype": [1]}),
        span(ts=1, name="record_param_comms", args=NOTED),
        span(ts=2, name="c10d::x", args={"Collective name": None, "Process Group Name": {"an": "object"}, "Seq": None}),
    )
    noted = trace.collectives
    assert noted.row.tolist() == [0, 1, 2]
    assert [trace.named(int(trace.name[row])) for row in noted.row] == ["record_param_comms", "c10d::x", "later"]
    assert trace.named(int(noted.collective[0])) == "_allgather_base"
    assert (trace.named(int(noted.group[0])), trace.named(int(noted.group_description[0]))) == ("3", "fsdp")
    assert trace.named(int(noted.element_type[0])) == "BFloat16"
    columns = (noted.group_size, noted.sequence, noted.in_elements, noted.out_elements, noted.peer)
    assert [int(column[0]) for column in columns] == [4, 17, 1024, 4096, ABSENT]
    assert [int(column[2]) for column in columns] == [ABSENT, ABSENT, ABSENT, ABSENT, 3]
    assert trace.groups[0] == ProcessGroup("3", "fsdp", (0, 2, 4, 6))
    assert (trace.rank, trace.world_size) == (4, None), "third of ranks 0, 2, 4, 6"


@pytest.mark.parametrize(
    ("listed", "stride", "ranks"),
    [
        ("[5, 1, 3]", 2, (5, 1, 3)),
        ("[0, 2]", 2, (0, 2, 4)),  # shortened
        ("[0, 2, ..., 8]", -1, ()),  # shortened, and not regular
        ([0, 2, 4], 2, (0, 2, 4)),
    ],
)
def test_noted_group_ranks_are_used_unless_the_list_is_shortened(
    listed: Any, stride: int, ranks: tuple[int, ...]
) -> None:
    noted = {"Process Group Ranks": listed, "Group size": 3, "Global rank start": 0, "Global rank stride": stride}
    trace = read_events(span(args={"Collective name": "allreduce", "Process Group Name": "9", **noted}))
    assert trace.groups == (ProcessGroup("9", "", ranks),)


def test_groups_that_claim_a_million_ranks_keep_memory_bounded() -> None:
    claim = {"Collective name": "allreduce", "Group size": (1 << 20) - 1, "Global rank start": 0, "Rank": 7}
    args = [{**claim, "Global rank stride": 1, "Process Group Name": str(number)} for number in range(100)]
    trace = read_events(*(span(ts=number, args=each) for number, each in enumerate(args)))
    assert len(trace.groups) == 100 and trace.rank == 7
    assert 0 < sum(len(group.ranks) for group in trace.groups) <= MAX_MEMBERS


@pytest.mark.parametrize(
    "config",
    [
        [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}],
        [{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": "[0, 1]"}, "junk"],
        {"0": {"pg_desc": "default_pg", "ranks": [0, 1]}},
        '[{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]',
    ],
)
def test_process_groups_are_read_in_every_shape_torch_wrote(config: Any) -> None:
    info = {"rank": "1", "world_size": 2, "backend": "undefined", "pg_config": config}
    trace = read_events(span(cat="user_annotation", name="gloo:all_reduce"), distributedInfo=info)
    assert trace.groups == (ProcessGroup("0", "default_pg", (0, 1)),)
    assert (trace.rank, trace.world_size, trace.backend) == (1, 2, "gloo")


def test_sizes_of_annotated_calls_come_from_their_inputs() -> None:
    call = {"cat": "user_annotation", "name": "nccl:_reduce_scatter_base"}
    trace = read_events(
        span(**call, args={"Input Dims": [[4, 8], [2], []], "Input type": ["float", "float", "Scalar"]}),
        span(**call, args={"Input Dims": [[[3], [5]]], "Input type": ["c10::BFloat16"]}, ts=1),
        span(**call, ts=2),
        span(name="aten::mm", args={"Input Dims": [[4, 8]], "Input type": ["float"]}, ts=3),
    )
    assert trace.collectives.row.tolist() == [0, 1]
    assert trace.collectives.in_elements.tolist() == [34, 8]
    assert [trace.named(int(index)) for index in trace.collectives.element_type] == ["float", "c10::BFloat16"]


def test_allocations_are_kept_in_the_order_of_time() -> None:
    def allocation(ts: float, change: int, total: int, kind: int) -> dict[str, Any]:
        noted = {"Device Type": kind, "Device Id": kind - 1, "Bytes": change, "Total Allocated": total, "Addr": 1}
        return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": noted}

    trace = read_events(
        span(ts=5), allocation(3, -512, 0, 1), allocation(2.5, 512, 512, 1), allocation(4, 64, 64, 0), cat="x"
    )
    assert len(trace) == 1
    assert np.diff(trace.memory.time_ns).tolist() == [500, 1000]
    assert trace.memory.change_bytes.tolist() == [512, -512, 64]
    assert trace.memory.allocated_bytes.tolist() == [512, 0, 64]
    assert trace.memory.reserved_bytes.tolist() == [ABSENT] * 3
    assert trace.memory.on_device.tolist() == [True, True, False]
    assert [column.tolist() for column in (trace.memory.address, trace.memory.thread)] == [[1] * 3] * 2
    assert (trace.memory.device.tolist(), int(trace.start_ns[0] - trace.memory.time_ns[0])) == ([0, 0, ABSENT], 2500)


def test_a_bare_array_is_a_trace_too(tmp_path: Path) -> None:
    assert len(read_trace(b'\xef\xbb\xbf \n[{"ph":"X","ts":1,"dur":2,"name":"a"}]\n')) == 1
    assert len(read_trace(memoryview(b"[]"))) == 0
    assert len(read_trace(b'{"traceEvents": [ ], "traceName": "x"}')) == 0
