from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.analysis.profiles.pprof import read_pprof
from rankscope.analysis.profiles.stack_groups import group_stacks
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.cli.stacks import stacks_text
from rankscope.daemon.loop import Daemon
from rankscope.daemon.samples import RankProcess, StallDump
from rankscope.v1.profile_service_pb2 import RankStack
from tests.unit.daemon.profiles.served_profiles import LOAD, RUN, STEP, record, served_profiles

Output = pytest.CaptureFixture[str]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    with served_profiles(tmp_path) as daemon:
        yield daemon


def call(served: Daemon, *words: str) -> int:
    return main([words[0], "--connect", served.addresses.grpc_targets[0], *words[1:]])


def test_top_frames_of_the_only_run_are_shown_by_default(served: Daemon, capsys: Output) -> None:
    record(served, 0, {LOAD: 75})
    record(served, 1, {STEP: 25})
    assert call(served, "flame") == Exit.OK
    title, header, first, *_ = capsys.readouterr().out.splitlines()
    assert title == f"{RUN}, the last 10m: 100 samples"
    assert header.split() == ["own", "total", "frame"]
    assert first.split(maxsplit=4) == ["75.0", "%", "75.0", "%", "load_image (dataset.py:88)"]
    assert call(served, "flame", "--ranks", "1", "--phase", "optimizer") == Exit.OK
    assert "25 samples" in capsys.readouterr().out


def test_comparing_a_rank_with_its_cohort_puts_the_line_first(served: Daemon, capsys: Output) -> None:
    for rank in range(3):
        record(served, rank, {LOAD: 600 if rank == 1 else 20, STEP: 600})
    assert call(served, "flame", "--ranks", "1", "--against", "cohort") == Exit.OK
    first, _, row, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 1 spends 50 % of its time in `load_image (dataset.py:88)`, its peers 3 %")
    assert row.split() == ["50.0", "%", "3.2", "%", "other", "load_image", "(dataset.py:88)"]
    assert call(served, "flame", "--ranks", "0", "--against", "cohort") == Exit.OK
    assert "rank 0 has" in capsys.readouterr().out


def test_a_run_is_compared_with_an_earlier_time(served: Daemon, capsys: Output) -> None:
    record(served, 0, {LOAD: 600, STEP: 600})
    record(served, 0, {STEP: 1200}, seconds_ago=7260)
    assert call(served, "flame", "--against", "2h ago") == Exit.OK
    assert f"run {RUN} spends 50 % of its time in `load_image (dataset.py:88)`, 2h ago 0 %" in capsys.readouterr().out


def test_too_few_samples_decide_nothing(served: Daemon, capsys: Output) -> None:
    record(served, 0, {LOAD: 10})
    record(served, 1, {STEP: 10})
    assert call(served, "flame", "--ranks", "1", "--against", "cohort") == Exit.UNDECIDED
    assert "too few" in capsys.readouterr().err


def test_files_hold_the_same_samples_in_every_format(served: Daemon, tmp_path: Path) -> None:
    record(served, 0, {LOAD: 75, STEP: 5})
    record(served, 1, {STEP: 20})
    for name in ("a.pb.gz", "a.json", "a.folded", "a.html"):
        assert call(served, "flame", "-o", str(tmp_path / name)) == Exit.OK
    assert read_pprof((tmp_path / "a.pb.gz").read_bytes()).samples_total == 100
    weights = [one["weights"] for one in json.loads((tmp_path / "a.json").read_text())["profiles"]]
    assert sum(sum(each) for each in weights) == 100 * 10**8
    assert sum(int(line.rpartition(" ")[2]) for line in (tmp_path / "a.folded").read_text().splitlines()) == 100
    assert call(served, "flame", "--ranks", "0", "--against", "cohort", "-o", str(tmp_path / "b.html")) == Exit.OK
    compared = [re.search(r'"compared": ?(true|false)', (tmp_path / name).read_text()) for name in ("a.html", "b.html")]
    assert [found and found[1] for found in compared] == ["false", "true"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--against", "cohort"], Exit.USAGE, "name them, as in --ranks 3"),
        (["--since", "soon"], Exit.USAGE, "as in 10m"),
        (["--since", "0m"], Exit.USAGE, "as in 10m"),
        (["--against", "yesterday"], Exit.USAGE, "cohort, or a number"),
        (["--ranks", "x"], Exit.USAGE, "numbers and ranges"),
        (["-o", "a.svg"], Exit.USAGE, "FILE.html, .pb.gz"),
        (["-o", "a.json", "--against", "1h"], Exit.USAGE, "name FILE.html"),
        (["--since", "3d"], Exit.USAGE, "up to 24 h"),
        (["--run", "unknown"], Exit.NOT_FOUND, "rankscope top"),
        (["--run", "unknown", "--against", "1h"], Exit.NOT_FOUND, "rankscope top"),
        (["-o", "/nowhere/a.html"], Exit.USAGE, "name another with -o"),
    ],
)
def test_errors_say_what_to_do_next(served: Daemon, capsys: Output, words: list[str], status: Exit, text: str) -> None:
    record(served, 0, {LOAD: 10})
    assert call(served, "flame", *words) == status
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and text in said.err and not said.out


def test_of_several_runs_one_must_be_named(tmp_path: Path, capsys: Output) -> None:
    with served_profiles(tmp_path, "another") as served:
        for command in ("flame", "stacks"):
            assert call(served, command) == Exit.USAGE
            assert f"{RUN}, another; name one with --run" in capsys.readouterr().err
        assert call(served, "stacks", "--run", "another") == Exit.OK


def test_stacks_are_grouped_with_the_odd_rank_first(served: Daemon, capsys: Output) -> None:
    def dump(rank: RankProcess) -> StallDump:
        return StallDump("other", LOAD) if rank.rank == 1 else StallDump("optimizer", STEP * 20)

    served._collectors.stacks.dump = dump  # type: ignore[attr-defined]
    assert call(served, "stacks") == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "rank 1 in load_image (dataset.py:88) [other]",
        "    load_image (dataset.py:88)",
        "    main (train.py:10)",
    ]
    assert lines[3] == "ranks 0,2 in main (train.py:10) [optimizer]"
    assert lines[-1] == "    … 28 more; --json has all"
    assert call(served, "stacks", "--json") == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert [group["ranks"] for group in found["groups"]] == [[1], [0, 2]]
    assert len(found["groups"][1]["stack"]) == 40 and found["nodes"]["1"] == "node-a" and found["run"] == RUN


def test_a_missing_stack_is_explained_in_printable_text(served: Daemon, capsys: Output) -> None:
    assert call(served, "stacks", "--ranks", "0,2") == Exit.OK
    out = capsys.readouterr().out
    assert "rank 2 on node-a: no stack: rank 2: not" in out and "\x1b" not in out
    assert call(served, "stacks", "--ranks", "2") == Exit.FAILED
    capsys.readouterr()
    assert call(served, "stacks", "--ranks", "9") == Exit.NOT_FOUND
    assert "rankscope top" in capsys.readouterr().err


def test_a_line_break_in_a_name_starts_no_line() -> None:
    hostile = RankStack(rank=1, node="a", frames=["f\nrank 9 in nothing (x.py:1)"])
    missing = RankStack(rank=2, node="a\nrank 9 on b", problem="gone\nrank 9 on c")
    shown = stacks_text(group_stacks({1: hostile.frames}), [hostile, missing])
    assert [line[:6] for line in shown.splitlines()] == ["rank 1", "    f ", "rank 2"]
