from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tests.support.commands import Command
from tests.unit.analysis.collectives.flight_recorder.made_dumps import as_json, as_pickle, content, hung_job, record


@pytest.fixture
def recorder(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "analyze", "flight-recorder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "dumps"
    made.mkdir()
    for rank, dump in hung_job(8, 3).items():
        (made / f"nccl_trace_rank_{rank}").write_bytes(dump)
    return made


def test_the_text_names_who_waits_and_who_is_missing(folder: Path, recorder: Command) -> None:
    code, out, err = recorder(folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "hang 7 ranks in all_reduce seq 1041 of group 0 (default_pg), rank 3 last in save_checkpoint (ckpt.py:51)"
    )
    text = " ".join(out.split())
    assert "wait ranks 0-2,4-7 all_reduce [1024, 1024] BFloat16 in train_step (train.py:88)" in text
    assert "never entered rank 3 last in save_checkpoint (ckpt.py:51); finished all_reduce seq 1040" in text
    assert "0 (default_pg) ranks 0-7 waiting 1040 1041" in text and "1 (ckpt) ranks 0-7 complete 3 3" in text


@pytest.mark.parametrize("asked", ["{0}", "{0}/nccl_trace_rank_*", "{0}/nccl_trace_rank_[0-7]"])
def test_files_directories_and_globs_are_read(asked: str, folder: Path, recorder: Command) -> None:
    found = recorder.json(asked.format(folder))
    assert (found["ranks"], found["culprits"], found["left_out"]) == (list(range(8)), [3], [])


def test_many_files_are_read_in_parallel_with_the_same_result(
    tmp_path: Path, recorder: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, dump in hung_job(40, 17).items():
        (tmp_path / f"fr_{rank}").write_bytes(dump)
    (tmp_path / "log_2").write_text("started")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    parallel = recorder.json(tmp_path, is_quiet=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert recorder.json(tmp_path, is_quiet=False) == parallel
    assert (parallel["culprits"], len(parallel["ranks"]), len(parallel["left_out"])) == ([17], 40, 1)


def test_a_file_that_is_named_twice_is_read_once(folder: Path, recorder: Command) -> None:
    assert recorder.json(folder, folder / "nccl_trace_rank_0", f"{folder}/*")["left_out"] == []


@pytest.mark.parametrize("name", ["fr_5", "rank5.json", "trace-5.pickle", "5", "nccl_trace_rank_5.fr.pkl"])
def test_the_rank_is_the_number_that_ends_the_name(name: str, tmp_path: Path, recorder: Command) -> None:
    (tmp_path / name).write_bytes(as_json(content([record(1)], {"0": [5]})))
    assert recorder.json(tmp_path / name)["ranks"] == [5]


def test_a_rank_in_the_dump_wins_over_the_name(tmp_path: Path, recorder: Command) -> None:
    (tmp_path / "dump_1").write_bytes(as_pickle(content([record(1)], {"0": [5]}) | {"rank": 5}))
    assert recorder.json(tmp_path / "dump_1")["ranks"] == [5]


def test_files_that_cannot_be_used_are_named_and_left_out(folder: Path, recorder: Command) -> None:
    (folder / "copy_3").write_bytes((folder / "nccl_trace_rank_3").read_bytes())
    (folder / "log_9").write_text("started")
    (folder / "notes.txt").write_text("not looked at")
    os.mkfifo(folder / "pipe_4")
    (folder / "link_5").symlink_to(folder / "nothing")
    code, out, err = recorder(folder)
    assert code == 0 and out.startswith("hang 7 ranks")
    link, pipe, first, second = err.splitlines()
    assert "link_5: left out: cannot be read" in link and "pipe_4: left out: it is not a regular file" in pipe
    assert "log_9: left out: refused: it" in first and "give files that torch wrote" in first
    assert "nccl_trace_rank_3: left out: it is of rank 3, and so is" in second and "one dump per rank" in second
    reasons = recorder.json(folder, is_quiet=False)["left_out"]
    assert [Path(one["file"]).name for one in reasons][2:] == ["log_9", "nccl_trace_rank_3"]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("absent", "cannot be read: No such file"),
        ("*nothing*", "no file matches"),
        ("empty", "name what torch wrote"),
        ("evil_0", "refused: it holds the name of a function or class; give files that torch wrote"),
        ("dump", "its name does not end with the rank; rename it, as in fr_3"),
        ("old_0", "use torch ≥ 2.4"),
        ("\0", "cannot be read: embedded null byte"),
    ],
)
def test_an_error_is_one_line_with_the_next_step(name: str, step: str, tmp_path: Path, recorder: Command) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "evil_0").write_bytes(pickle.dumps(os.system, 2))
    (tmp_path / "dump").write_bytes(as_pickle(content([record(1)], {"0": [0]})))
    (tmp_path / "old_0").write_bytes(as_pickle(content([record(1)], {"0": [0]}) | {"version": "1.4"}))
    assert step in recorder.complaint(f"{tmp_path}/{name}")


def test_hostile_text_is_printable(tmp_path: Path, recorder: Command) -> None:
    bad = "\x1b[2J\u202e[bold]"
    records = [record(1, f"nccl:{bad}", description=bad, at=(bad, "/app/x.py", 1), state="scheduled")]
    (tmp_path / f"fr{bad}_0").write_bytes(as_pickle(content(records, {"0": [0, 1]})))
    (tmp_path / "fr_1").write_bytes(as_pickle(content([], {"0": [0, 1]})))
    code, out, err = recorder(tmp_path)
    assert code == 0 and "[bold]" in out
    assert all(line.isprintable() for line in (out + err).splitlines())


def test_the_help_teaches(recorder: Command) -> None:
    said = recorder.answer("--help")
    assert "TORCH_FR_DUMP_TEMP_FILE" in said and "docs/analyze-flight-recorder.md" in said and "--json | jq" in said
