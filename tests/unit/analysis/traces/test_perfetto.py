from __future__ import annotations

import gzip
import json
from collections import Counter
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from rankscope.analysis.step_graph.clock_alignment import ClockShift
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import join_traces
from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto, nanoseconds
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import TraceError
from tests.shared_data import H200

NAMING = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


def _merged(files: list[tuple[int, bytes]], shifts: dict[int, ClockShift] | None = None) -> dict[str, Any]:
    merged: dict[str, Any] = json.loads(b"".join(merge_for_perfetto(files, shifts or {})), parse_float=Decimal)
    return merged


def _file(events: list[dict[str, Any]], **description: Any) -> bytes:
    return json.dumps({"traceEvents": events, **description}).encode()


def _kernel(ts: float, **other: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": ts, "dur": 5.0, **other}


@cache
def _merged_real() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = _merged(_real())["traceEvents"]
    return events


def _real() -> list[tuple[int, bytes]]:
    return [(rank, (H200 / f"gloo_2ranks_rank{rank}.json.gz").read_bytes()) for rank in (0, 1)]


def test_every_event_is_kept_and_ranks_are_processes_in_order() -> None:
    files = _real()
    merged = _merged_real()
    for rank, data in files:
        original = [e for e in json.loads(gzip.decompress(data))["traceEvents"] if e["name"] not in NAMING]
        kept = [e for e in merged if e["pid"] == 1_000_000 + rank and e["name"] not in NAMING]
        what = [(e["ph"], e.get("cat"), e["name"], json.dumps(e.get("args"), default=float)) for e in kept]
        assert what == [(e["ph"], e.get("cat"), e["name"], json.dumps(e.get("args"))) for e in original]
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in merged if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(order, key=lambda pid: order[pid])] == ["rank 0", "rank 1"]
    assert {e["pid"] for e in merged} == set(names)


def test_streams_and_threads_keep_their_events_together_and_their_names() -> None:
    merged = _merged_real()
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in merged if e["name"] == "thread_name"}
    tracks = Counter(named[e["pid"], e["tid"]] for e in merged if e.get("cat") == "kernel" and e["pid"] == 1_000_000)
    original = json.loads(gzip.decompress(_real()[0][1]))["traceEvents"]
    expected = Counter(f"GPU 0 stream {e['tid']}" for e in original if e.get("cat") == "kernel")
    assert tracks == expected
    host = {named[e["pid"], e["tid"]] for e in merged if e.get("cat") == "cpu_op"}
    assert host and all(name.startswith("thread ") for name in host)


def test_arrows_of_different_ranks_never_share_a_number() -> None:
    merged = _merged_real()
    ids = {pid: {e["id"] for e in merged if e["ph"] in "sf" and e["pid"] == pid} for pid in (1_000_000, 1_000_001)}
    assert ids[1_000_000] and not ids[1_000_000] & ids[1_000_001]
    original = json.loads(gzip.decompress(_real()[0][1]))["traceEvents"]
    assert len(ids[1_000_000]) == len({e["id"] for e in original if e["ph"] in "sf"})
    # An arrow binds to the slice on its own track.
    flow = next(e for e in merged if e["ph"] == "f" and e["cat"] == "ac2g" and e["pid"] == 1_000_001)
    assert any(e["ph"] == "X" and e["tid"] == flow["tid"] and e["ts"] == flow["ts"] for e in merged)


