from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tests.shared_data import H200
from tests.support.commands import Command


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "compare")


def times(seed: int, factor: float = 1.0, steps: int = 200, noise: float = 0.02) -> list[float]:
    normal = np.random.default_rng(seed).standard_normal(steps)
    return [float(value) for value in 0.3 * factor * np.exp(noise * normal)]


def write(path: Path, values: Iterable[object]) -> Path:
    path.write_text("".join(f"{value}\n" for value in values))
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return write(tmp_path / "a.txt", times(1))


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    return write(tmp_path / "b.txt", times(2, 1.05))


def test_a_slower_run_is_told_in_a_sentence(a: Path, slower: Path, compare: Command) -> None:
    out = compare.answer(a, slower)
    assert out.startswith("B is 4.9 % slower (95 % CI 4.4 – 5.4 %), p < 0.001")
    assert "one run each" in out


def test_the_answer_carries_effect_interval_and_significance(a: Path, slower: Path, compare: Command) -> None:
    read = compare.json(a, slower)
    assert read["difference_ratio"] == pytest.approx(np.median(times(2, 1.05)) / np.median(times(1)) - 1)
    assert 0 < read["ci_low"] < read["difference_ratio"] < read["ci_high"]
    assert read["p_value"] < 0.001 and read["significant"] is True
    assert read["cliffs_delta"] > 0.5
    assert (read["a"]["steps"], read["b"]["steps"], read["method"]) == (200, 200, "blocks")
    turned = compare.json(slower, a)
    assert turned["difference_ratio"] < 0 and turned["significant"] is True
    assert compare.json(a, slower) == read


def test_a_run_is_not_different_from_itself(a: Path, compare: Command) -> None:
    read = compare.json(a, a)
    assert (read["difference_ratio"], read["p_value"], read["significant"]) == (0, 1, False)
    assert "stands on both sides" in read["notes"][0]
    assert compare.answer(a, a).startswith("No difference of 5 % or more: B is as fast as A")
    assert compare.answer(a, a, "--max-regression", "2.5%").startswith("No difference of 2.5 % or more")


def test_a_name_that_looks_like_markup_is_a_name(tmp_path: Path, compare: Command) -> None:
    path = write(tmp_path / "run [bold].txt", times(1))
    assert "[bold].txt" in " ".join(compare.answer(path, path).split())


def test_every_way_of_writing_times_down_says_the_same(a: Path, slower: Path, tmp_path: Path, compare: Command) -> None:
    expected = compare.json(a, slower)
    values = times(2, 1.05)
    rows = [f"{step},{value * 1000!r},x" for step, value in enumerate(values)]
    lines = [line for value in values for line in (json.dumps({"step_seconds": value}), '{"eval_loss": 1}')]
    written = [
        write(tmp_path / "b.csv", ["step,step_ms,note", *rows]),
        write(tmp_path / "b.tsv", ["# made by hand", "step_seconds\tloss", "", *(f"{value!r}\t1" for value in values)]),
        write(tmp_path / "one.csv", ["seconds", *values]),
        write(tmp_path / "b.jsonl", lines),
        write(tmp_path / "list.json", [json.dumps(values, indent=1)]),
        write(tmp_path / "b.json", [json.dumps({"step_seconds": values})]),
        write(tmp_path / "steps.json", [json.dumps({"steps": [{"step_time": value} for value in values]}, indent=1)]),
        write(tmp_path / "commented.txt", ["# seconds", "", *values]),
        tmp_path / "b.txt.gz",
        tmp_path / "report.json",
    ]
    written[-2].write_bytes(gzip.compress(slower.read_bytes()))
    steps = [{"number": number, "duration_us": value * 1e6} for number, value in enumerate(values)]
    written[-1].write_text(json.dumps({"ranks": [{"rank": rank, "steps": steps} for rank in (0, 1)]}))
    for path in written:
        read = compare.json(a, path)
        assert read["difference_ratio"] == pytest.approx(expected["difference_ratio"], rel=1e-9), path
        assert read["b"]["steps"] == 200, path
    column = write(tmp_path / "c.csv", ["loss,mine", *(f"3,{value * 1e6!r}" for value in values)])
    read = compare.json(a, column, "--column", "mine", "--unit", "us")
    # The unit holds for both sides.
    assert read["b"]["median_seconds"] == pytest.approx(expected["b"]["median_seconds"])


