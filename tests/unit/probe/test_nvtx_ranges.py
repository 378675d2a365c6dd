"""NVTX ranges: their host time, and annotations in traces. The C functions are stand-ins: torch for CPUs has none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import nvtx

from rankscope.probe.failure import switch
from rankscope.probe.nvtx_ranges import MAX_MESSAGES, MAX_OPEN, OTHER, RangeTimes, watch_ranges
from rankscope.probe.ring_layout import MAX_RANGES, RANGE, RANGE_NAME_BYTES
from rankscope.probe.torch_timers import STEPS, Tally


class Calls:
    """What the C module was called with. It returns -2 as long as no tool listens, whatever the depth."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def rangePushA(self, message: str) -> int:
        if not isinstance(message, str | bytes):
            raise TypeError("no text")
        self.made.append(f"push {message}")
        return -2

    def rangePop(self) -> int:
        self.made.append("pop")
        return -2

    def markA(self, message: str) -> None:
        self.made.append(f"mark {message}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    found = Calls()
    monkeypatch.setattr(nvtx, "_nvtx", found)
    watch_ranges(torch, RangeTimes(Tally()))
    yield found
    switch.on = True


def recorded(tmp_path: Path, work: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(1) + 1
        work()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation" and event["ph"] == "X"]


def test_ranges_of_a_recording_are_annotations(calls: Calls, tmp_path: Path) -> None:
    def work() -> None:
        with nvtx.range("layer {}", 3):
            assert nvtx.range_push("attention") == -2
            assert nvtx.range_pop() == -2
        nvtx.mark("here")

    assert sorted(recorded(tmp_path, work)) == ["attention", "layer 3"]
    assert calls.made == ["push layer 3", "push attention", "pop", "pop", "mark here"]


def test_without_a_recording_nothing_is_kept(calls: Calls) -> None:
    for _ in range(3):
        nvtx.range_push("step")
    assert nvtx._nvtx._thread.ranges is None
    assert calls.made == ["push step"] * 3


def test_ranges_across_the_border_of_a_recording_are_harmless(calls: Calls, tmp_path: Path) -> None:
    nvtx.range_push("before")

    def work() -> None:
        nvtx.range_pop()
        nvtx.range_push("across")

    assert "before" not in recorded(tmp_path, work)
    nvtx.range_pop()
    nvtx.range_pop()  # of nothing
    assert recorded(tmp_path, lambda: nvtx.range_push("later")) == ["later"]
    nvtx.range_pop()
    assert not nvtx._nvtx._thread.ranges


def test_ranges_that_are_never_closed_are_bounded(calls: Calls, tmp_path: Path) -> None:
    def work() -> None:
        for _ in range(MAX_OPEN + 10):
            nvtx.range_push("leak")

    recorded(tmp_path, work)
    assert len(nvtx._nvtx._thread.ranges) == MAX_OPEN


def test_threads_have_ranges_of_their_own(calls: Calls, tmp_path: Path) -> None:
    def work() -> None:
        nvtx.range_push("main")
        thread = threading.Thread(target=nvtx.range_pop)
        thread.start()
        thread.join()
        assert len(nvtx._nvtx._thread.ranges) == 1
        nvtx.range_pop()

    assert recorded(tmp_path, work) == ["main"]


def test_an_error_of_nvtx_is_the_programs(calls: Calls, tmp_path: Path) -> None:
    def work() -> None:
        with pytest.raises(TypeError, match="no text"):
            nvtx.range_push(3)

    assert recorded(tmp_path, work) == []
    assert switch.on


def test_an_error_of_the_annotation_disables_the_probe_only(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(name: str) -> None:
        raise RuntimeError("no annotation")

    monkeypatch.setattr(nvtx._nvtx, "_annotation", fails)
    assert recorded(tmp_path, lambda: nvtx.range_push("a")) == []
    assert not switch.on
    assert "no annotation" in capfd.readouterr().err
    assert nvtx.range_push("b") == -2


def test_compiled_code_sees_the_functions_it_knows(calls: Calls) -> None:
    """torch.compile puts these into graphs by identity: replaced functions would break graphs."""
    assert nvtx.range_push.__module__ == nvtx.range_pop.__module__ == "torch.cuda.nvtx"


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


def seconds_of(times: RangeTimes) -> dict[str, float]:
    return {RANGE.unpack_from(RANGE.pack(*row))[0].rstrip(b"\0").decode(): row[2] for row in times.rows()}


def test_a_nested_range_takes_its_time_from_the_outer() -> None:
    times, clock = RangeTimes(Tally()), Clock()
    for step in range(2):
        times.push(f"iteration {step}", clock)
        clock.wait(1)
        times.push("forward", clock)
        clock.wait(2)
        times.pop(clock)
        clock.wait(3)
        times.pop(clock)
        clock.wait(100)
    assert seconds_of(times) == pytest.approx({"iteration #": 8.0, "forward": 4.0})


def test_steps_count_from_the_first_range() -> None:
    times = RangeTimes(Tally())
    times.tally.ledger[STEPS] = 100
    assert times.rows() == []
    times.push("late")
    times.tally.ledger[STEPS] = 103
    assert [row[1] for row in times.rows()] == [3]


def test_an_open_range_counts_until_it_is_read() -> None:
    times = RangeTimes(Tally())
    times.push("epoch")
    first = seconds_of(times)["epoch"]
    assert 0 < first < seconds_of(times)["epoch"]


def test_many_names_and_long_names_are_bounded() -> None:
    times = RangeTimes(Tally())
    for first in range(40):
        for second in range(100):
            times.push(chr(0x4E00 + first) * 100 + chr(0x4E00 + second))
            times.pop()
    times.push("x" * 10_000_000)
    times.pop()
    times.push("\ud800")
    rows = times.rows()
    assert len(rows) == MAX_RANGES and rows[-1][0].decode() == OTHER
    assert max(len(row[0]) for row in rows) <= 4 * RANGE_NAME_BYTES
    assert len(times._known) <= MAX_MESSAGES and max(map(len, times._known)) < 1000


def test_ranges_deeper_than_the_limit_leave_the_others_right() -> None:
    times, clock = RangeTimes(Tally()), Clock()
    times.push("outer", clock)
    for _ in range(2 * MAX_OPEN):
        times.push("deep", clock)
    for _ in range(2 * MAX_OPEN):
        times.pop(clock)
    clock.wait(5)
    times.pop(clock)
    times.pop(clock)  # of nothing
    assert seconds_of(times) == pytest.approx({"outer": 5.0, "deep": 0.0})
    assert len(times._open) == 0


def test_only_the_training_thread_is_timed(calls: Calls) -> None:
    times = nvtx._nvtx._times
    nvtx.range_push("before the first step")
    times.tally.thread_id = threading.get_ident()
    nvtx.range_push("mine")
    thread = threading.Thread(target=lambda: (nvtx.range_push("theirs"), nvtx.range_pop()))
    thread.start()
    thread.join()
    nvtx.range_pop()
    nvtx.range_pop()
    assert list(seconds_of(times)) == ["mine"]


def test_a_range_may_be_named_by_bytes(calls: Calls, tmp_path: Path) -> None:
    nvtx._nvtx._times.tally.thread_id = threading.get_ident()

    def work() -> None:
        nvtx.range_push(b"raw")
        nvtx.range_pop()

    assert recorded(tmp_path, work) == ["raw"]
    assert list(seconds_of(nvtx._nvtx._times)) == ["raw"]
    assert switch.on
