"""`rankscope predict --on`: the answer, its JSON, and names, prices and traces that do not help."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rankscope.analysis.models.device_peaks import known_devices
from tests.shared_data import H200, ROOT
from tests.support.commands import Command
from tests.unit.cli.test_predict import LAUNCH_BOUND, MATRIX_BOUND, MEASURED_STEP, STRAGGLER, delayed


def with_device(path: Path, name: str) -> Path:
    """The trace as if another GPU had recorded it."""
    read = json.loads(gzip.decompress(STRAGGLER[0].read_bytes()))
    read["deviceProperties"] = [{"id": 0, "name": name}]
    path.write_bytes(gzip.compress(json.dumps(read).encode(), 1))
    return path


def test_the_step_on_another_gpu_is_given_with_its_range(predict: Command) -> None:
    out = predict.answer(LAUNCH_BOUND, "--on", "T4", *MEASURED_STEP)
    first = out.splitlines()[0]
    assert first.startswith("On T4 a step would take ") and "14.8 ms on H200 SXM" in first
    assert "the host's time, communication, and copies from and to the host stay as they are" in out
    assert "MFU 6.2 % on H200 SXM" in out and "time on the GPU: " in out


def test_a_launch_bound_job_gains_nothing_from_a_faster_gpu(predict: Command) -> None:
    assert "as long as 14.8 ms on H200 SXM" in predict.answer(LAUNCH_BOUND, "--on", "B200", *MEASURED_STEP)
    (step,) = predict.json(LAUNCH_BOUND, "--on", "B200", *MEASURED_STEP)["on"]["steps"]
    assert step["other_step_ms"] == pytest.approx(step["step_ms"], rel=0.01)


def test_changes_come_first(predict: Command) -> None:
    words = (LAUNCH_BOUND, "--on", "A100", *MEASURED_STEP, "--with", "graph,graph+fused,even")
    out = predict.answer(*words)
    assert [line.split()[0] for line in out.splitlines()[4:8]] == ["change", "none", "graph", "graph+fused"]
    assert "even: it needs the traces of several ranks" in out
    none, graph, both, even = predict.json(*words)["on"]["steps"]
    assert none["changes"] == [] and graph["other_step_ms"] > graph["step_ms"]
    assert both["other_step_ms"] < graph["other_step_ms"] < none["other_step_ms"]
    assert even["other_step_ms"] is None and even["reason"]


@pytest.mark.parametrize("change", ["even", "link", "overlap", "fused", "even+link"])
def test_every_change_can_come_before_the_move(predict: Command, change: str) -> None:
    none, changed = predict.json(*STRAGGLER, "--on", "L40S", "--with", change)["on"]["steps"]
    assert changed["changes"] == change.split("+")
    assert 0.99 * changed["step_ms"] <= changed["other_step_ms"] <= 1.01 * none["high_step_ms"]


def test_prices_make_costs_of_all_gpus(predict: Command) -> None:
    read = predict.json(*STRAGGLER, "--on", "H100", "--price", "2", "--price-now", "4")["on"]
    step = read["steps"][0]
    assert read["gpus"] == 4
    assert step["cost_per_1000_steps"] == pytest.approx(4 * 4 * step["step_ms"] / 3600)
    assert step["other_cost_per_1000_steps"] == pytest.approx(4 * 2 * step["other_step_ms"] / 3600)
    assert "1,000 steps on 4 GPUs cost" in predict.answer(*STRAGGLER, "--on", "H100", "--price", "2")


def test_an_unknown_gpu_of_the_trace_is_asked_for(predict: Command, tmp_path: Path) -> None:
    path = with_device(tmp_path / "trace.json.gz", "\x1b[31mBrand New GPU" + "x" * 9999)
    err = predict.complaint(path, "--on", "A100")
    assert "whose peaks are not known; next step: --from GPU, one of" in err
    assert "\x1b" not in err and len(err) < 600
    read = predict.json(path, "--on", "A100", "--from", "H200")["on"]
    assert read["from_gpus"] == ["H200 SXM"]
    err = predict.complaint(with_device(tmp_path / "no.json.gz", ""), "--on", "A100")
    assert "names no GPU" in err and "next step: " in err


def test_a_trace_without_shapes_is_moved_by_its_kernels_names(predict: Command, tmp_path: Path) -> None:
    read = json.loads(gzip.decompress(MATRIX_BOUND.read_bytes()))
    for event in read["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(read).encode(), 1))
    assert "MFU is not known: the traces have no shapes" in predict.answer(path, "--on", "A100")
    found = predict.json(path, "--on", "A100")["on"]
    assert found["mfu_ratio"] is None and found["time_ratios"]["compute_ratio"] > 0.5


def test_what_does_not_replay_is_not_moved(predict: Command, tmp_path: Path) -> None:
    path = delayed(tmp_path / "trace.json.gz")
    words = (path, "--on", "A100", "--from", "H100 SXM")
    assert "Cannot be predicted." in predict.answer(*words, status=3)
    assert predict.json(*words, status=3)["on"]["steps"] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--on", "TPU"), "'TPU' is not a known device; known: V100 SXM"),
        (("--on", "A100 MIG 3g.40gb"), "is a slice of a device"),
        (("--on", "A100", "--from", "abacus"), "--from: 'abacus' is not a known device"),
        (("--price", "2"), "--price needs the other GPU"),
        (("--price-now", "2"), "--price-now needs the other GPU"),
        (("--from", "A100"), "--from needs the other GPU"),
        (("--on", "A100", "--price", "-1"), "--price -1: not a price"),
        (("--on", "A100", "--price", "nan"), "--price nan: not a price"),
        (("--on", "A100", "--price", "1e300"), "--price 1e+300: not a price"),
    ],
)
def test_mistakes_are_explained(predict: Command, words: tuple[str, ...], reason: str) -> None:
    error = predict.complaint(STRAGGLER[0], *words)
    assert reason in error and "next step: " in error


def test_every_known_gpu_can_be_moved_to(predict: Command) -> None:
    for name in known_devices():
        read = predict.json(STRAGGLER[0], "--on", name)["on"]
        step = read["steps"][0]
        assert read["gpu"].startswith(name)
        assert 0 < step["low_step_ms"] <= step["other_step_ms"] <= step["high_step_ms"]


def test_every_key_is_documented(predict: Command) -> None:
    page = (ROOT / "docs" / "predict.md").read_text()
    read = predict.json(STRAGGLER[0], "--on", "A100")["on"]
    keys = {*read, *read["steps"][0], *read["time_ratios"]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_recordings_without_shapes_of_old_profilers_are_read(predict: Command) -> None:
    err = predict.complaint(H200 / "nccl_world1_3steps.json.gz", "--on", "A100")
    assert "no step was recorded as a whole" in err and "next step: " in err


def test_the_documented_example_is_what_is_printed(predict: Command) -> None:
    section = (ROOT / "docs" / "predict.md").read_text().partition("## Another GPU")[2]
    command, _, printed = section.partition("```console\n$ ")[2].partition("```")[0].partition("\n")
    words = command.split()[2:]
    assert predict.answer(LAUNCH_BOUND, *words[1:]) == printed
