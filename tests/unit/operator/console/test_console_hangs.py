"""Reports of hangs through the console: a running server in front of a real JobService, asked with http.client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import CollectiveRow, HangReport, Place
from rankscope.operator.correlation.correlator import Correlator, LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.correlation.job_service import JobServicer
from rankscope.v1.job_service_pb2_grpc import add_JobServiceServicer_to_server
from tests.unit.operator.console.test_console_api import ask, check, served
from tools.played_runs import Played

REPORT = HangReport(
    id="h-20261116-115203-4be1a0",
    run="llama",
    headline="63 ranks in all_reduce seq 1041 of group dp0, rank 17 in save_checkpoint (ckpt.py:51)",
    verdict="no rank has advanced for 35 s",
    world_size=64,
    began_unix_seconds=1000.0,
    made_unix_seconds=1035.0,
    culprits="17",
    places=(Place("17", 1, "save_checkpoint (ckpt.py:51)", "checkpoint", ("save_checkpoint (/app/ckpt.py:51)",)),),
    collectives=(CollectiveRow("all_reduce seq 1041 of group dp0", "17", "never entered", ""),),
)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    store = HangStore(FolderFiles(tmp_path / "hangs"), unix_seconds=lambda: 2000.0)
    store.keep(REPORT)
    store.keep(msgspec.structs.replace(REPORT, id="h-20261116-125203-4be1a1", run="bert", ended_unix_seconds=1100.0))
    server = grpc.server(ThreadPoolExecutor(2))
    add_JobServiceServicer_to_server(JobServicer(Correlator(), store, FleetReports(FleetUsage(LostSeconds()))), server)
    target = f"unix:{tmp_path / 'd.sock'}"
    server.add_insecure_port(target)
    server.start()
    with served(Played(), channels=lambda request: grpc.insecure_channel(target)) as address:
        yield address
    server.stop(None).wait()
    store.close()


def test_reports_are_listed_by_run_and_shown_whole(address: str) -> None:
    listed = ask(address, "/api/v1/hangs")
    check(listed.json, "HangsAnswer")
    assert {(row["run"], row["ended_unix_seconds"]) for row in listed.json["hangs"]} == {
        ("llama", None),
        ("bert", 1100),
    }
    (row,) = ask(address, "/api/v1/hangs?run=llama").json["hangs"]
    assert (row["id"], row["headline"]) == (REPORT.id, REPORT.headline)
    shown = ask(address, f"/api/v1/hang?id={REPORT.id}")
    check(shown.json, "HangReport")
    assert shown.json == json.loads(msgspec.json.encode(REPORT))


@pytest.mark.parametrize(
    ("wanted", "status"), [("h-20261116-115203-ffffff", 404), ("../h-1", 400), ("h-1%2f..", 400), ("", 400)]
)
def test_other_names_show_nothing(address: str, wanted: str, status: int) -> None:
    answer = ask(address, f"/api/v1/hang?id={wanted}")
    assert answer.status == status and answer.json["next"]
