from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rankscope.cli import export, export_reader
from rankscope.cli.export_tables import TABLES, Column, Source, Table, Type
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from tests.free_ports import free_port
from tests.promql_reading import label_lists, selectors
from tests.support.prometheus_server import prometheus_server
from tools.exported_metrics import exported_metrics

PAGE = Path(__file__).resolve().parents[3] / "docs" / "export.md"
NOW = 1_800_000_000 // 86400 * 86400 + 7 * 3600  # 07:00 UTC
HOSTILE = "x\x1b[31m\0'\"/../../⚡ " + "y" * 2000
Form = dict[str, str]


@pytest.fixture(autouse=True)
def at_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.time, "time", lambda: NOW + 17.0)
    monkeypatch.setattr(export_reader, "RETRY_SECONDS", 0.0)


def asked(url: str, folder: Path, *options: str) -> int:
    return main(["export", "--prometheus", url, "--since", "1h", "-o", str(folder), *options])


def matrix(form: Form, *series: dict[str, str], value: str = "1") -> tuple[int, object]:
    """Each series at each step of the query, as Prometheus answers."""
    if form["query"] == "vector(1)":
        return 200, {"status": "success", "data": {"resultType": "vector", "result": []}}
    begin, end, step = (int(float(form[name])) for name in ("start", "end", "step"))
    values = [[moment, value] for moment in range(begin, end + 1, step)]
    result = [{"metric": labels, "values": values} for labels in series]
    return 200, {"status": "success", "data": {"resultType": "matrix", "result": result}}


def is_of(form: Form, metric: str) -> bool:
    return metric in form["query"]


RUN = {"run_namespace": "t", "run": "r"}
GPU = {"node": "n", "gpu": "GPU-1"}


def of_a_fleet(form: Form) -> tuple[int, object]:
    if is_of(form, "rankscope_job_info"):
        return matrix(form, {**RUN, "world_size": "8", "team": "a"})
    if is_of(form, "rankscope_gpu_info"):
        return matrix(form, {**GPU, "index": "0", "name": "H100"}, {**GPU, "gpu": "GPU-2", "index": "x"})
    if is_of(form, "rankscope_gpu_utilization_ratio"):
        return matrix(form, GPU, {"node": "other", "gpu": "GPU-9"}, value="0.5")
    if is_of(form, "rankscope_gpu_shared"):
        return matrix(form, GPU, value="0")
    return matrix(form)


@contextmanager
def server(answer: Callable[[Form], tuple[int, object]] = of_a_fleet, seen: list[Form] | None = None) -> Iterator[str]:
    def answered(form: Form, _: dict[str, str]) -> tuple[int, object]:
        if seen is not None:
            seen.append(form)
        return answer(form)

    with prometheus_server(answered) as url:
        yield url


def read(folder: Path, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / table).glob("date=*/*.parquet")):
        rows += pyarrow.parquet.ParquetFile(path).read().to_pylist()
    return rows


def test_rows_have_labels_values_and_nulls_where_nothing_was_measured(tmp_path: Path) -> None:
    with server() as url:
        assert asked(url, tmp_path / "out") == Exit.OK
    gpus = read(tmp_path / "out", "gpus")
    assert len(gpus) == 2 * (7 * 12 + 1)
    assert {row["gpu"] for row in gpus} == {"GPU-1", "GPU-2"}
    first, second = gpus[0], gpus[-1]
    assert (first["utilization_ratio"], first["shared"], first["index"]) == (0.5, False, 0)
    assert (first["cluster"], first["power_watts"]) == ("", None)
    assert (second["utilization_ratio"], second["shared"], second["index"]) == (None, None, None)
    times = [row["time"].timestamp() for row in gpus if row["gpu"] == "GPU-1"]
    assert times == list(range(NOW - 7 * 3600, NOW + 1, 300))


