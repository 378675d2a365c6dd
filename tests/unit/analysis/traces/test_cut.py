from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.cut import WholeSteps, common_run, cut, find_whole_steps, outline
from rankscope.analysis.traces.reader.json_stream import blocks_of
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import find_steps
from rankscope.analysis.traces.trace import Category, Trace, TraceError
from tests.shared_data import H200
from tests.unit.analysis.traces.step_files import UNIX_NS, StepFile

MARK = {"ph": "X", "cat": "user_annotation", "name": "begin", "pid": 494, "tid": 494, "dur": 0}


def _whole(trace: Trace) -> WholeSteps:
    return find_whole_steps(trace, find_steps(trace), break_down(trace))


def _cut(file: StepFile, first: int = 0, count: int = 3) -> dict[str, Any]:
    data = file.text()
    trace = read_trace(data)
    run = _whole(trace).run(first, count)
    stretch = outline(trace).stretch(int(run.start_ns[0]), int(run.end_ns[-1]))
    pieces = cut(map(bytes, blocks_of(data)), stretch, {"rankscope": {"rank": 3}}, distributed={"rank": 3}, mark=MARK)
    left: dict[str, Any] = json.loads(b"".join(pieces))
    return left


def _read(left: dict[str, Any]) -> Trace:
    return read_trace(json.dumps(left).encode())


def test_a_cut_keeps_exactly_the_requested_steps_at_full_length() -> None:
    trace = _read(_cut(StepFile(), first=1, count=3))
    steps = find_steps(trace)
    # The recording began at 30 ms: the step to 100 ms is not whole, the second whole one begins at 200 ms.
    assert ((steps.start_ns + trace.base_ns - UNIX_NS) / 1e6).tolist() == pytest.approx([200, 300, 400], abs=1e-5)
    # The first 20 ms of a step are without an operator, also those of the first.
    assert (steps.end_ns - steps.start_ns).tolist() == pytest.approx([100e6] * 3, abs=10)
    operators = trace.start_ns[trace.of(Category.CPU_OP)] + trace.base_ns - UNIX_NS
    assert operators.min() == pytest.approx(220e6, abs=10) and operators.max() < 500e6


def test_events_that_are_left_are_what_they_were() -> None:
    file = StepFile(lag_ms=5.0)
    original = file.events()
    left = [event for event in _cut(file)["traceEvents"] if event["name"] != "begin"]
    assert 20 < len(left) < len(original)
    assert all(event in original for event in left)


def test_device_work_stays_with_its_launching_call() -> None:
    # Far behind: kernels of the last step run after its end, those of the step before within the first.
    left = _cut(StepFile(lag_ms=60.0), first=0, count=2)["traceEvents"]
    called = {event["args"]["correlation"] for event in left if event.get("cat") == "cuda_runtime"}
    ran = {event["args"]["correlation"] for event in left if event.get("cat") == "kernel"}
    assert called == ran == {21, 22, 31, 32}
    arrows = [(event["ph"], event["id"]) for event in left if event.get("cat") == "ac2g"]
    assert sorted(arrows) == sorted((end, correlation) for end in "sf" for correlation in called)
    assert sum(event.get("cat") == "gpu_user_annotation" for event in left) == 2


def test_a_function_around_the_steps_is_shortened_to_them() -> None:
    left = _cut(StepFile(frames=True))["traceEvents"]
    (frame,) = (event for event in left if event.get("cat") == "python_function")
    (begin,) = (event for event in left if event["name"] == "begin")
    assert frame["ts"] == begin["ts"]
    assert frame["dur"] == pytest.approx(300_000, abs=1)


def test_metadata_is_kept_except_the_rank_and_our_keys() -> None:
    forged = {
        "rankscope": {"rank": 0, "job": "other"},
        "distributedInfo": {"backend": "nccl", "rank": 0, "pg_count": 1},
    }
    data = StepFile(head=forged).text().replace(b'"traceName"', b'"rankscope": {"rank": 9}, "traceName"')
    left = json.loads(b"".join(cut([data], None, {"rankscope": {"rank": 3}}, distributed={"rank": 3})))
    assert left["rankscope"] == {"rank": 3}
    assert left["distributedInfo"] == {"backend": "nccl", "rank": 3, "pg_count": 1}
    assert left["cupti_version"] == 130001 and "traceName" not in left
    assert left["traceEvents"] == StepFile().events()


