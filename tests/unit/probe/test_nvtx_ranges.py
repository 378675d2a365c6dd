"""NVTX ranges in traces of torch's profiler. The C functions are stand-ins: torch for CPUs has none."""

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
from rankscope.probe.nvtx_ranges import MAX_OPEN, annotate_ranges


class Calls:
    """What the C module was called with. It returns -2 as long as no tool listens, whatever the depth."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def rangePushA(self, message: str) -> int:
        if not isinstance(message, str):
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
    annotate_ranges(torch)
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
