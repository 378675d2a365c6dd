from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rankscope.analysis.profiles.frames import Frame
from rankscope.daemon.procfs import CLOCK_TICKS_PER_SECOND
from rankscope.daemon.samples import Activity, Problem, RankProcess, StallDump
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples
from rankscope.v1.window_pb2 import Stall
from tests.unit.daemon import window_makers as make

RANK = make.rank(1)


def stuck(index: int, samples: int = 20, function: str = "recv") -> RankSamples:
    recording = make.stacks(index, distinct_stacks=1, samples=samples, function=function, phase="communication")
    return RankSamples(process=make.process(0.001), stacks=recording)


def no_step(total: int = 40, entered: int = 7) -> RankSamples:
    steps = make.steps(steps_total=total, last_step_unix_nanos=make.START, collectives=(entered, entered - 1))
    return RankSamples(steps=steps)


def test_a_rank_without_steps_stalls_with_its_collective_counters() -> None:
    watch = StallWatch(None)
    done = RankSamples(steps=make.steps(0.1, 0.1, steps_total=40, last_step_unix_nanos=make.START))
    assert watch.observe(RANK, done, make.span(0)) is None
    stall = watch.observe(RANK, no_step(), make.span(1))
    assert stall is not None
    assert stall.seconds_since_step == 4.0
    assert (stall.collectives_enqueued, stall.collectives_completed) == (7, 6)


def test_patience_grows_with_the_length_of_a_step() -> None:
    watch = StallWatch(None)
    done = RankSamples(steps=make.steps(3.0, steps_total=40, last_step_unix_nanos=make.START))
    stalls = [watch.observe(RANK, samples, make.span(index)) for index, samples in enumerate([done, *[no_step()] * 12])]
    assert [stall is not None for stall in stalls] == [False] * 12 + [True]


def test_a_rank_that_never_made_a_step_is_not_stalled() -> None:
    starting = RankSamples(steps=make.steps(steps_total=0, last_step_unix_nanos=None))
    assert StallWatch(None).observe(RANK, starting, make.span(100)) is None


def test_without_step_records_standing_still_twice_is_a_stall() -> None:
    watch = StallWatch(None)
    assert watch.observe(RANK, stuck(0), make.span(0)) is None
    stall = watch.observe(RANK, stuck(1), make.span(1))
    assert stall is not None
    assert stall.seconds_since_step == 4.0
    assert stall.phase == "communication"


@pytest.mark.parametrize(("ticks", "is_stall"), [(1, True), (3, False)])
def test_a_cpu_tick_in_a_short_window_is_not_work(ticks: int, is_stall: bool) -> None:
    watch = StallWatch(None)
    watch.observe(RANK, stuck(0), make.span(0))
    ticking = replace(stuck(1), process=make.process(ticks / CLOCK_TICKS_PER_SECOND))
    assert (watch.observe(RANK, ticking, make.span(1, seconds=0.5)) is not None) is is_stall


def test_one_recording_counts_once_however_often_it_is_shown() -> None:
    watch = StallWatch(None)
    assert all(watch.observe(RANK, stuck(0), make.span(index)) is None for index in range(5))


def test_using_the_cpu_or_moving_on_is_not_a_stall() -> None:
    for second in (
        RankSamples(process=make.process(1.0), stacks=make.stacks(1, distinct_stacks=1, function="recv")),
        stuck(1, function="elsewhere"),
        RankSamples(process=make.process(0.0), stacks=make.stacks(1, distinct_stacks=2)),
        RankSamples(stacks=make.stacks(1, distinct_stacks=1, function="recv")),
    ):
        watch = StallWatch(None)
        watch.observe(RANK, stuck(0), make.span(0))
        assert watch.observe(RANK, second, make.span(1)) is None


def test_stalled_ranks_stacks_are_fetched_together_in_the_background() -> None:
    calls: list[list[int]] = []
    begun, release = threading.Event(), threading.Event()

    def dump(ranks: list[RankProcess]) -> dict[object, object]:
        calls.append([rank.rank for rank in ranks])
        begun.set()
        release.wait(180)
        return {rank.key: StallDump("communication", (Frame("recv", "train.py", 9),)) for rank in ranks}

    watch = StallWatch(dump)
    ranks = [make.rank(0), make.rank(1)]

    def window(index: int) -> list[object]:
        stalls = [watch.observe(rank, no_step(), make.span(index)) for rank in ranks]
        watch.fetch_stacks(now_seconds=2.0 * index)
        return stalls

    first = window(20)
    assert all(stall is not None and not stall.stack for stall in first)
    assert begun.wait(180)
    window(21)
    assert calls == [[0, 1]], "a fetch that still runs is not joined by a second one"
    release.set()
    watch.join(180)
    looks = []
    for index in range(22, 42):
        for stall in window(index):
            assert list(stall.stack) == ["recv (train.py:9)"]
            assert stall.phase == "communication"
        looks.append(stall.same_stack_looks)
        watch.join(180)
    assert looks[:5] == [1, 2, 3, 4, 5], "each look that finds the same stack is counted"
    assert len(calls) == 8, "five in the first ten seconds, then one in ten"


