from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.cli import fleet_history
from rankscope.cli.exit_codes import Exit
from rankscope.cli.main import main
from tests.free_ports import free_port
from tests.promql_reading import selectors
from tests.support.prometheus_server import prometheus_server
from tools.exported_metrics import exported_metrics

HOSTILE = "x\x1b[31m<script>alert(1)</script>"
Answer = Callable[[str], tuple[int, object]]  # status and document, by query


@contextmanager
def server(answer: Answer, seen: list[tuple[str, dict[str, str]]] | None = None) -> Iterator[str]:
    def answered(form: dict[str, str], headers: dict[str, str]) -> tuple[int, object]:
        if seen is not None:
            seen.append((form["query"], headers))
        return answer(form["query"])

    with prometheus_server(answered) as url:
        yield url


def series(*rows: tuple[dict[str, str], float]) -> tuple[int, object]:
    result = [{"metric": labels, "value": [0, str(value)]} for labels, value in rows]
    return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}


def of_a_run(query: str) -> tuple[int, object]:
    run = {"run_namespace": "t", "run": HOSTILE}
    if "rankscope_job_info" in query:
        return series(({**run, "world_size": "9" * 50, "team": HOSTILE, "command": HOSTILE}, 6.0))
    if query.startswith("sum_over_time((count by (cluster, run_namespace"):
        return series(({**run, "node": HOSTILE}, 6.0), ({**run, "node": "n"}, float("nan")))
    return series()


def asked(url: str, *options: str) -> int:
    return main(["report", "fleet", "--since", "2h", "--prometheus", url, *options])


def test_a_missing_address_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "fleet"]) == Exit.USAGE
    assert "--prometheus http://prometheus:9090" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--since", "soon"),
        ("--since", "900d"),
        ("--prometheus", "ftp://x"),
        ("--prometheus", "http://user:password@x"),
        ("--tenant", "a\nb"),
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
    assert "name another file with --html" in capsys.readouterr().err


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the images."""
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rankscope.cli.report_fleet", "rankscope.cli.terminal"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)


@pytest.mark.usefixtures("without_rich")
def test_pages_json_and_uploads_need_no_rich(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with server(of_a_run) as url:
        assert asked(url, "--json") == Exit.OK
        assert json.loads(capsys.readouterr().out)["runs"] == 1
        assert asked(url, "--html", str(tmp_path / "fleet.html")) == Exit.OK
        assert asked(url, "--upload", f"file://{tmp_path}/store") == Exit.OK
        assert asked(url) == Exit.USAGE
    assert "needs the cli extra" in capsys.readouterr().err
    assert (tmp_path / "fleet.html").read_text().startswith("<!doctype html>")


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