def test_trace_steps_are_compared_and_a_directory_is_one_run(tmp_path: Path, compare: Command) -> None:
    for rank in (0, 1):
        name = f"gloo_2ranks_rank{rank}.json.gz"
        (tmp_path / name).write_bytes((H200 / name).read_bytes())
    read = compare.json(H200 / "nccl_world1_3steps.json.gz", tmp_path)
    assert read["b"]["runs"] == 1
    assert read["significant"] is False and read["p_value"] is None
    assert "8 are needed" in read["reason"]


def test_several_runs_a_side_are_compared_as_runs(tmp_path: Path, compare: Command) -> None:
    for side, factor in (("a", 1.0), ("b", 1.2)):
        folder = tmp_path / side
        folder.mkdir()
        for run in range(4):
            write(folder / f"{run}.txt", times(run, factor * (1 + 0.02 * run), steps=40))
    read = compare.json(tmp_path / "a", tmp_path / "b")
    assert (read["method"], read["a"]["runs"], read["significant"]) == ("runs", 4, True)
    files = [tmp_path / "a" / f"{run}.txt" for run in range(4)]
    again = compare.json("--a", *files, "--b", *(tmp_path / "b" / file.name for file in files))
    assert again["difference_ratio"] == read["difference_ratio"] == pytest.approx(0.2, abs=0.01)
    lone = compare.json("--a", *files, "--b", tmp_path / "b" / "0.txt")
    assert lone["ci_high"] - lone["ci_low"] > read["ci_high"] - read["ci_low"]


def test_a_build_can_fail_on_a_slowdown(a: Path, slower: Path, compare: Command) -> None:
    assert compare(a, slower, "--max-regression", "3").status == 1
    assert compare(a, slower, "--max-regression", "8%").status == 0
    assert compare(slower, a, "--max-regression", "1%").status == 0


def test_a_gate_that_cannot_decide_says_so(a: Path, slower: Path, tmp_path: Path, compare: Command) -> None:
    def gate(*words: object) -> tuple[int, str]:
        status, out, _ = compare(*words, "--json")
        read = json.loads(out)
        assert read["gate"]["max_regression_ratio"] == pytest.approx(float(str(words[-1]).removesuffix("%")) / 100)
        return status, read["gate"]["result"]

    assert gate(a, slower, "--max-regression", "3%") == (1, "regression")
    assert gate(a, slower, "--max-regression", "8%") == (0, "passed")
    few = write(tmp_path / "few.txt", times(1, 1.5, steps=4))
    assert gate(few, a, "--max-regression", "5%") == (3, "undecided")
    # As slow as before, but a slowdown of the limit would not have been seen.
    noisy = [
        write(tmp_path / f"{name}.txt", times(seed, 1.0, noise=0.5, steps=40)) for seed, name in ((1, "x"), (0, "y"))
    ]
    assert gate(*noisy, "--max-regression", "2%") == (3, "undecided")
    shown = compare.answer(*noisy, "--max-regression", "2%", status=3)
    assert "gate: undecided: " in shown and "several runs each" in " ".join(shown.split())
    assert compare(a, tmp_path / "missing", "--max-regression", "2%").status == 2


