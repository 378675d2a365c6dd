"""A trace is written by a container. Reading it takes time in proportion to its size, whatever it contains: each attack
runs at two sizes, and the larger one may not take out of proportion longer."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from rankscope.analysis.traces.cut import WholeSteps, common_run, cut
from rankscope.analysis.traces.device_memory import measure_memory
from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto
from rankscope.analysis.traces.reader import json_stream
from rankscope.analysis.traces.reader.events import Layout, lay_out
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import TraceError
from tests.support.measuring import Measured

SMALL, LARGE = 1, 4
# Linear is 4, quadratic 16. Below the floor, noise decides.
PROPORTION = 9.0
FLOOR_SECONDS = 0.15

EVENT = b'{"ph":"X","cat":"cpu_op","name":"aten::add","pid":1,"tid":1,"ts":1,"dur":1}'


def decoys(size: int) -> bytes:
    nested = b'{"traceEvents":[]},' * (1000 * size)
    return b'{"a":[' + nested + b'0],"traceEvents":[' + EVENT + b"]}"


def decoys_in_a_text(size: int) -> bytes:
    return b'{"a":"' + rb"\"traceEvents\":[" * (1000 * size) + b'","traceEvents":[' + EVENT + b"]}"


def decoy_values(size: int) -> bytes:
    pairs = b",".join(b'"%d":"traceEvents"' % number for number in range(1500 * size))
    return b"{" + pairs + b',"traceEvents":[' + EVENT + b"]}"


def gzip_members(size: int) -> bytes:
    return gzip.compress(b"", 1) * (12_000 * size) + gzip.compress(b"[" + EVENT + b"]")


def endless_dimensions(size: int) -> bytes:
    dims = [[(1 << 62) - 1] * (10_000 * size)]
    event = {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "ts": 1, "dur": 1}
    return json.dumps({"traceEvents": [{**event, "args": {"Input Dims": dims, "Input type": ["float"]}}]}).encode()


# Analysis: as many threads, devices or levels as events.


def _event(**fields: object) -> dict[str, object]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 1, **fields}


def _allocation(ts: int, device: int) -> dict[str, object]:
    arguments = {"Bytes": 8, "Total Allocated": 8, "Total Reserved": 8, "Device Type": 1, "Device Id": device}
    return {"ph": "i", "name": "[memory]", "ts": ts, "pid": 1, "tid": 1, "args": arguments}


def _written(events: list[dict[str, object]]) -> bytes:
    return json.dumps({"traceEvents": events}).encode()


def threads_and_devices(size: int) -> bytes:
    count = 150 * size
    work = [_event(tid=number, ts=2 * number) for number in range(count)]
    return _written(work + [_allocation(2 * number, number) for number in range(count)])


def deep_nesting(size: int) -> bytes:
    count = 4000 * size
    nested = [_event(ts=number, dur=4 * count - 2 * number) for number in range(count)]
    return _written(nested + [_allocation(5 * count + number, 0) for number in range(count)])


def named_threads(size: int) -> bytes:
    return _written([_event(tid=f"thread {number}", ts=number) for number in range(3000 * size)])


def _measure(data: bytes) -> None:
    measure_memory(read_trace(data))


def _merge(data: bytes) -> None:
    deque(merge_for_perfetto([(0, data)], {}), maxlen=0)


def _read(data: bytes) -> None:
    with contextlib.suppress(TraceError):  # refusing it is as good
        read_trace(data)


def _cut(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        deque(cut([data], None, {}, distributed={}), maxlen=0)


def _cpu_seconds(act: Callable[[bytes], None], data: bytes) -> float:
    began = time.process_time()
    act(data)
    return time.process_time() - began


def measure_proportion(act: Callable[[bytes], None], made: Callable[[int], bytes], measured: Measured) -> None:
    """The least of three, of both: what else happens on the machine adds to a time and takes nothing off."""
    small, large = (min(_cpu_seconds(act, made(size)) for _ in range(3)) for size in (SMALL, LARGE))
    times = max(0.0, large - FLOOR_SECONDS) / small  # 0: too little to tell
    name = act.__name__.strip("_")
    measured(f"CPU time to {name} a trace four times as large ({made.__name__})", times, "times", at_most=PROPORTION)


@pytest.mark.parametrize(
    "made",
    [decoys, decoys_in_a_text, decoy_values, gzip_members, endless_dimensions],
    ids=lambda made: made.__name__,
)
def test_reading_takes_time_in_proportion_to_the_size(made: Callable[[int], bytes], measured: Measured) -> None:
    measure_proportion(_read, made, measured)


@pytest.mark.parametrize(
    ("act", "made"),
    [(_measure, threads_and_devices), (_measure, deep_nesting), (_merge, named_threads)],
    ids=lambda each: each.__name__,
)
def test_analysis_takes_time_in_proportion_to_the_size(
    act: Callable[[bytes], None], made: Callable[[int], bytes], measured: Measured
) -> None:
    measure_proportion(act, made, measured)


def test_ranks_without_a_common_step_are_found_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.arange(200_000, dtype=np.int64) * 1000
    near = WholeSteps(0, starts, starts + 900, np.full(len(starts), 900))
    far = WholeSteps(10**15, starts, starts + 900, np.full(len(starts), 900))
    seen = 0

    def counted(values: np.ndarray, length: int) -> np.ndarray:
        nonlocal seen
        seen += len(values)
        assert seen < 100 * len(starts)
        return sliding_window_view(values, length)

    monkeypatch.setattr(np.lib.stride_tricks, "sliding_window_view", counted)
    assert common_run({0: near, 1: far}, 3) is None


@pytest.mark.parametrize("made", [decoys, decoys_in_a_text], ids=lambda made: made.__name__)
def test_cutting_takes_time_in_proportion_to_the_size(made: Callable[[int], bytes], measured: Measured) -> None:
    measure_proportion(_cut, made, measured)


@pytest.mark.parametrize("made", [decoys, decoys_in_a_text, decoy_values, gzip_members])
def test_the_events_behind_decoys_are_read(made: Callable[[int], bytes]) -> None:
    assert len(read_trace(made(SMALL))) == 1


@pytest.mark.parametrize("gap", ["", " " * 300_000, "\n\t " * 200_000])
def test_white_space_around_the_colon_is_skipped(gap: str) -> None:
    text = f'{{"a":"\\\\","traceEvents"{gap}:{gap}['.encode() + EVENT + b"]}"
    assert len(read_trace([text])) == 1


@pytest.mark.parametrize("border", range(262_120, 262_150, 3))
def test_the_key_is_found_wherever_it_lies_in_a_block(border: int) -> None:
    text = (
        b'{"a":"'
        + b"\\" * (2 * (border // 4))
        + b"x" * (border - 2 * (border // 4))
        + b'","traceEvents":['
        + EVENT
        + b"]}"
    )
    assert len(read_trace([text])) == 1


def test_events_without_an_end_are_searched_only_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b'{"traceEvents":[' + b'{"ph":[},' * 200_000
    limit, searched = 16 * len(text) + (32 << 20), 0

    def counted(part: bytes) -> Layout:
        nonlocal searched
        searched += len(part)
        assert searched < limit
        return lay_out(part)

    monkeypatch.setattr(json_stream, "lay_out", counted)
    with pytest.raises(TraceError, match="too damaged"):
        read_trace(text)
    assert searched > 0


def test_a_trace_with_hundreds_of_stray_quotes_is_still_read() -> None:
    stray = b'{"ph":"X","name":"a"b","ts":1,"dur":1}'
    text = b"[" + b",".join([EVENT, EVENT, stray] * 300 + [EVENT] * 20_000) + b"]"
    assert len(read_trace(text)) >= 20_000
