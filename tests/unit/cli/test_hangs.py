from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import CollectiveRow, Gap, HangReport, Place
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.operator.correlation.correlator import Correlator, LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.correlation.job_service import JobServicer
from rankscope.v1.job_service_pb2_grpc import add_JobServiceServicer_to_server

Output = pytest.CaptureFixture[str]
REPORT = HangReport(
    id="h-20260301-101500-0a1b2c",
    run="llama",
    headline="63 ranks in all_reduce seq 1041 of group dp0, rank 17 in save_checkpoint (ckpt.py:51)",
    verdict="no rank has advanced for 35 s",
    world_size=64,
    began_unix_seconds=965.0,
    made_unix_seconds=1000.0,
    places=(
        Place("17", 1, "save_checkpoint (ckpt.py:51)", "checkpoint", ("save_checkpoint (/app/ckpt.py:51)",)),
        Place("0-16,18-63", 63, "all_reduce (train.py:118)", "communication", tuple(f"frame {n}" for n in range(20))),
    ),
    collectives=(
        CollectiveRow("all_reduce seq 1041 of group dp0", "0-16,18-63", "waits", "[4] Float"),
        CollectiveRow("all_reduce seq 1041 of group dp0", "17", "never entered", ""),
    ),
    gaps=(Gap("3", "flight recorder", "the job was started without TORCH_FR_BUFFER_SIZE"),),
    problems=("node-b: no answer within 20 s",),
)


class Server:
    def __init__(self, folder: Path) -> None:
        self.store = HangStore(FolderFiles(folder), lambda: 1000.0)
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_JobServiceServicer_to_server(
            JobServicer(Correlator(), self.store, FleetReports(FleetUsage(LostSeconds()))), self._server
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def call(self, *words: str) -> int:
        return main(["hangs", "--connect", self.address, *words])

    def stop(self) -> None:
        self._server.stop(None).wait()
        self.store.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "hangs")
    yield made
    made.stop()


def test_reports_are_listed_with_when_run_how_long_and_who(server: Server, capsys: Output) -> None:
    assert server.call() == Exit.OK
    assert capsys.readouterr().out.startswith("no hang was reported; `rankscope stacks` shows")
    server.store.keep(REPORT)
    ended = msgspec.structs.replace(REPORT, id="h-20260301-101501-0a1b2c", run="other", ended_unix_seconds=1565.0)
    server.store.keep(ended)
    server.store.see(REPORT.id, 1010.0)
    assert server.call() == Exit.OK
    latest, first = capsys.readouterr().out.splitlines()
    assert latest == f"{ended.id}  1970-01-01 00:16:40Z  other  10 min  {REPORT.headline}"
    assert first == f"{REPORT.id}  1970-01-01 00:16:40Z  llama  over 45 s  {REPORT.headline}"
    assert server.call("--run", "llama", "--json") == Exit.OK
    (one,) = json.loads(capsys.readouterr().out)["hangs"]
    assert (one["id"], one["began_unix_nanos"]) == (REPORT.id, 965 * 10**9)


def test_a_report_shows_odd_ranks_first_and_a_collectives_table(server: Server, capsys: Output) -> None:
    server.store.keep(REPORT)
    assert server.call(REPORT.id) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        REPORT.headline,
        "run: llama, 64 ranks",
        "last step: 1970-01-01 00:16:05Z",
        "lasted: over 35 s",
    ]
    odd, rest = (lines.index(text) for text in lines if text.endswith(("[checkpoint]", "[communication]")))
    assert lines[odd] == "rank 17 in save_checkpoint (ckpt.py:51) [checkpoint]" and odd < rest
    assert lines[rest] == "63 ranks (0-16,18-63) in all_reduce (train.py:118) [communication]"
    assert "    … 8 more; --json has all" in lines
    at = lines.index("COLLECTIVES")
    assert lines[at + 1].split() == ["collective", "ranks", "finding", "detail"]
    assert lines[at + 3] == "all_reduce seq 1041 of group dp0  17          never entered"
    assert any("TORCH_FR_BUFFER_SIZE" in line for line in lines)
    assert lines[-1] == "warning: node-b: no answer within 20 s"
    assert server.call(REPORT.id, "--json") == Exit.OK
    assert msgspec.convert(json.loads(capsys.readouterr().out), HangReport) == REPORT


class _Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_markup_and_control_codes_in_names_are_shown_as_text(server: Server, capsys: Output, tmp_path: Path) -> None:
    evil = "\x1b[2J</td><script src=x onload=alert(1)>\u202e"
    hostile = HangReport(
        id=REPORT.id,
        run=evil,
        headline=evil,
        verdict=evil,
        world_size=1,
        began_unix_seconds=965.0,
        made_unix_seconds=1000.0,
        left=evil,
        places=(Place(evil, 2, evil, evil, (evil,)),),
        collectives=(CollectiveRow(evil, evil, evil, evil),),
        gaps=(Gap(evil, evil, evil),),
        problems=(evil,),
    )
    server.store.keep(hostile)
    for words in ((), (REPORT.id,), (REPORT.id, "--json"), ("--json",)):
        assert server.call(*words) == Exit.OK
        assert not set(capsys.readouterr().out) & {"\x1b", "\u202e"}
    path = tmp_path / "hang.html"
    assert server.call(REPORT.id, "--html", str(path)) == Exit.OK
    text = path.read_text()
    found = _Tags(text)
    assert not found.tags & {"script", "img", "a", "iframe"} and not found.attributes & {"src", "onload", "href"}
    assert "default-src 'none'" in text and "\x1b" not in text


def test_the_page_has_everything(server: Server, tmp_path: Path, capsys: Output) -> None:
    server.store.keep(REPORT)
    path = tmp_path / "hang.html"
    assert server.call(REPORT.id, "--html", str(path)) == Exit.OK
    out, err = capsys.readouterr()
    assert err == f"wrote {path}\n" and REPORT.headline in out
    text = path.read_text()
    for part in (REPORT.headline, "never entered", "save_checkpoint (/app/ckpt.py:51)", "frame 19", "no answer within"):
        assert part in text


def test_errors_name_the_next_step(server: Server, tmp_path: Path, capsys: Output) -> None:
    server.store.keep(REPORT)
    for words, status, text in (
        (("h-20260301-101500-000000",), Exit.NOT_FOUND, "`rankscope hangs` lists them"),
        (("--html", "x.html"), Exit.USAGE, "--html needs the ID"),
        ((REPORT.id, "--run", "llama"), Exit.USAGE, "leave --run out"),
        ((REPORT.id, "--html", str(tmp_path / "no" / "x.html")), Exit.USAGE, "name another with --html"),
    ):
        assert server.call(*words) == status
        assert text in capsys.readouterr().err
    alone = grpc.server(ThreadPoolExecutor(1))
    port = alone.add_insecure_port("127.0.0.1:0")
    alone.start()
    assert main(["hangs", "--connect", f"127.0.0.1:{port}"]) == Exit.REFUSED
    assert "a daemon alone has no reports" in capsys.readouterr().err
    alone.stop(None).wait()
