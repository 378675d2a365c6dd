from __future__ import annotations

import itertools
import logging

import pytest

from rankscope.analysis.profiles.frames import Frame
from rankscope.daemon.collector import LINES_PER_OWNER, ProblemLog
from rankscope.daemon.loop import Daemon
from rankscope.daemon.sampler import Ticker
from rankscope.daemon.samples import Problem, RankProcess, Span, StallDump
from rankscope.daemon.windows.broadcast import Tick
from tests.unit.daemon import window_makers as make


def spans(clock: make.FakeClock, *works: float, window_seconds: float = 2.0) -> list[Span]:
    """The spans of a daemon whose ticks take `works` seconds each."""
    ticker = Ticker(clock, window_seconds)
    seen = []
    for seconds in works:
        span = ticker.next_span(lambda: None)
        assert span is not None
        seen.append(span)
        clock.sleep(seconds)
    return seen


def test_borders_are_multiples_of_the_length_whenever_the_daemon_starts() -> None:
    clock = make.FakeClock(start_unix_nanos=make.START + 700_000_000)
    first, second = spans(clock, 0.3, 0.3)
    assert first.end_unix_nanos % (2 * make.SECOND) == 0
    assert second == Span(first.end_unix_nanos, first.end_unix_nanos + 2 * make.SECOND)


def test_a_late_tick_makes_one_long_window() -> None:
    clock = make.FakeClock()
    first, late, next_one = spans(clock, 7.0, 0.1, 0.1)
    assert first.seconds == 2.0
    assert late == Span(first.end_unix_nanos, first.end_unix_nanos + 6 * make.SECOND)
    assert next_one.seconds == 2.0
    assert next_one.start_unix_nanos == late.end_unix_nanos


def test_a_clock_set_back_does_not_stop_the_windows() -> None:
    clock = make.FakeClock(seconds=30.0)
    ticker = Ticker(clock, 2.0)
    assert ticker.next_span(lambda: None) is not None
    clock.set_back(3600.0)
    span = ticker.next_span(lambda: None)
    assert span is not None
    assert span.seconds == 2.0


def test_collectors_are_polled_several_times_a_window() -> None:
    polls = itertools.count()
    Ticker(make.FakeClock(), 2.0).next_span(lambda: next(polls) and None)
    assert 8 <= next(polls) <= 12


def daemon(clock: make.FakeClock | None = None, *ranks: RankProcess, **sources: object) -> Daemon:
    return Daemon(make.config(), collectors=make.collectors(*ranks, **sources), clock=clock or make.FakeClock())


def test_a_failing_collector_costs_its_own_figures_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> object:
        raise OSError("disk on fire")

    watched = daemon(None, make.rank(), steps=fail, process=lambda _: make.process())
    (window,) = watched.tick(make.span()).windows.values()
    assert window.HasField("process")
    assert not window.HasField("steps")
    assert "disk on fire" in window.problems[0]
    assert not watched.snapshot().daemon.collectors["steps"].success
    assert watched.snapshot().daemon.collectors["process"].success
    watched.tick(make.span(1))
    assert caplog.text.count("disk on fire") == 1, "the same problem is logged once a minute"


def test_failing_discovery_keeps_the_ranks_known_so_far() -> None:
    watched = daemon(None, make.rank(), process=lambda _: make.process())
    watched.tick(make.span())

    def fail() -> object:
        raise PermissionError("/proc")

    watched._collectors.discovery.scan = fail
    assert len(watched.tick(make.span(1)).windows) == 1
    assert not watched.snapshot().daemon.collectors["discovery"].success


def test_unusable_samples_do_not_cost_other_ranks_their_window() -> None:
    watched = daemon(None, make.rank(0), make.rank(1), process=lambda r: "nonsense" if r.rank == 0 else make.process())
    tick = watched.tick(make.span())
    assert "daemon: rank 0 (pid 4000): AttributeError" in tick.windows[make.rank(0).key].problems[0]
    assert tick.windows[make.rank(1).key].process.cpu_seconds == 1.5


def test_a_restart_is_a_new_incarnation_with_its_own_sequence() -> None:
    watched = daemon(None, make.rank(0))
    watched.tick(make.span(0))
    assert [w.sequence for w in watched.tick(make.span(1)).windows.values()] == [2]
    restarted = make.rank(0, pid=5000, start_ticks=99)
    watched._collectors.discovery.ranks = (restarted,)
    tick = watched.tick(make.span(2))
    assert [(w.sequence, w.identity.incarnation) for w in tick.windows.values()] == [(1, 99)]
    assert [(identity.rank, identity.pid) for identity in tick.departed] == [(0, 4000)]


