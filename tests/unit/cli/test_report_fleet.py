from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from rankscope.cli import report_fleet
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.operator import fleet_history
from rankscope.operator.correlation.correlator import Correlator
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.correlation.job_service import JobServicer
from rankscope.v1.job_service_pb2_grpc import add_JobServiceServicer_to_server
from tests.free_ports import free_port
from tests.promql_reading import selectors
from tests.support.prometheus_stub import of_a_run, server
from tools.exported_metrics import exported_metrics
from tools.played_runs import Played


def asked(url: str, *options: str) -> int:
    return main(["report", "fleet", "--since", "2h", "--prometheus", url, *options])


@contextmanager
def served(reports: FleetReports) -> Iterator[str]:
    """The address of a server of Rankscope."""
    api = grpc.server(ThreadPoolExecutor(2))
    store = HangStore(FolderFiles(None))
    add_JobServiceServicer_to_server(JobServicer(Correlator(), store, reports), api)
    port = api.add_insecure_port("127.0.0.1:0")
    api.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        api.stop(None).wait()
        reports.close()
        store.close()


def test_without_prometheus_the_server_reports_on_its_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    played = Played()
    for _ in range(20):
        played.tick(ranks=4)
    with served(FleetReports(played.usage)) as address:
        assert main(["report", "fleet", "--connect", address]) == Exit.OK
        output = capsys.readouterr().out
        assert (
            "no rank has exactly one known GPU: there are no GPU-hours to report on" in output
            and "rank-hours have no known GPU" in output
        )
        assert "note: only since 2027-01-15 01:00 UTC, when this server started" in output
        assert main(["report", "fleet", "--connect", address, "--since", "5d"]) == Exit.USAGE
    assert "24h, 7d, 30d" in capsys.readouterr().err


def test_a_server_that_knows_prometheus_reports_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_fleet, "ASK_SECONDS", 0.01)
    page = tmp_path / "fleet.html"
    with server(of_a_run) as url, served(FleetReports(Played().usage, url)) as address:
        assert main(["report", "fleet", "--connect", address, "--html", str(page)]) == Exit.OK
    assert "1 run on 1 node used 10.5 GPU-hours" in capsys.readouterr().out and "By team" in page.read_text()
    with served(FleetReports(Played().usage, f"http://127.0.0.1:{free_port()}")) as address:
        assert main(["report", "fleet", "--connect", address]) == Exit.REFUSED
    assert "next step: see that it runs" in capsys.readouterr().err


def test_no_server_says_how_to_ask_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "fleet", "--connect", f"127.0.0.1:{free_port()}"]) == Exit.UNREACHABLE
    assert "--prometheus http://prometheus:9090" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--since", "soon"),
        ("--since", "900d"),
        ("--prometheus", "ftp://x"),
        ("--prometheus", "http://user:password@x"),
        ("--tenant", "a\nb"),
        ("--connect", "127.0.0.1:1"),
        ("--context", "prod"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "fleet", "--prometheus", "http://127.0.0.1:1", *options]) == Exit.USAGE
    assert options[0] in capsys.readouterr().err


def test_a_server_that_is_not_there_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(f"http://127.0.0.1:{free_port()}") == Exit.UNREACHABLE
    assert "next step" in capsys.readouterr().err


def test_a_server_that_refuses_wants_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    with server(lambda query: (401, {"status": "error", "error": "who\x1b are you"})) as url:
        assert asked(url) == Exit.REFUSED
    errors = capsys.readouterr().err
    assert "--token-file" in errors and "\x1b" not in errors


def test_what_is_no_prometheus_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with server(lambda query: (200, b"<html>")) as url:
        assert asked(url) == Exit.USAGE
    assert "no result of a query" in capsys.readouterr().err


def test_tenant_and_token_are_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    seen: list[tuple[str, dict[str, str]]] = []
    with server(of_a_run, seen) as url:
        assert asked(url, "--tenant", "ml", "--token-file", str(token)) == Exit.OK
    assert {(head["X-Scope-OrgID"], head["Authorization"]) for _, head in seen} == {("ml", "Bearer s3cret")}


@pytest.mark.parametrize("content", [None, "two words", ""])
def test_a_token_that_cannot_be_read_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with server(of_a_run) as url:
        assert asked(url, "--token-file", str(token)) == Exit.USAGE
    assert f"--token-file {token}" in capsys.readouterr().err


