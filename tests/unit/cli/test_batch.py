"""`rankscope batch`: points from traces and numbers, the table, JSON, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.shared_data import H200, ROOT
from tests.support.commands import Command

DEVICE_BYTES = 80 * 10**9
HOST_MS = 12.0


@pytest.fixture
def batch(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "batch")


def trace(folder: Path, batch: int, *, memory: bool = True, busy_ms: float | None = None) -> Path:
    """Steps of one kernel each: 1 ms and 0.25 ms per sample, on a host that takes 12 ms. 2 GB and 0.5 GB per sample."""
    busy = 1000 * (1 + 0.25 * batch if busy_ms is None else busy_ms)
    step = max(1000 * HOST_MS, busy)
    events: list[dict[str, Any]] = []
    for number in range(5):
        begin = number * step
        tie = {"correlation": number + 1}
        for name, kind, start, long, arguments in (
            (f"ProfilerStep#{number}", "user_annotation", begin, step, {}),
            ("cudaLaunchKernel", "cuda_runtime", begin + 1, 5, tie),
            ("gemm", "kernel", begin + 10, busy - 20, {**tie, "device": 0, "stream": 7}),
        ):
            place = {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": 7, "ts": start, "dur": long}
            events.append(place | {"args": arguments})
        size = 10**9 * batch // 2
        for start, change, total in ((begin + 2, size, 2 * 10**9 + size), (begin + 9, -size, 2 * 10**9)):
            noted = {"Device Type": 1, "Device Id": 0, "Bytes": change, "Total Allocated": total, "Addr": 512}
            event = {"ph": "i", "s": "t", "name": "[memory]", "pid": 0, "tid": 7, "ts": start, "args": noted}
            events += [event] if memory else []
    properties = [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": DEVICE_BYTES}]
    path = folder / f"batch{batch}.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"deviceProperties": properties, "traceEvents": events}).encode()))
    return path


def test_numbers_give_throughput_and_the_largest_batch(batch: Command) -> None:
    out = batch.answer("8=100ms,6GB", "16=180ms,10GB", "--memory-gb", 80)
    assert "Batch 32 has 17.6 % more throughput than 8; beyond, doubling brings less than 5 %." in out
    assert "largest batch that fits into 67.1 GiB of 74.5 GiB: 140; as a power of two 128" in out
    assert [line.split()[0] for line in out.splitlines() if " GiB" in line and " ms" in line] == ["8", "16", "32", "64"]


def test_traces_tell_the_device_below_the_hosts_time(tmp_path: Path, batch: Command) -> None:
    """Both batches take the host's 12 ms; the device would take 65 ms for 256."""
    found = batch.json(f"8={trace(tmp_path, 8)}", f"16={trace(tmp_path, 16)}")
    assert found["step"]["floor_us"] == pytest.approx(12_000, rel=0.01)
    assert found["step"]["per_sample_us"] == pytest.approx(250, rel=0.01)
    assert found["host_bound_below"] == pytest.approx(44, abs=1)
    assert found["memory"]["per_sample_bytes"] == pytest.approx(0.5e9)
    assert (found["device_bytes"], found["largest_batch"]) == (DEVICE_BYTES, 140)
    assert any("8=TRACE,14.7ms gives the step without" in one for one in found["warnings"])


def test_a_step_beside_the_trace_replaces_the_recorded_one(tmp_path: Path, batch: Command) -> None:
    found = batch.json(f"8={trace(tmp_path, 8)},7ms", f"16={trace(tmp_path, 16)},7ms,99GB")
    assert found["step"]["floor_us"] == 7_000 and found["points"][1]["memory_bytes"] == 99e9
    assert not any("the profiler slowed it" in one for one in found["warnings"])


