"""Trace files as a user hands them over: directories, globs, broken files, doubtful ranks."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.trace_report import files
from rankscope.cli.trace_report.files import LoadedTraces, load_traces, rank_in_name
from tests.shared_data import H200
from tests.support.commands import Command


def write_trace(path: Path, rank: int | None = None, events: int = 40) -> Path:
    spans = [{"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": ts, "dur": 1} for ts in range(events)]
    whole: dict[str, Any] = {"traceEvents": spans}
    if rank is not None:
        whole["distributedInfo"] = {"rank": rank, "world_size": 64, "backend": "nccl"}
    text = json.dumps(whole).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
    return path


def ranks(loaded: LoadedTraces) -> list[int | None]:
    return [one.trace.rank for one in loaded.traces]


def reasons(loaded: LoadedTraces) -> dict[str, str]:
    return {one.path.name: one.reason for one in loaded.broken}


@pytest.mark.parametrize("processes", [1, 2])
def test_three_broken_files_of_64_leave_61_and_their_reasons(tmp_path: Path, processes: int) -> None:
    for rank in range(64):
        write_trace(tmp_path / f"node{rank // 8}" / f"rank-{rank}.json{'.gz' if rank % 2 else ''}", rank)
    empty, cut, packed = (tmp_path / f"node{rank // 8}" / f"rank-{rank}.json" for rank in (4, 20, 37))
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:900])
    packed = packed.with_suffix(".json.gz")
    packed.write_bytes(packed.read_bytes()[:-20])
    loaded = load_traces([tmp_path], processes=processes)
    assert ranks(loaded) == [rank for rank in range(64) if rank not in (4, 20, 37)]
    assert [one.path for one in loaded.broken] == [empty, cut, packed]
    told = [one.reason for one in loaded.broken]
    assert told[0] == "the file is empty"
    assert told[1].startswith("the file is cut off inside traceEvents; 10 complete events before the cut")
    assert told[2].startswith("the gzip data ends early, at byte ")


def test_a_cut_file_is_salvaged_when_it_is_read_alone(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank-0.json", 0)
    path.write_bytes(path.read_bytes()[:900])
    loaded = load_traces([path])
    assert len(loaded.traces[0].trace) == 10
    assert "cut off" in loaded.traces[0].trace.repairs[0]


def test_directories_globs_and_files_are_each_read_once(tmp_path: Path) -> None:
    for rank in (10, 2):
        write_trace(tmp_path / "a" / f"rank{rank}.pt.trace.json.gz")
    write_trace(tmp_path / "a" / "rank3.json", 3)
    write_trace(tmp_path / "a" / ".rank9.json", 9)
    (tmp_path / "a" / "notes.txt").write_text("no trace")
    loaded = load_traces([tmp_path, str(tmp_path / "a" / "rank3.json"), str(tmp_path / "*" / "rank?.json")])
    assert ranks(loaded) == [2, 3, 10]
    assert loaded.broken == ()


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-12.json", 12),
        ("job_rank12.pt.trace.json.gz", 12),
        ("gloo_2ranks_rank1.json.gz", 1),
        ("RANK_7.json", 7),
        ("r12.json", 12),
        ("run-r3.1682725898236.pt.trace.json", 3),
        ("worker3.1682725898236.pt.trace.json", 3),
        ("host.12.pt.trace.json", 12),
        ("trace_5.json", 5),
        ("17.json.gz", 17),
        ("rank_4/trace.json", 4),
        ("node-3_4121.1682725898236567.pt.trace.json", None),  # host and process id, then a time
        ("libkineto_activities_4121.json", None),
        ("crank3.json", None),
        ("profile.json", None),
    ],
)
def test_a_rank_is_found_in_a_file_name(name: str, rank: int | None) -> None:
    assert rank_in_name(Path(name)) == rank


def test_files_of_equal_rank_are_distinguished_by_name_or_refused(tmp_path: Path) -> None:
    for name in ("rank0.json", "rank1.json"):
        write_trace(tmp_path / "alone" / name, 0)
    assert ranks(load_traces([tmp_path / "alone"])) == [0, 1]
    first = write_trace(tmp_path / "twice" / "a.json", 5)
    write_trace(tmp_path / "twice" / "b.json", 5)
    loaded = load_traces([tmp_path / "twice"])
    assert ranks(loaded) == [5]
    assert reasons(loaded) == {"b.json": f"it is of rank 5, and so is {first}; give one trace per rank"}


def test_a_trace_whose_rank_is_not_known_stays_without_one(tmp_path: Path) -> None:
    loaded = load_traces([write_trace(tmp_path / "profile.json")])
    assert ranks(loaded) == [None]


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    write_trace(tmp_path / "nothing.json", events=0)
    loaded = load_traces(
        [tmp_path / "bare", tmp_path / "gone.json", str(tmp_path / "rank*.json"), tmp_path / "nothing.json"]
    )
    assert loaded.traces == ()
    assert reasons(loaded) == {
        "bare": "this directory holds no *.json or *.json.gz",
        "gone.json": "cannot be read: No such file or directory",
        "rank*.json": "no file matches",
        "nothing.json": "it holds no event with a duration: nothing was recorded",
    }


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read_is_told(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", 0)
    path.chmod(0)
    assert reasons(load_traces([path]))["rank0.json"].startswith("permission denied; ")


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_ends_with_everything_read(processes: int) -> None:
    seen: list[tuple[int, int]] = []
    names = ("gloo_2ranks_rank0", "gloo_2ranks_rank1", "nccl_world1_3steps")
    paths = [H200 / f"{name}.json.gz" for name in names]
    loaded = load_traces(paths, processes=processes, progress=lambda *done: seen.append(done))
    assert ranks(loaded) == [0, 1]
    assert [one.path.name for one in loaded.broken] == ["nccl_world1_3steps.json.gz"], "it is of rank 0 too"
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_pipe_is_read_if_a_program_writes_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_WRITER_SECONDS", 0.2)
    pipe = tmp_path / "rank0.json"
    os.mkfifo(pipe)
    reason = "cannot be read: it is a pipe into which no program has written for 0.2 s"
    assert reasons(load_traces([pipe])) == {"rank0.json": reason}

    # A writer that is there and slow.
    content = write_trace(tmp_path / "trace.json", 0).read_bytes()
    descriptor = os.open(pipe, os.O_RDWR)
    write_later = threading.Timer(1.0, lambda: (os.write(descriptor, content), os.close(descriptor)))
    write_later.start()
    loaded = load_traces([pipe])
    write_later.join()
    assert ranks(loaded) == [0]


@pytest.mark.parametrize("words", [("analyze", "trace"), ("analyze", "flight-recorder"), ("advise",)], ids=" ".join)
def test_an_empty_name_is_not_the_current_directory(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "the name of a file is empty" in Command(capsys, *words).complaint("")
