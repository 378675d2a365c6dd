"""`rankscope export` and a real Prometheus: a day of a small fleet, of blocks that promtool wrote."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.cli import export_reader
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.operator.prometheus_api import PrometheusApi
from tests.alerts.prometheus_running import Prometheus, backfill, running_prometheus
from tests.fleet.exported import check_export, rows
from tests.fleet.reported import fleet_in_prometheus
from tools.fleet_week import DAY, HOUR, Fleet

HOSTILE = 'a"b\\c\nd/../e\x1b[31m⚡'


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    with fleet_in_prometheus(tmp_path_factory.mktemp("fleet"), DAY) as made:
        yield made


def exported(prometheus: Prometheus, folder: Path, *options: str) -> int:
    """Two days: the fleet's day began a while ago."""
    return main(["export", "--prometheus", prometheus.url, "--since", "2d", "-o", str(folder), *options])


@pytest.fixture(scope="module")
def folder(day: tuple[Fleet, Prometheus], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With all tables of the day."""
    made = tmp_path_factory.mktemp("export")
    assert exported(day[1], made) == Exit.OK
    return made


def test_an_export_has_each_row_once(day: tuple[Fleet, Prometheus], folder: Path) -> None:
    check_export(*day, folder)


@pytest.mark.parametrize(
    ("name", "column", "promql", "labels"),
    [
        ("gpus", "utilization_ratio", "rankscope_gpu_utilization_ratio", ("node", "gpu")),
        ("gpus", "memory_used_bytes", 'rankscope_gpu_memory_bytes{kind="used"}', ("node", "gpu")),
        ("ranks", "step_seconds", 'rankscope_rank_step_seconds{stat="p50"}', ("namespace", "run", "rank")),
        ("verdicts", "mfu_ratio", "rankscope_job_mfu_ratio", ("namespace", "run")),
    ],
)
def test_values_are_those_that_prometheus_gives(
    day: tuple[Fleet, Prometheus], folder: Path, name: str, column: str, promql: str, labels: tuple[str, ...]
) -> None:
    fleet, prometheus = day
    api = PrometheusApi(prometheus.url, 60.0, 64 << 20)
    truth = {}
    for one in api.query_range(promql, fleet.begin, fleet.end, 300):
        key = tuple(one.metric["run_namespace" if label == "namespace" else label] for label in labels)
        truth |= {(*key, moment): float(text) for moment, text in one.values}
    found = {
        (*(str(row[label]) for label in labels), row["time"].timestamp()): row[column]
        for row in rows(folder, name)
        if row[column] is not None
    }
    assert found == truth and len(truth) > 500


def test_pages_that_are_too_large_give_the_same_rows(
    day: tuple[Fleet, Prometheus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.cli.export.MAX_ANSWER_BYTES", 40_000)
    asked: list[float] = []
    query_range = PrometheusApi.query_range
    monkeypatch.setattr(
        export_reader.PrometheusApi,
        "query_range",
        lambda *args: (asked.append(args[3] - args[2]), query_range(*args))[1],
    )
    assert exported(day[1], tmp_path) == Exit.OK
    assert len(set(asked)) > 3
    check_export(*day, tmp_path)


def test_labels_of_a_container_arrive_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = int(time.time()) // 300 * 300
    text = HOSTILE.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'run_namespace="t",run="{text}",world_size="x",team="{text}",user="",image="",command="{text}"'
    lines = [f"rankscope_job_info{{{labels}}} 1 {moment}" for moment in range(now - HOUR, now, 300)]
    backfill(tmp_path, ["# TYPE rankscope_job_info gauge", *lines, "# EOF"])
    with running_prometheus(tmp_path, {}) as prometheus:
        assert exported(prometheus, tmp_path / "out") == Exit.OK
    found = rows(tmp_path / "out", "runs")
    assert {(row["run"], row["team"], row["command"], row["world_size"]) for row in found} == {(HOSTILE,) * 3 + (None,)}
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err


def test_a_prometheus_without_our_series_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_prometheus(tmp_path / "server", {}) as prometheus:
        assert exported(prometheus, tmp_path / "out") == Exit.NOT_FOUND
    assert "next step" in capsys.readouterr().err