def test_a_run_has_one_row_a_day(tmp_path: Path) -> None:
    with server() as url:
        assert asked(url, tmp_path, "--since", "1d", "--tables", "runs") == Exit.OK
    yesterday, today = read(tmp_path, "runs")
    assert (today["namespace"], today["run"], today["team"], today["world_size"]) == ("t", "r", "a", 8)
    assert today["first_seen"].timestamp() == NOW - 7 * 3600 and today["last_seen"].timestamp() == NOW
    assert yesterday["seen_seconds"] == 86400.0 and today["seen_seconds"] == 7 * 3600 + 300
    assert [path.name for path in tmp_path.iterdir()].count("gpus") == 0


def test_files_carry_types_units_and_compression(tmp_path: Path) -> None:
    with server() as url:
        asked(url, tmp_path)
    (path,) = (tmp_path / "gpus").glob("date=*/*.parquet")
    assert path.parent.name == "date=2027-01-15"
    file = pyarrow.parquet.ParquetFile(path)
    schema = file.schema_arrow
    assert schema.field("time").type == pyarrow.timestamp("ms", tz="UTC")
    assert pyarrow.types.is_dictionary(schema.field("node").type)
    assert schema.field("power_watts").metadata[b"unit"] == b"W"
    assert schema.metadata[b"rankscope.step_seconds"] == b"300"
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.metadata.num_row_groups == 2, "one for each page of six hours"
    described = json.loads((tmp_path / "schema.json").read_text())
    assert described["version"] == 1
    assert [one["name"] for one in described["tables"]["gpus"]["columns"]] == schema.names