def test_a_rank_that_moves_between_looks_is_not_standing_still() -> None:
    lines = iter(range(100))

    def dump(ranks: list[RankProcess]) -> dict[object, object]:
        return {rank.key: StallDump("forward", (Frame("evaluate", "train.py", next(lines)),)) for rank in ranks}

    watch = StallWatch(dump)
    for index in range(20, 25):
        stall = watch.observe(RANK, no_step(), make.span(index))
        watch.fetch_stacks(now_seconds=2.0 * index)
        watch.join(180)
    assert stall is not None
    assert stall.same_stack_looks == 1


def test_a_rank_in_ever_new_collectives_is_not_standing_still() -> None:
    def dump(ranks: list[RankProcess]) -> dict[object, object]:
        return {rank.key: StallDump("communication", (Frame("all_reduce", "evaluate.py", 9),)) for rank in ranks}

    watch = StallWatch(dump)
    looks = []
    for index in range(20, 45):
        stall = watch.observe(RANK, no_step(entered=min(index, 25)), make.span(index))
        assert stall is not None
        looks.append(stall.same_stack_looks)
        watch.fetch_stacks(now_seconds=2.0 * index)
        watch.join(180)
    assert max(looks[:6]) <= 1
    assert looks[-1] >= 2, "it stays in the last one"


def test_a_fetch_that_fails_leaves_the_stall_without_a_stack() -> None:
    def dump(ranks: object) -> dict[object, object]:
        raise RuntimeError("py-spy is gone")

    watch = StallWatch(dump)
    watch.observe(RANK, no_step(), make.span(20))
    watch.fetch_stacks(0.0)
    watch.join(180)
    assert watch.observe(RANK, no_step(), make.span(21)) is not None


def test_an_interpreter_that_ends_takes_earlier_stacks_with_it() -> None:
    gone = Problem("stacks", "unreadable", "rank 1: its training thread has no frames")
    stall = stall_after([look(), look(), gone])
    assert (stall.phase, list(stall.stack)) == ("unreadable", [])
    assert stall.same_stack_looks == 1
    refused = Problem("stacks", "permission", "rank 1: EPERM")
    assert list(stall_after([look(), look(), refused]).stack) == ["save (train.py:9)"]


def stall_after(dumps: Sequence[StallDump | Problem]) -> Stall:
    """The stall of a rank without steps after these looks, a window apart."""
    upcoming = iter(dumps)
    watch = StallWatch(lambda ranks: {rank.key: next(upcoming) for rank in ranks})
    samples = replace(no_step(), process=make.process(0.0))
    for index in range(20, 20 + len(dumps)):
        watch.observe(RANK, samples, make.span(index))
        watch.fetch_stacks(now_seconds=2.0 * index)
        watch.join(180)
    stall = watch.observe(RANK, samples, make.span(20 + len(dumps)))
    assert stall is not None
    return stall


def look(line: int = 9, cpu_seconds: float = 5.0, moved_bytes: int = 0, at: float = 0.0) -> StallDump:
    return StallDump("checkpoint", (Frame("save", "train.py", line),), Activity(at, cpu_seconds, moved_bytes))


def test_an_inactive_rank_at_one_place_is_not_working() -> None:
    stall = stall_after([look(at=2.0 * second) for second in range(3)])
    assert stall.HasField("is_working")
    assert not stall.is_working
    assert not stall.is_stopped


@pytest.mark.parametrize(
    "dumps",
    [
        [look(), look(at=2.0, cpu_seconds=6.0)],
        [look(), look(at=2.0, moved_bytes=1 << 20)],
        [look(1), look(2)],
        [look(1), look(1), look(2), look(3)],
    ],
    ids=["computes", "writes", "moves on", "moves on again"],
)
def test_a_rank_that_computes_writes_or_moves_is_working(dumps: list[StallDump]) -> None:
    assert stall_after(dumps).is_working


def test_a_wait_that_polls_is_not_work() -> None:
    assert not stall_after([look(1), look(1), look(2)]).is_working, "at another line, once"
    assert not stall_after([look(), look(at=20.0, cpu_seconds=5.2, moved_bytes=4096)]).is_working


def test_a_rank_without_readable_stacks_works_while_using_cpu() -> None:
    watch = StallWatch(None)
    busy = watch.observe(RANK, replace(no_step(), process=make.process(1.0)), make.span(20))
    assert busy is not None
    assert busy.is_working
    without_sample = watch.observe(RANK, no_step(), make.span(21))
    assert without_sample is not None
    assert without_sample.is_working
    without_another = watch.observe(RANK, no_step(), make.span(22))
    assert without_another is not None
    assert not without_another.HasField("is_working")
    unknown = StallWatch(None).observe(RANK, no_step(), make.span(20))
    assert unknown is not None
    assert not unknown.HasField("is_working")


def test_a_stopped_rank_is_reported_as_stopped() -> None:
    stopped = replace(make.process(0.0), stopped_seconds=make.span(20).seconds)
    stall = StallWatch(None).observe(RANK, replace(no_step(), process=stopped), make.span(20))
    assert stall is not None
    assert stall.is_stopped