@pytest.mark.parametrize(
    ("factor", "steps", "noise", "begins", "passes", "statuses"),
    [
        (1.0, 3000, 0.05, "No difference of 5 % or more: B is ", "passed", (0, 0)),
        (1.03, 3000, 0.05, "B is 3.", "passed", (0, 0)),
        (5.0, 3000, 0.05, "B is ", "regression", (1, 1)),
        (5.0, 16, 0.02, "B is ", "regression", (1, 1)),
        (5.0, 16, 1.5, "Undecided: B seems ", "undecided", (1, 0)),
        (1.5, 4, 0.02, "Too few steps to decide: B seems ", "undecided", (1, 0)),
        (1.0, 4, 0.02, "Too few steps to decide: B seems ", "undecided", (3, 0)),
        (1.0, 40, 0.5, "Undecided: B seems ", "undecided", (3, 0)),
    ],
)
def test_words_and_gate_fit_the_numbers(
    factor: float,
    steps: int,
    noise: float,
    begins: str,
    passes: str,
    statuses: tuple[int, int],
    tmp_path: Path,
    compare: Command,
) -> None:
    before = write(tmp_path / "before.txt", times(1, 1.0, steps, noise))
    after = write(tmp_path / "after.txt", times(3, factor, steps, noise))
    for undecided, status in zip(("fail", "pass"), statuses, strict=True):
        answer = compare.answer(before, after, "--max-regression", "5%", "--undecided", undecided, status=status)
        assert answer.startswith(begins)
        assert f"gate: {passes}: " in answer


def test_a_gate_sees_slow_steps_that_the_median_hides(a: Path, tmp_path: Path, compare: Command) -> None:
    stalled = [value * (10 if step % 10 == 9 else 1) for step, value in enumerate(times(3))]
    b = write(tmp_path / "stalled.txt", stalled)
    answer = " ".join(compare.answer(a, b, "--max-regression", "5%", status=1).split())
    assert "the median hides slow steps: by the mean, B is 9" in answer
    assert "gate: regression: by the mean, B is slower" in answer


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"1\n0\n", "line 2: '0' is no step time"),
        (b"1\n\n-2\n", "line 3: '-2' is no step time"),
        (b"1\nnan\n", "line 2: 'nan'"),
        (b"1\ninf\n", "line 2: 'inf'"),
        (b"1\n1e400\n", "line 2: '1e400'"),
        (b"1\n2 s\n", "line 2: '2 s'"),
        (b"hello there\n", "line 1: 'hello there'"),
        (b"1e300\n", "invalid step times"),
        (bytes(range(256)), "binary"),
        (b"1\n\xff\xfe\n", "not text"),
        (b"PAR1\0\0", "binary"),
        (b"\x1f\x8bnot gzip", "gzip"),
        (b"loss,acc\n1,2\n", "no column step_seconds; there are loss, acc"),
        (b"step,step_ms\n", "holds no step times"),
        (b"step,step_ms\n1\n", "line 2 has no column step_ms"),
        (b"1,2\n3,4\n", "CSV without a header"),
        (b'{"loss": 1}\n{"loss": 2}\n', "no line has a key such as step_seconds"),
        (b'{"loss": [1]}', "without a list step_seconds"),
        (b'[1, "x"]', "entry 2: 'x'"),
        (b"[1, true]", "entry 2: 'True'"),
        (b"[[[", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"ranks": [1]}', "no steps with number"),
        (b'{"traceEvents": []}', "nothing was recorded"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(
    content: bytes, reason: str, a: Path, tmp_path: Path, compare: Command
) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(content)
    assert reason in compare.complaint(a, bad)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("{a}", "1 file or directory where A and B are needed"),
        ("{a} {a} {a}", "3 files"),
        ("--a {a}", "0 files or directories besides"),
        ("{a} {a}.none", "No such file"),
        ("{a} {empty}", "the directory is empty"),
        ("{a} {a} --warmup -1", "--warmup: '-1'"),
        ("{a} {a} --warmup 1000", "would be dropped as warm-up"),
        ("{a} {a} --confidence 2", "--confidence"),
        ("{a} {a} --confidence nan", "--confidence"),
        ("{a} {a} --max-regression x", "--max-regression"),
        ("{a} {a} --max-regression 0%", "not a percentage above zero"),
    ],
)
def test_a_bad_question_is_one_line_and_exit_code_2(
    words: str, reason: str, a: Path, tmp_path: Path, compare: Command
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert reason in compare.complaint(*words.format(a=a, empty=empty).split())
