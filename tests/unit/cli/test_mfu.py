from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shared_data import H200
from tests.support.commands import Command

PALM = "--params 540e9 --layers 118 --width 12288 --sequence 2048 --tokens-per-second 238300 --gpus 6144"
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def mfu(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "mfu")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def test_palms_own_number(mfu: Command) -> None:
    read = mfu.json(*f"{PALM} --peak-tflops 275".split())
    assert read["mfu_ratio"] == pytest.approx(0.462, abs=5e-5)
    assert read["model_flops_per_token"] == 6 * 540e9 + 12 * 118 * 12288 * 2048
    assert read["hfu_ratio"] == read["mfu_ratio"]
    assert (read["peak_flops_per_second"], read["tokens_per_second"], read["gpus"]) == (275e12, 238300, 6144)
    assert read["warnings"] == []


def test_a_step_says_the_same_as_its_tokens_per_second(config: Path, mfu: Command) -> None:
    common = f"--model-config {config} --sequence 8192 --gpus 64 --gpu H100"
    by_step = mfu.json(*f"{common} --step-seconds 4 --tokens-per-step 1048576".split())
    by_speed = mfu.json(*f"{common} --tokens-per-second 262144".split())
    assert by_step == by_speed
    assert by_step["parameters"] == 8_030_261_248
    assert by_step["notes"] == ["H100 is assumed to be H100 SXM"]
    flops = by_step["model_flops_per_token"]
    assert isinstance(flops, float)
    declared = mfu.json(*f"--flops-per-token {flops!r} --gpus 64 --gpu H100 --tokens-per-second 262144".split())
    assert declared["mfu_ratio"] == by_step["mfu_ratio"]
    of_step = mfu.json(*f"--flops-per-step {flops * 1048576!r} --gpus 64 --gpu H100 --step-seconds 4".split())
    assert of_step["mfu_ratio"] == pytest.approx(by_step["mfu_ratio"], rel=1e-14)
    assert of_step["model_flops_per_token"] is None


def test_numbers_may_be_written_as_people_write_them(mfu: Command) -> None:
    one = mfu.json("--params", "8.03B", "--layers", 32, "--width", "4_096", "--sequence", "8,192")
    assert one["model_flops_per_token"] == 6 * 8.03e9 + 12 * 32 * 4096 * 8192
    assert one["mfu_ratio"] is None


def test_an_impossible_mfu_is_printed_with_a_warning(mfu: Command) -> None:
    words = f"{PALM} --peak-tflops 27.5"
    out = " ".join(mfu.answer(*words.split()).split())
    assert "MFU 462.0%" in out
    assert "impossible: an input must be wrong" in out
    assert mfu.json(*words.split())["warnings"]


def test_memory_is_told_per_gpu_and_part(config: Path, mfu: Command) -> None:
    read = mfu.json(*f"--model-config {config} --sequence 4096 --memory --dp 8 --zero 3 --recompute full".split())
    memory = read["memory"]
    assert isinstance(memory, dict)
    assert memory["per_gpu"]["parameter_bytes"] == 8_030_261_248 * 2 / 8
    assert memory["per_gpu"]["optimizer_bytes"] == 8_030_261_248 * 12 / 8
    assert "stage 0, the fullest" in mfu.answer("--model-config", config, "--sequence", 4096, "--memory", "--pp", 4)


def test_the_peaks_can_be_listed(mfu: Command) -> None:
    gpus = mfu.json("--list-gpus")["gpus"]
    assert isinstance(gpus, dict)
    assert gpus["H100 SXM"]["bf16"] == 989.0
    assert gpus["T4"]["fp8"] is None