def test_ranks_over_the_limit_are_counted_with_their_owner() -> None:
    watched = daemon(None, make.rank(0))
    watched._collectors.discovery.cut = {"uid 1000": 2}
    assert len(watched.tick(make.span()).windows) == 1
    assert (watched.snapshot().daemon.ranks, watched.snapshot().daemon.ranks_cut) == (3, {"uid 1000": 2})


def test_a_stalled_rank_shows_its_stack_one_window_later() -> None:
    clock = make.FakeClock()
    watched = daemon(clock, make.rank(0), steps=lambda _: make.steps(steps_total=9, last_step_unix_nanos=make.START))
    watched._collectors.stacks.dump = lambda _: StallDump("communication", (Frame("recv", "train.py", 4),))
    watched.tick(make.span(20))
    watched._stalls.join(180)
    (window,) = watched.tick(make.span(21)).windows.values()
    assert list(window.stall.stack) == ["recv (train.py:4)"]


def test_a_ranks_problem_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = make.FakeClock()
    counted = itertools.count()
    watched = daemon(
        clock,
        make.rank(0),
        make.rank(1),
        steps=lambda rank: Problem("steps", "corrupt", f"rank {rank.rank}:\n{next(counted)} bad records"),
        stacks=lambda _: Problem("stacks", "missing", "no py-spy"),
    )
    with caplog.at_level(logging.WARNING):
        for index in range(10):
            watched.tick(make.span(index))
            clock.sleep(2.0)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3, "one for each rank, and one for all"
    assert "job '10.0.0.1:29500/run': steps: rank 0: 0 bad records" in lines
    clock.sleep(60.0)
    watched.tick(make.span(50))
    assert len(caplog.records) == 6


def test_the_budget_lowers_the_rate_of_stacks() -> None:
    clock = make.FakeClock()
    collectors = make.collectors(make.rank())
    watched = Daemon(
        make.config(), collectors=collectors, clock=clock, own_cpu_seconds=lambda: 0.041 * clock.monotonic_seconds()
    )
    stacks = collectors.stacks
    assert isinstance(stacks, make.FakeSource)
    for index in range(14):
        stacks.charged_cpu_seconds = 0.009 * clock.monotonic_seconds()
        watched.tick(make.span(index))
        clock.sleep(2.0)
    assert stacks.rates[0] == 5.0
    assert watched.snapshot().daemon.budget_used_ratio == pytest.approx(5.0)


def test_every_subscriber_gets_every_tick_even_beside_one_that_fails() -> None:
    watched = daemon(make.FakeClock(), make.rank(0))
    ticks: list[Tick] = []

    def fail(_: Tick) -> None:
        raise RuntimeError("a subscriber's fault")

    watched.publisher.subscribe(fail)
    unsubscribe = watched.publisher.subscribe(ticks.append)
    watched.tick(make.span(0))
    unsubscribe()
    watched.tick(make.span(1))
    assert [tick.span for tick in ticks] == [make.span(0)]


def test_the_loop_outlives_a_window_that_breaks() -> None:
    clock = make.FakeClock(seconds=9.0)
    watched = daemon(clock, make.rank(0))
    good, calls = watched.tick, itertools.count()

    def break_first(span: Span) -> Tick:
        if next(calls) == 0:
            raise MemoryError("a bad day")
        return good(span)

    watched.tick = break_first
    watched._run()
    assert next(calls) >= 4
    assert watched.snapshot().daemon.windows_total >= 3


def test_stacks_are_recorded_when_a_job_becomes_slower() -> None:
    pace = {"milliseconds": 50.0}
    watching = daemon(None, make.rank(), steps=lambda _: make.steps(*[pace["milliseconds"] / 1000] * 20))
    for index in range(4):
        watching.tick(make.span(index))
    assert watching._collectors.stacks.hurried == []
    pace["milliseconds"] = 80.0
    watching.tick(make.span(4))
    assert watching._collectors.stacks.hurried == [make.rank().job]


def test_somebody_with_a_thousand_problems_does_not_hide_anothers(caplog: pytest.LogCaptureFixture) -> None:
    clock = make.FakeClock()
    problems = ProblemLog(logging.getLogger("test"), clock.monotonic_seconds)
    for number in range(20_000):
        problems.warn(number, f"problem {number}", "uid 1001")
    problems.warn("ours", "a problem of ours", "uid 1000")
    assert "a problem of ours" in caplog.text
    assert len(caplog.records) == LINES_PER_OWNER + 2
    assert caplog.text.count("uid 1001 has more problems, which are not logged for a minute") == 1
