from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.shared_data import ROOT, shared
from tests.support.commands import Command
from tests.unit.analysis.timelines.simulation import Fault, Shape, simulate

SHAPE = Shape(stages=2, replicas=4, micro_batches=4)
CULPRIT = (1, 2, 0)


@pytest.fixture
def timeline(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "analyze", "timeline")


@pytest.fixture(scope="module")
def table() -> pyarrow.Table:
    fault = Fault(compute=lambda step, place: 2.0 if place == CULPRIT else 1.0)
    return pyarrow.table(simulate(SHAPE, 20, fault=fault, seed=1))


@pytest.fixture
def trace(table: pyarrow.Table, tmp_path: Path) -> Path:
    path = tmp_path / "trace.parquet"
    pyarrow.parquet.write_table(table, path)
    return path


def test_the_public_trace_has_its_published_numbers(timeline: Command) -> None:
    folder = shared("stage_imbalance")
    read = timeline.json(folder / "trace-ST.parquet", "--meta", folder / "meta-ST.yaml")
    assert (read["verdict"], read["culprit_stage"], read["culprit_ranks"]) == ("slow_stage", 3, [])
    assert read["slowdown"] == pytest.approx(1.1787021836556841, abs=1e-6)
    assert read["m_s"] == pytest.approx(1.2193563788811714, abs=1e-6)
    assert read["m_w"] == pytest.approx(0.031404269124045224, abs=1e-6)
    assert read["by_rank"]["7"] == pytest.approx(1.1778704237064905, abs=1e-6)
    # What the last stage costs beyond the others: it works 1.6 times as long.
    assert read["what_if"]["if_stage"]["3"] < 0.8 * read["step_seconds"]


def test_every_key_is_documented(timeline: Command, trace: Path) -> None:
    page = (ROOT / "docs" / "analyze-timeline.md").read_text()
    read = timeline.json(trace)
    keys = {*read, *read["what_if"], *read["shape"], *read["steps"], *read["own_work"]["0"]}
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_a_slow_rank_is_named_with_the_step_without_it(timeline: Command, trace: Path) -> None:
    read = timeline.json(trace)
    culprit = SHAPE.rank(CULPRIT)
    assert (read["verdict"], read["culprit_ranks"]) == ("slow_rank", [culprit])
    without = read["what_if"]["if_rank"][str(culprit)]
    assert 1 - without / read["step_seconds"] == pytest.approx(read["impact_ratio"], abs=1e-9)
    assert read["impact_ratio"] > 0.2
    others = [seconds for rank, seconds in read["what_if"]["if_rank"].items() if rank != str(culprit)]
    assert min(others) > 0.97 * read["step_seconds"]
    assert read["own_work"][str(culprit)]["ratio_to_stage"] == pytest.approx(2.0, rel=0.1)


def test_csv_says_the_same_as_parquet_in_any_unit(
    timeline: Command, table: pyarrow.Table, trace: Path, tmp_path: Path
) -> None:
    expected = timeline.json(trace)
    for name in ("start_ts", "duration"):
        at = table.column_names.index(name)
        nanoseconds = np.round(table.column(name).to_numpy() * 1e9).astype(np.int64)
        nanoseconds += 1_700_000_000_000_000_000 if name == "start_ts" else 0
        table = table.set_column(at, name, pyarrow.array(nanoseconds))
    path = tmp_path / "trace.csv"
    pyarrow.csv.write_csv(table, path)
    read = timeline.json(path, "--unit", "ns")
    assert read["culprit_ranks"] == expected["culprit_ranks"]
    assert read["slowdown"] == pytest.approx(expected["slowdown"], abs=1e-6)
    assert read["step_seconds"] == pytest.approx(expected["step_seconds"], abs=1e-7)


def test_the_terminal_marks_the_culprit(timeline: Command, trace: Path) -> None:
    out = timeline.answer(trace)
    assert out.startswith("slow_rank Rank 6: 1.98×")
    assert "6 ✗" in out and "S = " in out and "backward-compute" in out


def test_pictures_and_page_are_written(timeline: Command, trace: Path, tmp_path: Path) -> None:
    svg, page = tmp_path / "map.svg", tmp_path / "report.html"
    timeline.json(trace, "--heatmap", svg, "--html", page, is_quiet=False)
    assert svg.read_text().startswith("<svg") and "stage 1" in svg.read_text()
    text = page.read_text()
    assert "slow_rank: Rank 6" in text and text.count("<svg") == 3
    assert "http" not in text.replace("http-equiv", "")


def test_fewer_steps_are_judged_when_asked_for(timeline: Command, table: pyarrow.Table, tmp_path: Path) -> None:
    path = tmp_path / "short.parquet"
    pyarrow.parquet.write_table(table.filter(pyarrow.compute.less(table.column("step"), 8)), path)
    assert timeline.json(path)["verdict"] == "insufficient_data"
    assert timeline.json(path, "--min-steps", 5)["verdict"] == "slow_rank"


def test_files_that_cannot_be_read_get_one_line(timeline: Command, trace: Path, tmp_path: Path) -> None:
    empty, text, cut = tmp_path / "empty.parquet", tmp_path / "text.parquet", tmp_path / "cut.parquet"
    empty.touch()
    text.write_text("dp_rank,stage\n")
    cut.write_bytes(trace.read_bytes()[:2000])
    assert "No such file" in timeline.complaint(tmp_path / "nowhere.parquet")
    assert "the file is empty" in timeline.complaint(empty)
    assert "not a parquet file" in timeline.complaint(text)
    assert "broken parquet file" in timeline.complaint(cut)
    assert "Is a directory" in timeline.complaint(tmp_path)
    ragged = tmp_path / "ragged.csv"
    ragged.write_bytes(b"dp_rank,stage\n1\n2,3,4\n\xff\xfe\x00")
    assert "neither parquet nor CSV" in timeline.complaint(ragged)
    assert "give it the ending .svg" in timeline.complaint(trace, "--heatmap", "map.png")
    assert "cannot be written" in timeline.complaint(trace, "--heatmap", tmp_path / "no" / "map.svg")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("pp_size: [", "not YAML"),
        ("- 1", "no mapping"),
        ("", "no mapping"),
        ("pp_size: four", "whole number"),
        ("dp_size: 0", "whole number"),
        ("pp_size: true", "whole number"),
        ("name: job", "none of pp_size"),
        ("pp_size: 1", "there is a stage 1"),
        ("dp_size: 3", "there is a dp_rank 3"),
        ("pp_size: 3", "has no rows"),
    ],
)
def test_metadata_that_is_wrong_gets_one_line(
    timeline: Command, trace: Path, tmp_path: Path, content: str, message: str
) -> None:
    meta = tmp_path / "meta.yaml"
    meta.write_text(content)
    assert message in timeline.complaint(trace, "--meta", meta)


def test_metadata_declaring_more_ranks_than_present_is_not_judged(
    timeline: Command, trace: Path, tmp_path: Path
) -> None:
    meta = tmp_path / "meta.yaml"
    meta.write_text("pp_size: 2\ndp_size: 8\n")
    assert timeline.json(trace, "--meta", meta)["verdict"] == "insufficient_data"