def test_label_values_are_kept_and_name_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(form: Form) -> tuple[int, object]:
        labels = {"run_namespace": HOSTILE, "run": HOSTILE, "world_size": "9" * 50, "image": HOSTILE}
        return matrix(form, labels) if is_of(form, "rankscope_job_info") else matrix(form)

    with server(answer) as url:
        assert asked(url, tmp_path) == Exit.OK
    (row,) = read(tmp_path, "runs")
    assert (row["run"], row["image"], row["world_size"]) == (HOSTILE, HOSTILE, None)
    names = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("*")]
    assert sorted(names)[0] == ("runs",) and max(map(len, names)) == 3
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("values", [[[1e300, "1"]], [[NOW, "one"]], [[NOW - 1e9, "1"]], [[NOW, "NaN"], [NOW, "-Inf"]]])
def test_values_that_cannot_be_are_no_rows(values: list[object], tmp_path: Path) -> None:
    def answer(form: Form) -> tuple[int, object]:
        if is_of(form, "rankscope_gpu_info"):
            series = {"metric": GPU, "values": values}
            return 200, {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
        return of_a_fleet(form)

    with server(answer) as url:
        assert asked(url, tmp_path) in (Exit.OK, Exit.UNDECIDED)
    assert read(tmp_path, "gpus") == [] and len(read(tmp_path, "runs")) == 1


def spans(seen: list[Form], metric: str) -> list[int]:
    asked_for = [form for form in seen if is_of(form, metric) and "start" in form]
    return [int(float(form["end"]) - float(form["start"])) // 300 + 1 for form in asked_for]


def test_a_page_that_is_refused_is_asked_in_halves(tmp_path: Path) -> None:
    seen: list[Form] = []

    def answer(form: Form) -> tuple[int, object]:
        if "start" in form and float(form["end"]) - float(form["start"]) > 2 * 3600:
            return 422, {"status": "error", "error": "query processing would load too many samples"}
        return of_a_fleet(form)

    with server(answer, seen) as url:
        assert asked(url, tmp_path / "parts", "--tables", "gpus") == Exit.OK
    with server() as url:
        assert asked(url, tmp_path / "whole", "--tables", "gpus") == Exit.OK
    assert spans(seen, "rankscope_gpu_info") == [72, 36, 18, 18, 36, 18, 18, 13]
    assert read(tmp_path / "parts", "gpus") == read(tmp_path / "whole", "gpus")


def test_a_page_with_too_many_rows_becomes_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as url:
        assert asked(url, tmp_path / "whole", "--tables", "gpus") == Exit.OK
        monkeypatch.setattr(export_reader, "MAX_PAGE_CELLS", 40)
        assert asked(url, tmp_path / "parts", "--tables", "gpus") == Exit.OK
        monkeypatch.setattr(export_reader, "MAX_PAGE_CELLS", 1)
        assert asked(url, tmp_path / "none", "--tables", "gpus") == Exit.UNDECIDED

    def order(row: dict[str, Any]) -> Any:
        return row["gpu"], row["time"]

    whole, parts = read(tmp_path / "whole", "gpus"), read(tmp_path / "parts", "gpus")
    assert sorted(parts, key=order) == sorted(whole, key=order)
    assert read(tmp_path / "none", "gpus") == []


def test_what_is_not_answered_is_named_and_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(form: Form) -> tuple[int, object]:
        if is_of(form, "rankscope_gpu_utilization_ratio"):
            return 400, {"status": "error", "error": "no \x1b[31msuch function"}
        return of_a_fleet(form)

    with server(answer) as url:
        assert asked(url, tmp_path, "--json") == Exit.UNDECIDED
        summary = json.loads(capsys.readouterr().out)
        assert asked(url, tmp_path) == Exit.UNDECIDED
    (missing,) = summary["missing"]
    assert missing.startswith("utilization_ratio of gpus: nothing from 2027-01-15 00:00 UTC to 2027-01-15 06:00 UTC")
    assert summary["complete"] is False and summary["tables"]["gpus"]["rows"] == 170
    errors = capsys.readouterr().err
    assert "no" in errors and "next step" in errors and "\x1b" not in errors
    assert {row["utilization_ratio"] for row in read(tmp_path, "gpus")} == {None}


def test_a_server_that_goes_away_leaves_whole_days(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(form: Form) -> tuple[int, object]:
        if "start" in form and float(form["start"]) >= NOW - 3600:
            raise ConnectionResetError  # the handler's connection ends without an answer
        if form["query"] == "vector(1)" and (tmp_path / "gpus").is_dir():
            raise ConnectionResetError
        return of_a_fleet(form)

    with server(answer) as url:
        assert asked(url, tmp_path, "--since", "1d", "--tables", "gpus") == Exit.UNREACHABLE
    assert "next step" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()].count("part-0.parquet") == 1
    assert len(read(tmp_path, "gpus")) == 2 * 288


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_ends_the_export(status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(form: Form) -> tuple[int, object]:
        return (status, {"status": "error", "error": "no"}) if "start" in form else of_a_fleet(form)

    with server(answer) as url:
        assert asked(url, tmp_path / "out") == Exit.REFUSED
    assert "--token-file" in capsys.readouterr().err


def test_a_server_that_is_not_there_makes_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(f"http://127.0.0.1:{free_port()}", tmp_path / "out") == Exit.UNREACHABLE
    assert "next step" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_server_without_our_series_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(matrix) as url:
        assert asked(url, tmp_path / "out") == Exit.NOT_FOUND
    assert "has no series of Rankscope" in capsys.readouterr().err


def test_a_second_export_replaces_the_day(tmp_path: Path) -> None:
    with server() as url:
        asked(url, tmp_path, "--tables", "gpus")
        before = read(tmp_path, "gpus")
        asked(url, tmp_path, "--tables", "gpus")
        assert read(tmp_path, "gpus") == before

    def more(form: Form) -> tuple[int, object]:
        return matrix(form, *({**GPU, "gpu": f"GPU-{number}"} for number in range(3)))

    with server(more) as url:
        assert asked(url, tmp_path, "--tables", "gpus") == Exit.OK
    assert {row["gpu"] for row in read(tmp_path, "gpus")} == {"GPU-0", "GPU-1", "GPU-2"}
    assert len(list((tmp_path / "gpus").rglob("*"))) == 2, "a directory and a file"


def test_a_day_that_prometheus_forgets_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as url:
        asked(url, tmp_path, "--tables", "gpus")
    before = read(tmp_path, "gpus")

    def forgetful(form: Form) -> tuple[int, object]:
        is_old = "start" in form and float(form["start"]) < NOW - 3 * 3600
        return matrix(form) if is_old else of_a_fleet(form)

    with server(forgetful) as url:
        assert asked(url, tmp_path, "--tables", "gpus") == Exit.OK
    assert read(tmp_path, "gpus") == before
    assert "note: kept gpus of 2027-01-15" in capsys.readouterr().err
    assert len(list((tmp_path / "gpus").rglob("*"))) == 2, "nothing temporary is left"


@pytest.mark.parametrize("name", ["notes.txt", "schema.json", "gpus/x.parquet"])
def test_a_directory_of_something_else_stays_untouched(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"format": 1}')
    before = sorted(tmp_path.rglob("*"))
    with server() as url:
        assert asked(url, tmp_path) == Exit.USAGE
    assert "name a new directory" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / name).read_text() == '{"format": 1}'


def test_foreign_files_in_an_export_stay_untouched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as url:
        asked(url, tmp_path)
        (path,) = (tmp_path / "gpus").glob("date=*/*.parquet")
        beside = path.with_name("notes.txt")
        beside.write_text("mine")
        assert asked(url, tmp_path) == Exit.OK and beside.read_text() == "mine"
        path.write_text("mine, too")
        assert asked(url, tmp_path) == Exit.USAGE
        assert path.read_text() == "mine, too" and "move it away" in capsys.readouterr().err
        path.unlink()
        path.symlink_to(beside)
        assert asked(url, tmp_path) == Exit.USAGE and beside.read_text() == "mine"


def test_exports_with_other_steps_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server() as url:
        asked(url, tmp_path)
        assert asked(url, tmp_path, "--step", "10m") == Exit.USAGE
    assert "--step 300s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--step", "7m"),
        ("--step", "1s"),
        ("--step", "2h"),
        ("--step", "x"),
        ("--tables", "runs,x"),
        ("--since", "900d"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("http://127.0.0.1:1", tmp_path / "out", *options) == Exit.USAGE
    assert options[0] in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with server() as url:
        assert asked(url, tmp_path / "file" / "out") == Exit.USAGE
        assert asked(url, tmp_path / "file") == Exit.USAGE
    assert "name another with -o" in capsys.readouterr().err


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rankscope.cli.export", "rankscope.cli.export_files"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert asked("http://127.0.0.1:1", tmp_path) == Exit.USAGE
    assert "pip install 'rankscope[export]'" in capsys.readouterr().err


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_metric_and_label_that_is_asked_for_exists(table: Table) -> None:
    exported = exported_metrics()
    labels = {label for metric in exported.values() for label in metric.labels} | {"cluster"}
    for column in (None, *table.of(Source.QUERY)):
        promql = table.query(column, 300)
        assert "$" not in promql
        for listed in label_lists(promql):
            assert listed <= labels
        for selector in selectors(promql):
            metric = exported[selector.metric]
            for matcher in selector.matchers:
                assert set(matcher.words) <= set(metric.labels[matcher.label])
    assert set(table.key) <= set(table.labels) <= labels


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_column_of_a_table_has_one_meaning(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names)) == len(names) and "date" not in names
    for column in table.columns:
        assert column.help.endswith(".") and (column.unit or column.type in (Type.STRING, Type.BOOLEAN, Type.INTEGER))


def _described(table: Table) -> str:
    def row(column: Column) -> str:
        metrics = ", ".join(f"`{name}`" for name in dict.fromkeys(one.metric for one in selectors(column.given)))
        return f"| `{column.name}` | {column.type.value} | {column.unit} | {column.help} | {metrics} |".replace(
            "|  |", "| |"
        )

    rows = "\n".join(row(column) for column in table.columns)
    head = "| column | type | unit | meaning | metric |\n|---|---|---|---|---|\n"
    return f"### `{table.name}`\n\n{table.help}\n\n{head}{rows}\n"


def test_the_page_has_the_columns_of_every_table() -> None:
    """REGENERATE_GOLDEN=1 rewrites them."""
    tables = "".join(f"{_described(table)}\n" for table in TABLES)
    between = re.compile(
        r"(?<=<!-- tables, by tests/unit/cli/test_export.py -->\n\n).*?(?=<!-- end of tables -->)", re.S
    )
    text = PAGE.read_text()
    if os.environ.get("REGENERATE_GOLDEN"):
        PAGE.write_text(between.sub(lambda _: tables, text))
        return
    assert between.findall(text) == [tables]