def test_three_traces_are_checked(tmp_path: Path, batch: Command) -> None:
    points = [f"{batch}={trace(tmp_path, batch)}" for batch in (16, 64, 128)]
    assert batch.json(*points)["step"]["error_ratio"] < 0.05
    points[2] = f"128={trace(tmp_path, 128, busy_ms=60)}"
    found = batch.json(*points, status=3)
    assert found["holds"] is False and found["rows"] == [] and found["largest_batch"] == 140
    out = batch.answer(*points, status=3)
    assert "The model does not hold" in out and "is off by " in out


def test_without_memory_it_says_how_to_get_it(tmp_path: Path, batch: Command) -> None:
    points = [f"{batch}={trace(tmp_path, batch, memory=False)}" for batch in (64, 128)]
    out = batch.answer(*points)
    assert "profile_memory=True" in out and "samples/s" in out and "largest batch" not in out


def test_a_path_may_have_commas_and_equals_signs(tmp_path: Path, batch: Command) -> None:
    folder = tmp_path / "lr=0.1,wd=0"
    folder.mkdir()
    assert len(batch.json(f"64={trace(folder, 64)}", f"128={trace(folder, 128)},33ms")["points"]) == 2


def test_a_step_that_does_not_grow_is_said(batch: Command) -> None:
    out = batch.answer("8=14.7ms", "16=12.9ms")
    assert "A larger batch costs no time up to 16." in out and "measure a larger" in out


def test_what_does_not_fit_is_said(batch: Command) -> None:
    assert "does not fit with the margin" in batch.answer("8=10ms,3GB", "16=19ms,5GB", "--memory-gb", 3)
    assert "does not fit with the margin" in batch.answer("8=10ms,3GB", "16=19ms,5GB", "--memory-gb", 0.5)


def test_memory_that_shrinks_is_said(batch: Command) -> None:
    assert "memory does not grow from batch 8 to 16" in batch.answer("8=10ms,3GB", "16=19ms,2GB")


def test_every_key_is_documented(batch: Command) -> None:
    page = (ROOT / "docs" / "batch.md").read_text()
    found = batch.json("8=100ms,6GB", "16=180ms,10GB", "--memory-gb", 80)
    keys = {*found, *found["step"], *found["memory"], *found["points"][0], *found["rows"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("8=1ms",), "one batch does not tell"),
        (("8=1ms", "8=2ms"), "batch 8 is given twice"),
        (("0=1ms", "8=2ms"), "batch 0: a batch has"),
        (("-1=1ms", "8=2ms"), ""),
        (("nan=1ms", "8=2ms"), "no batch and what was measured"),
        (("1.5=1ms", "8=2ms"), "no batch and what was measured"),
        (("99999999999=1ms", "8=2ms"), "no batch and what was measured"),
        (("8", "16=2ms"), "no batch and what was measured"),
        (("8=", "16=2ms"), "neither a trace nor a step"),
        (("8=3GB", "16=2ms"), "neither a trace nor a step"),
        (("8=0ms", "16=2ms"), "its step is not a number above zero"),
        (("8=nan", "16=2ms"), "has no step"),
        (("8=/nowhere/trace.json", "16=2ms"), "cannot be read: No such file"),
        (("8=1ms", "16=2ms", "--memory-gb", "nan"), "a device has more than nothing"),
        (("8=1ms", "16=2ms", "--memory-gb", "0"), "a device has more than nothing"),
    ],
)
def test_mistakes_are_explained(batch: Command, words: tuple[str, ...], reason: str) -> None:
    status, out, err = batch(*words)
    assert (status, out) == (2, "") and reason in err
    assert "next step: " in err or not reason  # argparse takes it for an option


def test_a_real_trace_is_a_point(batch: Command) -> None:
    """The device works for a fifth of its step."""
    found = batch.json(f"8={H200 / 'launch_bound.json.gz'},14.75ms", "64=30ms")
    assert 4_000 < found["points"][0]["device_us"] < 6_000
    assert found["step"]["floor_us"] == 14_750 and found["host_bound_below"] > 8
