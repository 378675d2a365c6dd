"""Scheduling, failing and cutting down. A script stands in for py-spy where its behaviour must come on demand."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.collectors.stacks import StacksCollector
from rankscope.daemon.private_folder import PrivateFolder
from rankscope.daemon.pyspy_output import Stack
from rankscope.daemon.samples import Frame, Problem, RankProcess, Span, StackSample
from rankscope.daemon.stack_summary import FRAMES_KEPT, LIBRARY_FRAMES_KEPT, summarise

SPAN = Span(0, 2_000_000_000)
ME = os.getpid()
FAIL = "echo 'Error: nope' >&2; exit 1"
SUCCEED = f'while [ "$1" != --output ]; do shift; done; echo "thread ({ME});f (/t.py:1) 20" > "$2"'


def rank(number: int) -> RankProcess:
    return RankProcess("job", number, number, 8, ME, procfs.read_stat(f"/proc/{ME}").start_ticks, (ME,))


@contextmanager
def collector(folder: Path, script: str, max_concurrent: int = 8, rate_hz: float = 10.0) -> Iterator[StacksCollector]:
    program = folder / "py-spy"
    program.write_text(f'#!/bin/sh\necho "$$" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    source = StacksCollector(program, rate_hz, max_concurrent=max_concurrent)
    try:
        yield source
    finally:
        source.close()


def calls(folder: Path) -> list[int]:
    path = folder / "calls"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.005)


def settle(source: StacksCollector, now: float) -> None:
    """One poll of the simulated clock, and all that it started has ended."""
    source.poll(now)

    def nothing_runs() -> bool:
        source.poll(now)
        return source.running == 0

    wait_for(nothing_runs)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_rank_is_recorded_once_a_period_and_a_lower_rate_means_a_longer_one(tmp_path: Path) -> None:
    with collector(tmp_path, SUCCEED) as source:
        source.collect([rank(0)], SPAN)
        for tenth in range(100):
            settle(source, tenth / 10)
        at_full_rate = len(calls(tmp_path))
        source.set_rate(2.5)
        for tenth in range(100, 420):
            settle(source, tenth / 10)
        assert at_full_rate == 3  # of 4 s each, in 10 s
        assert len(calls(tmp_path)) - at_full_rate == 2  # one in 16 s, in 32 s
        sample = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(sample, StackSample)
        assert sample.samples == 5 * 20  # what ended since the last call is one sample
        assert source.child_cpu_seconds > 0
        source.set_rate(0)
        settle(source, 1000.0)
        assert len(calls(tmp_path)) == 5


def test_ranks_start_at_different_times_and_no_more_than_allowed_run_at_once(tmp_path: Path) -> None:
    with collector(tmp_path, "sleep 60", max_concurrent=2) as source:
        ranks = [rank(number) for number in range(5)]
        source.collect(ranks, SPAN)
        source.poll(0.0)
        assert source.running == 1
        source.poll(2.0)
        assert source.running == 2


def test_a_rank_that_fails_again_and_again_is_left_alone_for_longer_and_longer(tmp_path: Path) -> None:
    with collector(tmp_path, FAIL) as source:
        source.collect([rank(0)], SPAN)
        for second in range(300):
            settle(source, float(second))
        problem = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(problem, Problem)
        assert problem.kind == "unreadable"
        assert "nope" in problem.text
        assert 5 <= len(calls(tmp_path)) <= 12  # of 150
        assert source.collect([rank(0)], SPAN)[rank(0).key] == problem  # it still stands


def test_a_recording_that_overstays_is_killed(tmp_path: Path) -> None:
    with collector(tmp_path, "exec sleep 60") as source:
        source.collect([rank(0)], SPAN)
        source.poll(0.0)
        wait_for(lambda: len(calls(tmp_path)) == 1)
        source.poll(100.0)
        problem = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(problem, Problem)
        assert problem.kind == "timeout"
        assert is_gone(calls(tmp_path)[0])


def test_a_recording_of_a_rank_that_departed_and_all_at_the_end_are_killed(tmp_path: Path) -> None:
    with collector(tmp_path, "exec sleep 60") as source:
        source.collect([rank(0), rank(5)], SPAN)
        source.poll(0.0)
        source.poll(2.0)
        wait_for(lambda: len(calls(tmp_path)) == 2)
        source.collect([rank(0)], SPAN)
        assert source.running == 1
        source.close()
        assert all(is_gone(pid) for pid in calls(tmp_path))


def test_a_dump_that_hangs_does_not_hold_the_daemon_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.daemon.collectors.stacks.DUMP_TIMEOUT_SECONDS", 0.2)
    with collector(tmp_path, "exec sleep 60") as source:
        problem = source.dump(rank(0))
        assert isinstance(problem, Problem)
        assert problem.kind == "timeout"


def test_output_that_is_all_nonsense_is_a_problem(tmp_path: Path) -> None:
    nonsense = 'while [ "$1" != --output ]; do shift; done; head -c 5000 /dev/urandom > "$2"'
    with collector(tmp_path, nonsense) as source:
        source.collect([rank(0)], SPAN)
        settle(source, 0.0)
        assert isinstance(source.collect([rank(0)], SPAN)[rank(0).key], Problem)
        assert isinstance(source.dump(rank(0)), Problem)


def test_without_py_spy_every_rank_says_how_to_get_it(tmp_path: Path) -> None:
    source = StacksCollector(tmp_path / "py-spy")
    source.collect([rank(0)], SPAN)
    source.poll(0.0)
    problem = source.collect([rank(0)], SPAN)[rank(0).key]
    assert isinstance(problem, Problem)
    assert problem.kind == "missing"
    assert "pip install py-spy" in problem.text
    assert source.dump(rank(0)) == problem
    source.close()


def test_what_py_spy_writes_is_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = StacksCollector(tmp_path / "py-spy")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    source.close()
    assert not folder.exists()


def test_what_a_killed_daemon_left_is_swept_and_what_a_living_one_holds_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "rankscope-stacks-left").mkdir()
    living = PrivateFolder()
    other = PrivateFolder()
    assert set(tmp_path.iterdir()) == {living.path, other.path}
    living.close()
    other.close()
    other.close()


def test_frames_count_once_per_stack_and_lines_of_one_function_stay_apart() -> None:
    outer, inner, other_line = Frame("f", "/t.py", 1), Frame("g", "/t.py", 8), Frame("g", "/t.py", 9)
    sample = summarise({(inner, inner, outer): 3, (other_line, outer): 2}, 1, SPAN)
    found = {count.frame: (count.inclusive, count.leaf) for count in sample.frames}
    assert found == {outer: (5, 0), inner: (3, 3), other_line: (2, 2)}
    assert (sample.samples, sample.errors, sample.distinct_stacks, sample.phase_counts) == (5, 1, 2, {"other": 5})


def test_when_frames_are_cut_the_programs_own_come_first_and_a_few_of_libraries_stay() -> None:
    stacks: Counter[Stack] = Counter()
    for line in range(100):
        stacks[(Frame("lib", "/opt/site-packages/x.py", line), Frame("own", "/home/me/train.py", line))] = 100 - line
    stacks[tuple(Frame("deep", "/opt/site-packages/y.py", line) for line in range(100))] = 500
    sample = summarise(stacks, 0, SPAN)
    own = [count for count in sample.frames if count.frame.function == "own"]
    assert len(sample.frames) == FRAMES_KEPT
    assert [count.frame.line for count in own] == list(range(FRAMES_KEPT - LIBRARY_FRAMES_KEPT))
    assert sample.frames[0] == sample.frames[0].__class__(
        Frame("deep", "/opt/site-packages/y.py", 0), 500, 500, "other"
    )
