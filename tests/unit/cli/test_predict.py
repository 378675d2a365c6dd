"""`rankscope predict`: the table, the list, JSON, and what cannot be predicted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.analysis.replay.changes import CHANGES
from tests.shared_data import H200, ROOT
from tests.support.commands import Command

LAUNCH_BOUND = H200 / "launch_bound.json.gz"
MATRIX_BOUND = H200 / "matrix_bound.json.gz"
STRAGGLER = sorted(H200.glob("ddp_straggler_rank*.json.gz"))
MEASURED_STEP = ("--step-ms", "14.75")


def delayed(path: Path) -> Path:
    """In each step a kernel starts 20 ms after its launch, for no recorded reason, and the host waits for it."""
    events: list[dict[str, Any]] = []
    for step in range(4):
        begin = step * 30_000
        calls = [(f"ProfilerStep#{step}", "user_annotation", begin, 29_000, {})]
        for number, (name, start) in enumerate((("gemm", 100), ("gemm", 200), ("gemm", 300), ("stuck", 20_400))):
            tie = {"correlation": 10 * step + number + 1}
            calls.append(("cudaLaunchKernel", "cuda_runtime", begin + 90 + 100 * number, 5, tie))
            calls.append((name, "kernel", begin + start, 50, {**tie, "device": 0, "stream": 7}))
        calls.append(("cudaDeviceSynchronize", "cuda_runtime", begin + 500, 20_000, {}))
        events += [
            {"ph": "X", "name": name, "cat": kind, "pid": 0, "tid": 7, "ts": start, "dur": long, "args": arguments}
            for name, kind, start, long, arguments in calls
        ]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_changes_are_ranked_by_what_they_bring(predict: Command) -> None:
    out = predict.answer(LAUNCH_BOUND, *MEASURED_STEP)
    assert "of the step would be saved if a step is launched as one CUDA graph and the optimizer is one kernel" in out
    table = out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[1:]] == [
        *("graph+fused", "graph", "fused", "tf32", "compile", "bf16", "recompute"),
        *("batch2", "accumulate4"),
    ]
    assert "fused: fused=True for the optimizer; costs nothing" in out
    assert "input: no step waits for its input" in out


def test_the_ranks_of_a_job_are_replayed_together(predict: Command) -> None:
    out = predict.answer(*STRAGGLER, "--with", "even", "--step-ms", "27.26")
    assert "was recorded on 4 ranks" in out
    assert "saved if the slowest rank works like its peers" in out


def test_host_time_slowed_by_the_profiler_is_said(predict: Command) -> None:
    assert "33 to 100 % of its recorded time; give --step-ms MS" in predict.answer(LAUNCH_BOUND)
    assert "without the profiler the host takes 62" in predict.answer(LAUNCH_BOUND, *MEASURED_STEP)


def test_a_busy_device_says_nothing_about_the_host(predict: Command) -> None:
    assert "of its recorded time; the step does not depend on it" in predict.answer(LAUNCH_BOUND, "--step-ms", "2")


def test_kernels_and_buckets_can_be_named(predict: Command) -> None:
    read = predict.json(MATRIX_BOUND, "--with", "gemm*2,bucket50,tf32+bf16")
    found = {one["name"]: one for one in read["predictions"]}
    assert 0.40 < found["gemm*2"]["gain_ratio"] < 0.45
    assert found["bucket50"]["reason"] == "the trace shows no buckets of DDP"
    assert found["tf32+bf16"]["reason"] == "one takes the place of the other"


def test_nothing_to_gain_is_said(predict: Command) -> None:
    assert "None of these changes would shorten the step." in predict.answer(LAUNCH_BOUND, "--with", "input")


def test_what_does_not_replay_is_not_predicted(predict: Command, tmp_path: Path) -> None:
    path = delayed(tmp_path / "trace.json.gz")
    out = predict.answer(path, status=3)
    assert "Cannot be predicted." in out and "It drifts apart before stuck." in out
    read = predict.json(path, status=3)
    assert (read["usable"], read["predictions"]) == (False, [])


def test_the_list_names_every_change(predict: Command) -> None:
    out = predict.answer("--list")
    assert all(f"{change.name} " in out and change.remedy in out for change in CHANGES)
    assert [one["name"] for one in predict.json("--list")["changes"]] == [one.name for one in CHANGES]


def test_every_key_and_change_is_documented(predict: Command) -> None:
    page = (ROOT / "docs" / "predict.md").read_text()
    read = predict.json(STRAGGLER[0])
    keys = {*read, *read["predictions"][0], *read["predictions"][0]["changes"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []
    first_cells = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [change.name for change in CHANGES if f"`{change.name}`" not in first_cells] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "no trace is named"),
        ((STRAGGLER[0], "--with", "magic"), "--with magic: there is no such change"),
        ((STRAGGLER[0], "--with", "fused*2*2"), "--with fused*2*2: there is no such change"),
        ((STRAGGLER[0], "--with", "gemm*0"), "--with gemm*0: there is no such change"),
        ((STRAGGLER[0], "--with", "bucket0"), "--with bucket0: there is no such change"),
        ((STRAGGLER[0], "--step-ms", "0"), "a step takes longer than nothing"),
        ((STRAGGLER[0], "--step-ms", "nan"), "a step takes longer than nothing"),
        ((H200 / "nccl_world1_3steps.json.gz",), "no step was recorded as a whole"),
    ],
)
def test_mistakes_are_explained(predict: Command, words: tuple[object, ...], reason: str) -> None:
    error = predict.complaint(*words)
    assert reason in error and "next step: " in error


def test_broken_files_are_named(predict: Command, tmp_path: Path) -> None:
    broken = tmp_path / "trace.json"
    broken.write_text("not a trace")
    assert str(broken) in predict.complaint(broken)
