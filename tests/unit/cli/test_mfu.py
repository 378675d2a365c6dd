from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.cli.main import main
from tests.shared_data import H200

PALM = "--params 540e9 --layers 118 --width 12288 --sequence 2048 --tokens-per-second 238300 --gpus 6144"
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["mfu", *words.split(), "--json"]) == 0
    out = capsys.readouterr().out
    read = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(read, dict)
    return read


def test_palms_own_number(capsys: pytest.CaptureFixture[str]) -> None:
    read = answer(f"{PALM} --peak-tflops 275", capsys)
    assert read["mfu_ratio"] == pytest.approx(0.462, abs=5e-5)
    assert read["model_flops_per_token"] == 6 * 540e9 + 12 * 118 * 12288 * 2048
    assert read["hfu_ratio"] == read["mfu_ratio"]
    assert (read["peak_flops_per_second"], read["tokens_per_second"], read["gpus"]) == (275e12, 238300, 6144)
    assert read["warnings"] == []


def test_a_step_says_the_same_as_its_tokens_per_second(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = f"--model-config {config} --sequence 8192 --gpus 64 --gpu H100"
    by_step = answer(f"{common} --step-seconds 4 --tokens-per-step 1048576", capsys)
    by_speed = answer(f"{common} --tokens-per-second 262144", capsys)
    assert by_step == by_speed
    assert by_step["parameters"] == 8_030_261_248
    assert by_step["notes"] == ["H100 is assumed to be H100 SXM"]
    flops = by_step["model_flops_per_token"]
    assert isinstance(flops, float)
    declared = answer(f"--flops-per-token {flops!r} --gpus 64 --gpu H100 --tokens-per-second 262144", capsys)
    assert declared["mfu_ratio"] == by_step["mfu_ratio"]
    of_step = answer(f"--flops-per-step {flops * 1048576!r} --gpus 64 --gpu H100 --step-seconds 4", capsys)
    assert of_step["mfu_ratio"] == pytest.approx(by_step["mfu_ratio"], rel=1e-14)
    assert of_step["model_flops_per_token"] is None


def test_numbers_may_be_written_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    one = answer("--params 8.03B --layers 32 --width 4_096 --sequence 8,192", capsys)
    assert one["model_flops_per_token"] == 6 * 8.03e9 + 12 * 32 * 4096 * 8192
    assert one["mfu_ratio"] is None


def test_an_impossible_mfu_is_printed_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{PALM} --peak-tflops 27.5"
    assert main(["mfu", *words.split()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "MFU 462.0%" in out
    assert "impossible: an input must be wrong" in out
    assert answer(words, capsys)["warnings"]


def test_memory_is_told_per_gpu_and_part(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = answer(f"--model-config {config} --sequence 4096 --memory --dp 8 --zero 3 --recompute full", capsys)
    memory = read["memory"]
    assert isinstance(memory, dict)
    assert memory["per_gpu"]["parameter_bytes"] == 8_030_261_248 * 2 / 8
    assert memory["per_gpu"]["optimizer_bytes"] == 8_030_261_248 * 12 / 8
    assert main(["mfu", "--model-config", str(config), "--sequence", "4096", "--memory", "--pp", "4"]) == 0
    assert "stage 0, the fullest" in capsys.readouterr().out


def test_the_peaks_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = answer("--list-gpus", capsys)["gpus"]
    assert isinstance(gpus, dict)
    assert gpus["H100 SXM"]["bf16"] == 989.0
    assert gpus["T4"]["fp8"] is None


def test_a_trace_tells_who_held_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    told = answer(f"--memory-trace {path}", capsys)["memory"]
    assert isinstance(told, list)
    (held,) = told
    assert (held["peak_allocated_bytes"], held["before_trace_bytes"], held["forward_bytes"]) == (3072, 2048, 1024)
    assert held["fragmentation_ratio"] == 0.25
    assert held["holders"] == [{"name": hostile, "size_bytes": 1024, "blocks": 1}]
    assert main(["mfu", "--memory-trace", str(path)]) == 0
    assert hostile in capsys.readouterr().out
    assert main(["mfu", "--memory-trace", str(H200 / "nccl_world1_3steps.json.gz")]) == 2
    assert "profile_memory=True" in capsys.readouterr().err


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
def test_bad_input_is_one_line_and_exit_code_2(
    words: str, reason: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config.parent
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").write_bytes(b"")
    (folder / "deep").write_text("[" * 200_000)
    (folder / "list").write_text("[1]")
    assert main(["mfu", *words.format(config=config, folder=folder).split()]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert reason in told.err
    assert told.err.count("\n") == 1 and told.err.startswith("error: ")