def test_collectives_end_together_in_the_merged_trace() -> None:
    files = _real()
    traces = {rank: read_trace(data) for rank, data in files}
    late = {0: traces[0], 1: traces[1]}
    found = join_traces(late, {rank: find_collectives(trace) for rank, trace in late.items()})
    shifts = {0: ClockShift(), 1: ClockShift(found.clocks.shifts[1].offset_ns + 3_000_000)}
    for planted, tolerance in ((found.clocks.shifts, 0), (shifts, 3000)):
        merged = _merged(files, dict(planted))["traceEvents"]
        ends = {
            pid: sorted(e["ts"] + e["dur"] for e in merged if e["name"] == "gloo:all_reduce" and e["pid"] == pid
                        and e["cat"] == "user_annotation")
            for pid in (1_000_000, 1_000_001)
        }  # fmt: skip
        apart = sorted(b - a for a, b in zip(*ends.values(), strict=True))
        assert float(apart[len(apart) // 2]) == pytest.approx(tolerance, abs=2 * (found.clock_residual_us or 0))


def test_times_move_by_the_shift_to_the_nanosecond() -> None:
    unix = 1_682_725_898_094_211
    first, second = _file([_kernel(unix)]), _file([_kernel(94_211.375)], baseTimeNanoseconds=1_682_725_898_000_000_000)
    drifting = ClockShift(1_000_001, -1e-3, 1_682_725_897_094_211_000)
    merged = _merged([(0, first), (3, second)], {3: drifting})
    a, b = (e for e in merged["traceEvents"] if e["ph"] == "X")
    # A second after the drift's origin, a thousandth of it back again.
    assert (b["ts"] - a["ts"]) * 1000 == 375 + 1_000_001 - 1_000_000
    assert b["dur"] == Decimal("4.995")
    assert merged["baseTimeNanoseconds"] + a["ts"] * 1000 == unix * 1000
    assert (a["pid"], b["pid"]) == (1_000_000, 1_000_003)


def test_equal_host_device_and_stream_numbers_stay_apart() -> None:
    events = [
        _kernel(1.0, pid=0), _kernel(2.0, pid=1),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.0},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 3.0, "s": "g"},
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "args": {"name": "unused"}},
    ]  # fmt: skip
    merged = _merged([(2, _file(events))])["traceEvents"]
    tids = [e["tid"] for e in merged if e["ph"] in "Xi"]
    assert len(set(tids)) == 4
    assert "unused" not in json.dumps(merged, default=float)


def test_an_unaligned_clock_does_not_stretch_the_trace() -> None:
    note = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}}
    merged = _merged([(0, _file([note, _kernel(1.7e15)])), (1, _file([_kernel(5.0)]))])["traceEvents"]
    first, second = (e["ts"] for e in merged if e["ph"] == "X")
    assert abs(first - second) < 1000


def test_many_small_pieces_and_no_files_make_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _merged([]) == {"traceEvents": []}
    assert len(_merged([(0, _file([])), (1, _file([_kernel(1.0)]))])["traceEvents"]) == 2 + 2 + 1
    monkeypatch.setattr("rankscope.analysis.traces.reader.json_stream.PIECE_BYTES", 4096)
    assert len(_merged(_real())["traceEvents"]) > 15_000
    with pytest.raises(TraceError, match="without traceEvents"):
        _merged([(0, b'{"events": []}')])


def test_events_with_missing_or_odd_fields_are_kept() -> None:
    odd = [
        {"ph": "X", "name": "no place", "ts": 1, "dur": 2},
        {"ph": "X", "name": "no number", "pid": None, "tid": [1], "ts": "soon"},
        {"ph": "C", "name": "counter", "pid": -1, "tid": -1, "ts": "5.5", "args": {"x": 1}},
        {"name": "bare"},
        {"ph": "b", "name": "asynchronous", "id": "0x12", "pid": 1, "tid": 1, "ts": 1e3},
    ]
    merged = _merged([(0, _file(odd)), (1, _file(odd))])["traceEvents"]
    assert [e["name"] for e in merged if e["name"] not in NAMING] == [e["name"] for e in odd] * 2
    assert len({e["id"] for e in merged if "id" in e}) == 2


@pytest.mark.parametrize(
    "written", [b"9" * 4400, b"1e999999", b"-1e999999", b"99999999999999999", b"nan", b"", b"null"]
)
def test_a_time_beyond_all_clocks_is_none(written: bytes) -> None:
    assert nanoseconds(written) is None


@pytest.mark.parametrize("base", [9 * 10**18, -9 * 10**18, int("9" * 30), 10**4000])
def test_a_base_time_beyond_all_clocks_makes_valid_json(base: int) -> None:
    text = _file([_kernel(5.0)]).replace(
        b'{"traceEvents"', b'{"baseTimeNanoseconds": ' + _digits(base) + b', "traceEvents"'
    )
    assert [event["name"] for event in _merged([(0, text)])["traceEvents"] if event["ph"] == "X"]


def _digits(number: int) -> bytes:
    """Python writes no number of more than 4300 digits."""
    return b"9" * 4400 if number > 10**3999 else str(number).encode()


def test_names_that_are_not_utf8_are_made_so() -> None:
    text = _file([_kernel(5.0, args={"note": "NOTE"})]).replace(b"NOTE", b"\x85")
    assert "\ufffd" in str(_merged([(0, text)])["traceEvents"])