def test_a_trace_tells_who_held_its_memory(tmp_path: Path, mfu: Command) -> None:
    def memory(ts: float, change: int, total: int) -> dict[str, object]:
        told = {"Bytes": change, "Total Allocated": total, "Total Reserved": 4096, "Device Type": 1, "Device Id": 0}
        return {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "args": told,
        }

    hostile = "aten::mm[/bold]"  # no markup, whatever it looks like
    operation = {"ph": "X", "cat": "cpu_op", "name": hostile, "pid": 1, "tid": 1, "ts": 10.0, "dur": 10.0, "args": {}}
    path = tmp_path / "t[bold].json"
    path.write_text(json.dumps({"traceEvents": [operation, memory(12.0, 1024, 3072), memory(30.0, -1024, 2048)]}))
    told = mfu.json(*f"--memory-trace {path}".split())["memory"]
    assert isinstance(told, list)
    (held,) = told
    assert (held["peak_allocated_bytes"], held["before_trace_bytes"], held["forward_bytes"]) == (3072, 2048, 1024)
    assert held["fragmentation_ratio"] == 0.25
    assert held["holders"] == [{"name": hostile, "size_bytes": 1024, "blocks": 1}]
    assert hostile in mfu.answer("--memory-trace", path)
    assert "profile_memory=True" in mfu.complaint("--memory-trace", H200 / "nccl_world1_3steps.json.gz")


SHAPE = "--params 8B --layers 32 --width 4096 --sequence 8192"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "nothing says what the model is"),
        ("--params 0 --layers 1 --width 1 --sequence 1", "--params: '0'"),
        ("--params nan --layers 1 --width 1 --sequence 1", "--params: 'nan'"),
        ("--params 1e400 --layers 1 --width 1 --sequence 1", "--params: '1e400'"),
        ("--params eight --layers 1 --width 1 --sequence 1", "'eight' is no number"),
        ("--params 8B --layers 1.5 --width 1 --sequence 1", "--layers: '1.5' is not a whole number"),
        ("--params 8B --layers 32 --width 4096", "--sequence: missing"),
        ("--params 8B --layers 32 --width 4096 --sequence 8k", "write it out"),
        ("--params 8B --flops-per-token 3", "exclude each other"),
        (f"{SHAPE} --tokens-per-second -5 --gpu A100", "--tokens-per-second: '-5'"),
        (f"{SHAPE} --tokens-per-second inf --gpu A100", "--tokens-per-second: 'inf'"),
        (f"{SHAPE} --tokens-per-second 5", "give --gpu NAME or --peak-tflops"),
        (f"{SHAPE} --tokens-per-second 5 --gpu TPU", "known: V100 SXM"),
        (f"{SHAPE} --tokens-per-second 5 --gpu A100 --dtype fp8", "A100 has no published dense fp8 peak"),
        (f"{SHAPE} --tokens-per-second 5 --gpu A100 --gpus 0", "--gpus: '0'"),
        (f"{SHAPE} --step-seconds 5 --gpu A100", "--step-seconds: needs --tokens-per-step"),
        (f"{SHAPE} --memory", "--memory: needs --model-config"),
        ("--flops-per-token 3 --recompute selective", "--recompute selective"),
        ("--model-config {config} --tokens-per-second 5 --gpu A100", "--sequence: missing"),
        ("--model-config {config} --sequence 4096 --memory --pp 33", "33 stages for 32 layers"),
        ("--model-config {config} --sequence 4096 --memory --zero 1", "--zero: shards over --dp"),
        ("--model-config {folder}", "Is a directory"),
        ("--model-config {folder}/none.json", "No such file"),
        ("--model-config {folder}/binary", "not JSON"),
        ("--model-config {folder}/empty", "not JSON"),
        ("--model-config {folder}/deep", "not JSON"),
        ("--model-config {folder}/list", "not a JSON object"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: str, reason: str, config: Path, mfu: Command) -> None:
    folder = config.parent
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").write_bytes(b"")
    (folder / "deep").write_text("[" * 200_000)
    (folder / "list").write_text("[1]")
    assert reason in mfu.complaint(*words.format(config=config, folder=folder).split())
