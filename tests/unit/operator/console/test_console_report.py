"""The fleet report of a console: who gets it, and how it is made in the background."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rankscope.analysis.fleet.report import FleetReport
from rankscope.operator.correlation import fleet_reports
from rankscope.operator.correlation.correlator import LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.v1.job_service_pb2 import GetFleetReportResponse
from tests.free_ports import free_port
from tests.support.audit_records import Audited
from tests.support.prometheus_stub import HOSTILE, of_a_run, series, server
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import Cluster
from tests.unit.operator.console.test_console_access import Answer, ask, served
from tools.played_runs import Played


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.reports.close()
    made.server.stop()


def finished(reports: FleetReports, period: str = "24h") -> GetFleetReportResponse:
    """A report or a failure."""
    return wait_until(lambda: ((answer := reports.get(period)).report and answer) or (answer.failure and answer))


def decoded(answer: GetFleetReportResponse) -> FleetReport:
    return msgspec.json.decode(answer.report, type=FleetReport)


def report_of(port: int, token: str) -> Any:
    def made() -> Answer | None:
        answer = ask(port, "/report?since=24h", token)
        return answer if answer.status != 200 or not answer.json["making"] else None

    return wait_until(made)


# Access.


def test_the_report_needs_access_to_all_namespaces(cluster: Cluster, audited: Audited) -> None:
    ada, root = cluster.may("ada", "list"), cluster.may("root", "list", namespace="")
    with server(of_a_run) as url, served(cluster, Played()) as port:
        cluster.reports.use(url)
        for _ in range(2):
            refused = ask(port, "/report?since=24h", ada)
            assert refused.status == 403 and "in all namespaces" in refused.json["error"] and refused.json["next"]
            assert b"GPU-hours" not in refused.body
            allowed = report_of(port, root)  # now one is kept
            assert allowed.status == 200 and "1 run on 1 node" in allowed.json["headline"]
    assert {(each["user"], each["result"], each["message"]) for each in audited()} == {
        ("ada", "PermissionDenied", "list trainingruns")
    }


def test_names_of_the_report_are_printable_and_bounded(cluster: Cluster) -> None:
    root = cluster.may("root", "list", namespace="")
    run = {"run_namespace": "t"}

    def answer(query: str) -> tuple[int, object]:
        if query.startswith("sum_over_time((count by (cluster, run_namespace"):
            return series(*(({**run, "run": f"{HOSTILE}{number}", "node": "n" * 5000}, 6.0) for number in range(100)))
        return series()

    with server(answer) as url, served(cluster, Played()) as port:
        cluster.reports.use(url)
        document = report_of(port, root).json
    assert "\x1b" not in json.dumps(document, ensure_ascii=False)
    by_run = next(table for table in document["tables"] if table["title"] == "By run")
    assert len(by_run["rows"]) == 30 and "has 70 more" in by_run["said"][-1]
    assert max(len(cell) for table in document["tables"] for row in table["rows"] for cell in row) <= 1000
    numbers = {column for table in document["tables"] for column in table["columns"] if column not in table["left"]}
    assert numbers <= document["definitions"].keys()


def test_a_wrong_time_says_which_there_are(cluster: Cluster) -> None:
    root = cluster.may("root", "list", namespace="")
    with served(cluster, Played()) as port:
        answer = ask(port, "/report?since=9h", root)
        assert answer.status == 400 and "openapi.json" in answer.json["next"]


# In the background.


def test_a_report_is_made_once_while_requests_go_on() -> None:
    now = [0.0]
    may_answer, seen = threading.Event(), list[tuple[str, dict[str, str]]]()

    def answer(query: str) -> tuple[int, object]:
        if query != "vector(1)" and "mfu_target" in query:
            may_answer.wait()
        return of_a_run(query)

    with server(answer, seen) as url:
        reports = FleetReports(FleetUsage(LostSeconds()), url, lambda: now[0])
        first = reports.get("24h")
        assert not first.report and not first.failure
        wait_until(lambda: reports.get("24h").pages_done == reports.get("24h").pages - 1 > 0)
        assert reports.get("30d").pages == reports.get("24h").pages  # waits for the other
        may_answer.set()
        assert decoded(finished(reports)).runs == 1
        asked = len(seen)
        assert decoded(finished(reports)).runs == 1 and len(seen) == asked
        now[0] += fleet_reports.KEPT_SECONDS + 1
        assert not reports.get("24h").report  # too old: made again
        reports.close()


def test_failures_name_the_reason_and_the_next_step() -> None:
    reports = FleetReports(FleetUsage(LostSeconds()))
    assert "--prometheus-url" in decoded(reports.get("7d")).remarks[0]  # of memory
    cases = {
        (401, b"{}"): "--token-file",
        (200, b"<html>"): "address of its API",
    }
    for (status, body), step in cases.items():
        with server(lambda query, status=status, body=body: (status, body)) as url:
            reports.use(url)
            failed = finished(reports)
            assert failed.failure.startswith("Prometheus: ") and step in failed.next_step
    with server(lambda query: series()) as url:
        reports.use(url)
        assert "docs/metrics.md" in finished(reports).next_step
    reports.use(f"http://127.0.0.1:{free_port()}")
    assert "see that it runs" in finished(reports).next_step


def test_a_prometheus_that_is_too_slow_is_given_up() -> None:
    now = [0.0]

    def answer(query: str) -> tuple[int, object]:
        now[0] = fleet_reports.MAX_MAKING_SECONDS + 1.0
        return of_a_run(query)

    with server(answer) as url:
        reports = FleetReports(FleetUsage(LostSeconds()), url, lambda: now[0])
        failed = finished(reports, "30d")
    assert "too slow" in failed.failure and "shorter" in failed.next_step


def test_other_clusters_of_prometheus_are_not_reported() -> None:
    def answer(query: str) -> tuple[int, object]:
        if query.startswith("sum_over_time((count by (cluster, run_namespace"):
            runs = ({"cluster": name, "run_namespace": "t", "run": "r", "node": "n"} for name in ("here", "there"))
            return series(*((run, 6.0) for run in runs))
        return series()

    with server(answer) as url:
        failed = finished(FleetReports(FleetUsage(LostSeconds()), url))
    assert "2 clusters" in failed.failure and "of this cluster" in failed.next_step


def test_a_huge_report_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_reports, "MAX_REPORT_BYTES", 30_000)

    def answer(query: str) -> tuple[int, object]:
        if query.startswith("sum_over_time((count by (cluster, run_namespace"):
            runs = ({"run_namespace": "t", "run": f"run-{number}", "node": "n"} for number in range(500))
            return series(*((run, 6.0) for run in runs))
        return series()

    with server(answer) as url:
        report = decoded(finished(FleetReports(FleetUsage(LostSeconds()), url)))
    assert report.runs == 500 and len(report.by_run) == 200
    assert report.problems == ("by_run: the first 200 of 500",)