def test_names_from_the_server_cannot_control_terminal_or_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "fleet.html"
    with server(of_a_run) as url:
        assert asked(url, "--html", str(page)) == Exit.OK
    captured = capsys.readouterr()
    assert "1 run on 1 node used 0.5 GPU-hours" in captured.out
    assert "\x1b" not in captured.out + captured.err
    assert "<script>" not in page.read_text() and "&lt;script&gt;" in page.read_text()


def test_pages_that_fail_are_asked_again_in_halves_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    def answer(query: str) -> tuple[int, object]:
        if "mfu_target" in query:
            return 422, {"status": "error", "error": "too many samples"}
        return of_a_run(query)

    with server(answer, seen) as url:
        assert asked(url, "--json") == Exit.UNDECIDED
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    (problem,) = document["problems"]
    assert problem.startswith("MFU targets: nothing from 20") and "too many samples" in problem
    spans = [query.rsplit("[", 1)[1] for query, _ in seen if "mfu_target" in query]
    assert sorted(spans) == ["3599s:300s])"] * 2 + ["7199s:300s])"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(of_a_run) as url:
        assert asked(url, "--html", str(tmp_path / "none" / "fleet.html")) == Exit.USAGE
    assert "name another with --html" in capsys.readouterr().err


WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from rankscope.cli.main import main; sys.exit(main())"


def test_pages_json_and_uploads_need_no_rich(tmp_path: Path) -> None:
    """As in the images."""

    def asked_without(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_RICH, "report", "fleet", "--prometheus", url, "--since", "24h"]
        return subprocess.run([*command, *options], capture_output=True, text=True)

    with server(of_a_run) as url:
        assert json.loads(asked_without("--json").stdout)["runs"] == 1
        written = asked_without("--html", str(tmp_path / "fleet.html"), "--upload", f"file://{tmp_path}/store")
        printed = asked_without()
    assert written.returncode == Exit.OK
    assert (tmp_path / "fleet.html").read_text().startswith("<!doctype html>")
    assert printed.returncode == Exit.USAGE and "needs the cli extra" in printed.stderr


def test_an_upload_puts_page_and_json_in_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(of_a_run) as url:
        assert asked(url, "--upload", f"file://{tmp_path}/store/") == Exit.OK
        assert asked(url, "--upload", f"file://{tmp_path}/store") == Exit.OK
    captured = capsys.readouterr()
    page, document = sorted((tmp_path / "store").iterdir(), key=lambda path: path.suffix)
    assert captured.out == "" and f"uploaded file://{page}" in captured.err
    assert page.stem == document.stem and re.fullmatch(r"fleet-\d{4}-\d\d-\d\d", page.stem)
    assert (page.suffix, document.suffix) == (".html", ".json")
    assert json.loads(document.read_text())["runs"] == 1
    assert "&lt;script&gt;" in page.read_text()


@pytest.mark.parametrize("url", ["reports", "unheardof://bucket"])
def test_a_store_that_is_none_is_said_before_asking(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, dict[str, str]]] = []
    with server(of_a_run, seen) as prometheus:
        assert asked(prometheus, "--upload", url) == Exit.USAGE
    assert not seen and "next step" in capsys.readouterr().err


def test_a_store_that_cannot_be_written_hides_its_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with server(of_a_run) as url:
        assert asked(url, "--upload", f"file://{tmp_path}/file/store") == Exit.USAGE
        assert asked(url, "--upload", "unheardof://ada:s3cret@bucket/folder") == Exit.USAGE
    errors = capsys.readouterr().err
    assert "--upload" in errors and "s3cret" not in errors


@pytest.mark.parametrize("name", fleet_history.ASKED)
def test_every_metric_and_label_that_is_asked_for_exists(name: str) -> None:
    exported = exported_metrics()
    question = fleet_history.ASKED[name]
    for selector in selectors(question.promql.replace("$gpus", '"GPU-1"')):
        metric = exported[selector.metric]
        assert {matcher.label for matcher in selector.matchers} <= set(metric.labels)


def test_gpus_are_literals_of_a_regular_expression() -> None:
    assert fleet_history._literal("GPU-1a_b") == "GPU-1a_b"
    assert fleet_history._literal('a.*"|') == 'a\\.\\*\\"\\|'
    assert fleet_history._literal("ü") == "-"
