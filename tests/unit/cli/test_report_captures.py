"""`rankscope report captures`: workers that share captures report what one process reports."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.analysis.traces.capture_report import (
    CaptureReport,
    CaptureRow,
    FindingTotal,
    KernelTotal,
    RunTotal,
    capture_report,
)
from rankscope.cli.main import main
from rankscope.cli.report_captures import read_part
from tests.shared_data import H200, ROOT
from tests.support.commands import Command
from tests.support.rank_traces import write_ranks

GLOO = [H200 / f"gloo_2ranks_rank{rank}.json.gz" for rank in (0, 1)]
HOSTILE = "\x1b[31mred\x1b[0m\u0000"


@pytest.fixture
def report(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd, "report", "captures")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three runs: one without a fault, one whose rank 5 is slow, one on CPUs."""
    folder = tmp_path_factory.mktemp("captures")
    for number in range(6):
        write_ranks(folder / "steady" / f"c{number}", 2, kernel=f"kernel_{number % 2}")
    for number in range(3):
        write_ranks(folder / "late" / f"c{number}", 8, slow=1.5 + number / 10)
    (folder / "host" / "c0").mkdir(parents=True)
    for path in GLOO:
        shutil.copy(path, folder / "host" / "c0")
    return folder


@pytest.fixture(scope="module")
def alone(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report that one process makes of all captures."""
    path = tmp_path_factory.mktemp("alone") / "report.json"
    assert main(["report", "captures", str(captures), "--output", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_report_counts_every_capture_run_and_rank(alone: dict[str, Any]) -> None:
    found = alone
    assert (found["captures"], found["ranks"]) == (10, 6 * 2 + 3 * 8 + 2)
    assert {run["run"]: run["captures"] for run in found["runs"]} == {"steady": 6, "late": 3, "host": 1}
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert sum(run["share_ratio"] for run in found["runs"]) == pytest.approx(1.0)
    assert sum(found["bounds"].values()) == 10
    assert found["verdicts"]["slow_rank"] == 3
    (slow,) = [one for one in found["findings"] if one["kind"] == "slow_rank"]
    assert (slow["captures"], slow["worst"]) == (3, ["late/c2", "late/c1", "late/c0"])
    late = next(run for run in found["runs"] if run["run"] == "late")
    # Two thirds of a step are lost at 1.5 times the work; of all time, that of the run.
    assert 0.3 * late["share_ratio"] < slow["saving_ratio"] < late["share_ratio"]
    kernels = {one["name"]: one["captures"] for one in found["kernels"]}
    assert (kernels["kernel_0"], kernels["kernel_1"], kernels["nvjet_sm90_gemm"]) == (3, 3, 3)


def test_joined_shards_equal_one_process(
    captures: Path, alone: dict[str, Any], tmp_path: Path, report: Command
) -> None:
    parts = tmp_path / "parts"
    for shard in (2, 0, 3):
        code, out, err = report(captures, "--shards", 4, "--shard", shard, "--parts", parts)
        assert (code, out) == (0, ""), err
        assert "the worker that ends last reports" in err
    assert report.json(captures, "--shards", 4, "--shard", 1, "--parts", parts, is_quiet=False) == alone, (
        "the last one reports"
    )
    assert report.json("--parts", parts, is_quiet=False) == alone
    rows = [len(read_part(path)[1]) for path in sorted(parts.iterdir())]
    assert sum(rows) == 10 and max(rows) < 10, rows


def test_captures_mounted_elsewhere_are_in_the_same_shard(
    captures: Path, alone: dict[str, Any], tmp_path: Path, report: Command
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(captures)
    for shard, place in enumerate((captures, elsewhere)):
        report(place, "--shards", 2, "--shard", shard, "--parts", tmp_path / "parts")
    assert report.json("--parts", tmp_path / "parts") == alone


def test_an_indexed_job_numbers_its_workers(
    captures: Path, alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Command
) -> None:
    path = tmp_path / "report.json"
    monkeypatch.setitem(sys.modules, "rich", None)  # which the image of the workers does not have
    monkeypatch.delitem(sys.modules, "rankscope.cli.terminal", raising=False)
    monkeypatch.delitem(sys.modules, "rankscope.cli.report_captures", raising=False)
    for index in ("1", "0"):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
        code, out, err = report(captures, "--shards", 2, "--parts", tmp_path / "parts", "--output", path)
        assert (code, out) == (0, ""), err
        assert path.exists() == (index == "0")
    assert json.loads(path.read_text()) == alone


def test_a_broken_file_is_named_and_left_out(
    captures: Path, alone: dict[str, Any], tmp_path: Path, report: Command
) -> None:
    captures = Path(shutil.copytree(captures, tmp_path / "captures"))
    (captures / "steady" / "c0" / "rank-9.json").write_text("no trace")
    (captures / "torn").mkdir()
    (captures / "torn" / "rank-0.json.gz").write_bytes(b"\x1f\x8b")
    code, out, err = report(captures, "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["broken"]) == 2 and "rank-9.json" in found["broken"][0] + found["broken"][1]
    assert err.count("warning: ") == 2
    assert {**found, "broken": []} == alone


def test_text_of_a_trace_cannot_control_the_terminal(tmp_path: Path, report: Command) -> None:
    write_ranks(tmp_path / f"run{HOSTILE[:-1]}" / "c", 1, kernel=f"kernel{HOSTILE}")
    code, out, err = report(tmp_path)
    assert code == 0
    assert "\x1b" not in out + err and "\0" not in out + err
    assert "1 capture of 1 run, 1 rank" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "next step: rankscope report captures DIR"),
        (("nowhere",), "cannot be read: No such file or directory"),
        (("captures", "--shard", "0"), "--shards N"),
        (("captures", "--parts", "parts"), "--shards N --shard I"),
        (("captures", "--shards", "2", "--shard", "2", "--parts", "parts"), "--shard 1"),
        (("captures", "--shards", "2", "--parts", "parts"), "next step: --shard 0"),
        (("captures", "--shards", "0", "--shard", "0", "--parts", "parts"), "next step: --shards 4"),
        (("captures", "--shards", "2", "--shard", "0"), "next step: --parts DIR"),
        (("--parts", "parts"), "run the workers"),
        (("captures", "--output", "nowhere/report.json"), "next step: name another with -o"),
    ],
)
def test_an_error_says_the_next_step(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    write_ranks(tmp_path / "captures" / "c", 1)
    code, _, err = report(*words)
    assert code == 2
    assert said in err, err


def test_parts_that_do_not_make_a_whole_are_refused(captures: Path, tmp_path: Path, report: Command) -> None:
    parts = tmp_path / "parts"
    report(captures, "--shards", 2, "--shard", 0, "--parts", parts)
    assert "shard 1 of 2 is missing" in report("--parts", parts)[2]
    report(captures, "--shards", 3, "--shard", 1, "--parts", parts)
    assert "parts of 2 and 3 shards" in report("--parts", parts)[2]
    (parts / "part-1-of-3.jsonl").write_text('{"shard": 1}\n')
    assert "part-1-of-3.jsonl: not a part of a report" in report("--parts", parts)[2]


def test_a_report_does_not_depend_on_the_order_of_rows(captures: Path, tmp_path: Path) -> None:
    main(["report", "captures", str(captures), "--shards", "1", "--shard", "0", "--parts", str(tmp_path / "parts")])
    rows = read_part(tmp_path / "parts" / "part-0-of-1.jsonl")[1]
    assert len(rows) == 10
    expected, shuffled = capture_report(rows), random.Random(5)
    for _ in range(20):
        shuffled.shuffle(rows)
        assert capture_report(rows) == expected


def test_the_page_lists_the_keys_of_the_json() -> None:
    page = (ROOT / "docs" / "report-captures.md").read_text()
    kinds: tuple[type[msgspec.Struct], ...] = (CaptureReport, FindingTotal, RunTotal, KernelTotal, CaptureRow)
    keys = {name for kind in kinds for name in kind.__struct_fields__}
    assert not keys - set(re.findall(r"`(\w+)`", page))