@pytest.mark.parametrize("count", [None, 2])
def test_a_cut_of_invalid_json_is_valid_json(count: int | None) -> None:
    data = StepFile(head={"host_name": "HOST"}).text().replace(b"HOST", b"caf\xe9\n")
    data = data.replace(b'"args": {}', b'"args": {}, "caf\xe9": "\xff"')
    trace = read_trace(data)
    run = _whole(trace).run(0, count or 1)
    stretch = outline(trace).stretch(int(run.start_ns[0]), int(run.end_ns[-1])) if count else None
    left = json.loads(b"".join(cut([data], stretch, {}, distributed={})))
    assert left["host_name"] == "caf\ufffd "
    assert sum(event.get("caf\ufffd") == "\ufffd" for event in left["traceEvents"]) >= 6


def test_a_file_with_events_in_the_wrong_place_is_refused() -> None:
    with pytest.raises(TraceError, match="traceEvents not found"):
        list(cut([b'{"a": "\\"traceEvents\\": [", "b": 1}'], None, {}, distributed={}))


def test_last_steps_not_yet_run_on_the_device_are_incomplete() -> None:
    assert len(_whole(read_trace(StepFile().text()))) == 6
    assert len(_whole(read_trace(StepFile(lag_ms=150.0).text()))) == 5 - 1
    # A real one: the host was two steps ahead.
    assert len(_whole(read_trace((H200 / "nccl_world1_3steps.json.gz").read_bytes()))) == 0


def _steps(starts_ms: list[float], base_ms: float = 0.0) -> WholeSteps:
    start = np.round((np.array(starts_ms) - base_ms) * 1e6).astype(np.int64)
    end = np.append(start[1:], start[-1:] + 100_000_000)
    return WholeSteps(round(base_ms * 1e6), start, end, end - start)


def test_a_rank_with_one_more_boundary_begins_no_step_early() -> None:
    late = _steps([201.0, 301.0, 401.0, 501.0])
    early = _steps([99.0, 199.5, 300.5, 400.0, 500.0], base_ms=50.0)
    assert common_run({0: late, 1: early}, 3) == {0: 0, 1: 1}
    # The boundary that the one passed just before its recording began is not there: all begin with the next.
    assert common_run({0: late, 1: _steps([300.5, 400.0, 500.0, 600.0])}, 3) == {0: 1, 1: 0}


def test_ranks_that_share_too_few_steps_have_no_common_run() -> None:
    assert common_run({0: _steps([100.0, 200.0, 300.0]), 1: _steps([300.0, 400.0, 500.0])}, 3) is None
    assert common_run({0: _steps([100.0, 200.0])}, 3) is None
    assert common_run({}, 1) is None


@given(
    begins=st.lists(st.floats(0.0, 250.0), min_size=2, max_size=6),
    jitters=st.lists(st.floats(-20.0, 20.0), min_size=6, max_size=6),
    lengths=st.lists(st.floats(80.0, 140.0), min_size=12, max_size=12),
    count=st.integers(1, 4),
)
def test_all_ranks_keep_the_same_steps_wherever_their_recordings_begin(
    begins: list[float], jitters: list[float], lengths: list[float], count: int
) -> None:
    boundaries = np.cumsum(lengths)
    seen, first = {}, {}
    for rank, begin in enumerate(begins):
        own = boundaries + jitters[rank]
        first[rank] = int(np.searchsorted(own, begin))
        seen[rank] = _steps(own[first[rank] : -1].tolist())
    run = common_run(seen, count)
    assert run is not None
    numbers = {first[rank] + place for rank, place in run.items()}
    assert len(numbers) == 1
    # As early as all have it.
    assert numbers.pop() <= max(first.values()) + 1
