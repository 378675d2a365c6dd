"""`rankscope report fleet` and a real Prometheus: a day of a small fleet, of blocks that promtool wrote."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rankscope.analysis.fleet.report import FleetReport
from rankscope.analysis.verdicts.verdict import FINDINGS
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.cli.report_fleet import to_json
from rankscope.operator import fleet_history
from rankscope.operator.correlation.correlator import LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from tests.alerts.prometheus_running import Prometheus, running_prometheus
from tests.fleet.reported import check, fleet_in_prometheus
from tests.integration.daemon_process import serving
from tests.security.rank_processes import rank_processes, rank_variables
from tests.support.waiting import wait_until
from tools.fleet_week import DAY, Fleet


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    with fleet_in_prometheus(tmp_path_factory.mktemp("fleet"), DAY) as made:
        yield made


def asked(prometheus: Prometheus, *options: str) -> int:
    return main(["report", "fleet", "--prometheus", prometheus.url, "--since", "24h", *options])


def test_a_report_finds_what_is_planted_and_nothing_else(
    day: tuple[Fleet, Prometheus], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fleet, prometheus = day
    page = tmp_path / "fleet.html"
    assert asked(prometheus, "--json", "--html", str(page)) == Exit.OK
    check(fleet, json.loads(capsys.readouterr().out))
    text = page.read_text()
    assert "gpu-002" in text and "python sweep.py" in text and "<script" not in text


def test_a_server_makes_the_same_report_in_the_background(day: tuple[Fleet, Prometheus]) -> None:
    fleet, prometheus = day
    reports = FleetReports(FleetUsage(LostSeconds()), prometheus.url)
    answer = wait_until(lambda: (made := reports.get("24h")).report and made)
    check(fleet, to_json(msgspec.json.decode(answer.report, type=FleetReport)))


def test_smaller_pages_give_the_same_report(
    day: tuple[Fleet, Prometheus], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, prometheus = day
    asked(prometheus, "--json")
    whole = json.loads(capsys.readouterr().out)
    # No answer fits: pages are halved until they do.
    pages: list[fleet_history.Page] = []
    answer = fleet_history._Reader._rows
    monkeypatch.setattr(fleet_history._Reader, "_rows", lambda *args: (pages.append(args[1]), answer(*args))[1])
    monkeypatch.setattr(fleet_history, "GPUS_PER_PAGE", 7)
    monkeypatch.setattr("rankscope.cli.report_fleet.MAX_ANSWER_BYTES", 4000)
    assert asked(prometheus, "--json") == Exit.OK
    parts = json.loads(capsys.readouterr().out)
    check(fleet, parts)
    assert len(pages) > 2 * len(fleet_history.ASKED) and {page.end - page.begin for page in pages} >= {86400, 43200}
    assert parts["used_gpu_hours"] == pytest.approx(whole["used_gpu_hours"])
    assert parts["lost_gpu_hours"] == pytest.approx(whole["lost_gpu_hours"])


def test_pages_that_fail_are_named(
    day: tuple[Fleet, Prometheus], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.cli.report_fleet.MAX_ANSWER_BYTES", 500)
    assert asked(day[1]) == Exit.UNDECIDED
    output = capsys.readouterr().out
    assert "note: incomplete: GPU-hours used: nothing from 20" in output
    assert "the answer is longer than" in output


def test_a_prometheus_without_our_series_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_prometheus(tmp_path, {}) as prometheus:
        assert asked(prometheus) == Exit.NOT_FOUND
    errors = capsys.readouterr().err
    assert "has no series of Rankscope" in errors and "next step" in errors


def test_a_real_run_says_what_it_runs_and_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account = {"SLURM_JOB_ACCOUNT": "vision"}
    with rank_processes(tmp_path) as processes, serving(tmp_path / "up", "up", "--console-listen", "none") as up:
        for rank in range(2):
            processes.start(rank_variables(rank, RANKSCOPE_RUN="fleet-report", **account))
        up.wait_until(lambda: up.values("rankscope_job_info", run="fleet-report"))
        (labels,) = [
            labels
            for name, labels, _ in up.scrape()
            if name == "rankscope_job_info" and labels["run"] == "fleet-report"
        ]
        assert (labels["team"], labels["command"], labels["world_size"]) == ("vision", "libtorch_sleep", "2")
        assert labels["user"] == pwd.getpwuid(os.getuid()).pw_name and labels["image"] == ""
        lost = up.values("rankscope_job_lost_gpu_seconds_total", run="fleet-report")
        assert len(lost) == len(FINDINGS)
        capsys.readouterr()
        assert main(["report", "fleet", "--connect", up.grpc_target, "--json"]) == Exit.OK
        report = json.loads(capsys.readouterr().out)
        assert report["runs"] >= 1 and report["rank_hours_without_gpu"] >= 0
        assert "when this server started" in report["remarks"][0] and report["complete"]
