from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rankscope.cli import capture as command
from rankscope.cli import capture_download as capture_downloading
from rankscope.cli import captures
from rankscope.cli.capture_download import DownloadError, artifacts, download
from rankscope.operator.console.capture_answers import artifact_name
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.unit.cli import capture_server as scripted
from tests.unit.cli.capture_server import ANALYSED, FAILED, ID, ScriptedCaptures, capture
from tests.unit.cli.test_capture import joined, run

DATA = {rank: bytes([rank]) + os.urandom(2499) for rank in (0, 1)}


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCaptures]:
    monkeypatch.setattr(capture_downloading, "PAUSE_SECONDS", 0.01)
    captures = ScriptedCaptures()
    captures.artifacts = dict(DATA)
    captures.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=joined)]
    captures.known = {ID: captures.script[0]}
    server = scripted.serve(captures, f"unix:{tmp_path}/d.sock")
    yield captures
    server.stop(0).wait(5)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock"


@pytest.fixture
def stub(endpoint: str) -> Iterator[CaptureServiceStub]:
    with grpc.insecure_channel(endpoint) as channel:
        yield CaptureServiceStub(channel)


def test_output_writes_rank_files_and_summary_and_names_next_command(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "traces"
    assert run(command, "--connect", endpoint, "--steps", "3", "--output", str(folder)) == 0
    names = {f"bert-{ID}-rank{rank}.json.gz" for rank in (0, 1)}
    assert {path.name for path in folder.iterdir()} == names | {"summary.json"}
    assert (folder / f"bert-{ID}-rank1.json.gz").read_bytes() == DATA[1]
    summary = json.loads((folder / "summary.json").read_text())
    assert [rank["file"] for rank in summary["ranks"]] == [str(folder / name) for name in sorted(names)]
    assert f"rankscope analyze trace {folder}\n" in capsys.readouterr().out


def test_every_window_of_a_rank_that_recorded_several_is_fetched(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.artifacts[(0, 1)] = b"the second window"
    window = daemon.script[0].ranks[0].more_windows.add(artifact="rank0.window2.json.gz", bytes=17)
    assert run(command, "--connect", endpoint, "--steps", "1", "--repeat", "2", "--wait", "5", "--json",
               "--output", str(tmp_path / "traces")) == 0  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    (second,) = told["ranks"][0]["more_files"]
    assert Path(second).name == f"bert-{ID}-rank0.window2.json.gz"
    assert Path(second).read_bytes() == b"the second window" and window.bytes == 17
    assert told["ranks"][1]["more_files"] == []
    options = daemon.requests[0].options
    assert (options.wait_steps, options.repeat, options.HasField("warmup_steps")) == (5, 2, False)


def test_beside_other_traces_the_next_command_names_this_captures_own(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "older-rank0.json.gz").write_bytes(b"")
    assert run(command, "--connect", endpoint, "--steps", "3", "--output", str(tmp_path)) == 0
    assert f"rankscope analyze trace '{tmp_path}/bert-{ID}-rank*.json.gz'\n" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["../../etc/cron.d/x", "a/b\\c", "..", ".hidden", "-rf", "\x1b[2J\n", "", "j" * 5000])
def test_no_job_name_leads_out_of_the_directory(job: str) -> None:
    name = artifact_name(made := capture(ANALYSED, ANALYSED, job=job), made.ranks[0])
    assert Path(name).name == name and name[0] not in ".-" and len(name) < 255
    assert name.isprintable() and name.endswith(f"-{ID}-rank0.json.gz")


def test_stacks_keep_their_own_ending() -> None:
    made = capture(ANALYSED, ANALYSED)
    made.ranks[0].artifact = "rank0.folded.gz"
    assert artifact_name(made, made.ranks[0]).endswith("rank0.folded.gz")


def test_a_partial_file_continues_where_it_ended(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    made = daemon.script[0]
    (tmp_path / f"bert-{ID}-rank0.json.gz.part").write_bytes(DATA[0][:700])
    path = download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path)
    assert path.read_bytes() == DATA[0]
    assert daemon.offsets == [700]
    assert not path.with_name(path.name + ".part").exists()


def test_a_transfer_that_breaks_off_is_taken_up_again(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    daemon.break_off_after = 2
    made = daemon.script[0]
    assert download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path).read_bytes() == DATA[0]
    assert daemon.offsets == [0, 2 * scripted.CHUNK]


def test_a_partial_file_that_is_too_long_is_begun_anew(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    made = daemon.script[0]
    (tmp_path / f"bert-{ID}-rank0.json.gz.part").write_bytes(b"x" * 9999)
    assert download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path).read_bytes() == DATA[0]


def test_a_file_of_another_size_than_recorded_is_not_kept(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    daemon.artifacts[0] = DATA[0][:100]
    made = daemon.script[0]
    with pytest.raises(DownloadError, match="100 bytes came, the capture's record says 2500"):
        download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path)
    assert not list(tmp_path.glob("*.gz*"))


def test_what_is_here_already_is_not_fetched_again(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    made = daemon.script[0]
    first = download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path)
    assert download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path) == first
    assert len(daemon.offsets) == 1


def test_a_link_replacing_the_partial_file_is_not_followed(
    daemon: ScriptedCaptures, stub: CaptureServiceStub, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"bert-{ID}-rank0.json.gz.part").symlink_to(victim)
    made = daemon.script[0]
    with pytest.raises(DownloadError, match="symbolic"):
        download(stub, "d", made.id, artifacts(made, made.ranks[0])[0], tmp_path)
    assert victim.read_text() == "mine"


def test_a_missing_file_leaves_the_others_and_exits_with_1(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del daemon.artifacts[0]
    folder = tmp_path / "traces"
    assert run(command, "--connect", endpoint, "--steps", "3", "--output", str(folder), "--json") == 1
    first, second = json.loads(capsys.readouterr().out)["ranks"]
    assert first["file"] is None and "not downloaded" in first["error"]
    assert Path(second["file"]).read_bytes() == DATA[1]


def test_get_fetches_the_given_ranks_and_names_missing_ones(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--connect", endpoint, "--output", str(tmp_path / "out")]
    assert run(captures, "get", ID, "--ranks", "1", *words) == 0
    assert [path.name for path in (tmp_path / "out").glob("*.gz")] == [f"bert-{ID}-rank1.json.gz"]
    assert run(captures, "get", ID, "--ranks", "7", *words) == 6
    assert "7" in capsys.readouterr().err
    daemon.known[ID] = capture(ANALYSED, ANALYSED, FAILED)
    assert run(captures, "get", ID, *words) == 1


def test_get_without_a_directory_makes_one_named_after_the_capture(
    daemon: ScriptedCaptures, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(captures, "get", ID, "--connect", endpoint) == 0
    assert len(list((tmp_path / ID).glob("*.json.gz"))) == 2
