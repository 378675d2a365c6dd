from __future__ import annotations

import threading

from rankscope.daemon.samples import Frame, RankProcess, StallDump
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples
from tests.unit.daemon import window_makers as make

RANK = make.rank(1)


def stuck(index: int, samples: int = 20, function: str = "recv") -> RankSamples:
    recording = make.stacks(index, distinct_stacks=1, samples=samples, function=function, phase="communication")
    return RankSamples(process=make.process(0.001), stacks=recording)


def no_step(total: int = 40) -> RankSamples:
    return RankSamples(steps=make.steps(steps_total=total, last_step_unix_nanos=make.START, collectives=(7, 6)))


def test_a_rank_without_a_step_for_long_is_stalled_with_its_collective_counters() -> None:
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


def test_stacks_of_all_stalled_ranks_are_fetched_at_once_in_the_background_and_not_too_often() -> None:
    calls: list[list[int]] = []
    release = threading.Event()

    def dump(ranks: list[RankProcess]) -> dict[object, object]:
        calls.append([rank.rank for rank in ranks])
        release.wait(30)
        return {rank.key: StallDump("communication", (Frame("recv", "train.py", 9),)) for rank in ranks}

    watch = StallWatch(dump)
    ranks = [make.rank(0), make.rank(1)]

    def window(index: int) -> list[object]:
        stalls = [watch.observe(rank, no_step(), make.span(index)) for rank in ranks]
        watch.fetch_stacks(now_seconds=2.0 * index)
        return stalls

    first = window(20)
    assert all(stall is not None and not stall.stack for stall in first)
    window(21)
    assert calls == [[0, 1]], "a fetch that still runs is not joined by a second one"
    release.set()
    watch.join(30)
    looks = []
    for index in range(22, 42):
        for stall in window(index):
            assert list(stall.stack) == ["recv (train.py:9)"]
            assert stall.phase == "communication"
        looks.append(stall.same_stack_looks)
        watch.join(30)
    assert looks[:5] == [1, 2, 3, 4, 5], "each look that finds the same stack is counted"
    assert len(calls) == 8, "five in the first ten seconds, then one in ten"


def test_a_rank_that_moves_on_between_two_looks_is_not_said_to_stand_still() -> None:
    lines = iter(range(100))

    def dump(ranks: list[RankProcess]) -> dict[object, object]:
        return {rank.key: StallDump("forward", (Frame("evaluate", "train.py", next(lines)),)) for rank in ranks}

    watch = StallWatch(dump)
    for index in range(20, 25):
        stall = watch.observe(RANK, no_step(), make.span(index))
        watch.fetch_stacks(now_seconds=2.0 * index)
        watch.join(30)
    assert stall is not None
    assert stall.same_stack_looks == 1


def test_a_fetch_that_fails_leaves_the_stall_without_a_stack() -> None:
    def dump(ranks: object) -> dict[object, object]:
        raise RuntimeError("py-spy is gone")

    watch = StallWatch(dump)
    watch.observe(RANK, no_step(), make.span(20))
    watch.fetch_stacks(0.0)
    watch.join(30)
    assert watch.observe(RANK, no_step(), make.span(21)) is not None
