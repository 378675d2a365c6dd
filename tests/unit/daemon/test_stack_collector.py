"""Scheduling, failing and cutting down. A script stands in for py-spy where its behaviour must come on demand."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

import pytest

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.daemon import procfs
from rankscope.daemon.config import Config
from rankscope.daemon.profiles.store import ProfileStore, Query
from rankscope.daemon.samples import Problem, RankProcess, Recording, Span, StackSample, StallDump
from rankscope.daemon.stacks import recording
from rankscope.daemon.stacks.collector import HOLD_UP_SECONDS, StacksCollector
from rankscope.daemon.stacks.pyspy import STUCK_PER_OWNER, Child, Ended, KilledChildren
from rankscope.daemon.stacks.recording import MAX_FRAMES, MAX_LIBRARY_FRAMES, summarise
from rankscope.daemon.stacks.sampling_budget import Budget, Plan
from tests.support.waiting import wait_until

SPAN = Span(0, 2_000_000_000)
ME = os.getpid()
FAIL = "echo 'Error: nope' >&2; exit 1"
SUCCEED = f'while [ "$1" != --output ]; do shift; done; echo "thread ({ME});f (/t.py:1) 20" > "$2"'


def rank(number: int, job: str = "job", owner: str = "") -> RankProcess:
    return RankProcess(job, number, number, 8, ME, procfs.read_stat(f"/proc/{ME}").start_ticks, (ME,), owner=owner)


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


def settle(source: StacksCollector, now: float) -> None:
    """One poll of the simulated clock, and all that it started has ended."""
    source.poll(now)

    def nothing_runs() -> bool:
        source.poll(now)
        return source.running == 0

    wait_until(nothing_runs)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


class SimulatedRecorder:
    """Records in simulated time, a little longer than planned, and costs what a process with many threads does."""

    started: ClassVar[list[tuple[float, int, Plan]]] = []
    overrun_seconds: ClassVar[dict[int, float]] = {}
    cost_seconds: ClassVar[tuple[float, float]] = (0.0, 0.0)  # of attaching and of a sample
    extra_seconds: ClassVar[dict[int, float]] = {}  # that the next recording of a rank costs

    def __init__(self, rank: RankProcess, *_: object) -> None:
        self.rank = rank
        self.due_seconds = -math.inf
        self.is_running = False
        self._ends_at = 0.0
        self._cost = 0.0

    @property
    def running_cpu_seconds(self) -> float:
        return self._cost / 2 if self.is_running else 0.0

    def is_ready(self, now: float) -> bool:
        return not self.is_running

    def start(self, plan: Plan, now: float, due: float) -> None:
        self.started.append((now, self.rank.rank, plan))
        self.due_seconds, self.is_running = due, True
        self._ends_at = now + plan.seconds + self.overrun_seconds.get(self.rank.rank, 0.1 * self.rank.rank)
        attaching, sample = self.cost_seconds
        self._cost = attaching + plan.seconds * plan.rate_hz * sample + self.extra_seconds.pop(self.rank.rank, 0.0)

    def poll(self, now: float) -> float:
        if not self.is_running or now < self._ends_at:
            return 0.0
        self.is_running = False
        return self._cost

    def take(self) -> None: ...

    def close(self) -> float:
        return 0.0


class SimulatedNode:
    """A collector and, where one is given, the budget that steers it, in simulated time."""

    def __init__(self, ranks: list[RankProcess], budget: Budget | None = None, now: float = 0.0) -> None:
        self.ranks, self.budget, self.now = ranks, budget, now
        self.source = StacksCollector("/bin/true", unix_nanos=lambda: round((1_790_000_000 + self.now) * 1e9))
        self.source.collect(ranks, SPAN)
        self.used_ratios: list[float] = []

    def run(self, seconds: float) -> list[tuple[float, int, Plan]]:
        """What was started: when, of which rank, how."""
        before = len(SimulatedRecorder.started)
        for tick in range(round(seconds * 5)):
            self.source.poll(self.now)
            if self.budget is not None and tick % 10 == 0:
                own = 0.002 * len(self.ranks) * self.now
                cpu = self.source.charged_cpu_seconds
                self.source.set_rate(self.budget.observe(self.now, own, cpu, len(self.ranks)))
                self.used_ratios.append(self.budget.used_ratio or 0.0)
            self.now += 0.2
        return SimulatedRecorder.started[before:]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.daemon.stacks.collector.RankRecorder", SimulatedRecorder)
    monkeypatch.setattr(SimulatedRecorder, "started", [])
    monkeypatch.setattr(SimulatedRecorder, "overrun_seconds", {})
    monkeypatch.setattr(SimulatedRecorder, "cost_seconds", (0.0, 0.0))
    monkeypatch.setattr(SimulatedRecorder, "extra_seconds", {})


def stretches(started: list[tuple[float, int, Plan]]) -> dict[float, list[int]]:
    """Ranks by when they were started together."""
    found: dict[float, list[int]] = {}
    for now, number, _ in started:
        found.setdefault(now, []).append(number)
    return found


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("rate_hz", [10.0, 5.0, 3.75, 2.0])
def test_a_jobs_ranks_are_recorded_in_the_same_stretch(rate_hz: float) -> None:
    node = SimulatedNode([rank(number) for number in range(8)])
    node.source.set_rate(rate_hz)
    together = stretches(node.run(60))
    assert len(together) >= 5
    assert all(ranks == list(range(8)) for ranks in together.values())


@pytest.mark.usefixtures("simulated")
def test_with_pauses_a_jobs_nodes_record_at_the_same_time() -> None:
    nodes = [SimulatedNode([rank(0)], now=0.0), SimulatedNode([rank(8)], now=3.6)]
    starts = []
    for node in nodes:
        node.source.set_rate(2.5)
        node.run(20)
        starts.append([now for now, _, _ in node.run(40 - node.now % 8)])
    assert len(starts[0]) >= 4
    assert starts[0][-3:] == pytest.approx(starts[1][-3:], abs=0.5)


@pytest.mark.usefixtures("simulated")
def test_an_endless_recording_delays_the_others_only_briefly() -> None:
    SimulatedRecorder.overrun_seconds = {3: 1000.0}
    node = SimulatedNode([rank(number) for number in range(4)])
    first, *rest = stretches(node.run(40)).items()
    assert first == (0.0, [0, 1, 2, 3])
    assert rest[0][0] == pytest.approx(4 + HOLD_UP_SECONDS, abs=0.5)
    assert len(rest) >= 4
    assert all(ranks == [0, 1, 2] for _, ranks in rest)


@pytest.mark.usefixtures("simulated")
def test_more_ranks_than_may_be_recorded_at_once_take_turns() -> None:
    first, second, third = set(range(16)), set(range(16, 20)), {20, 21, 22}
    jobs = [*map(rank, sorted(first | second)), *(rank(number, "other") for number in sorted(third))]
    node = SimulatedNode(jobs)
    together = stretches(node.run(100))
    assert all(set(ranks) in (first, second, third, second | third) for ranks in together.values())
    assert max(map(len, together.values())) <= 16
    recorded = Counter(number for ranks in together.values() for number in ranks)
    assert recorded[16] >= 8
    assert abs(recorded[5] - recorded[16]) <= 2, "each has its share"
    assert node.source.recorded_ratio == pytest.approx(0.5, abs=0.15)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("ranks_of_a_job", [1, 16, 200])
def test_another_users_many_ranks_cost_a_user_no_recordings(
    ranks_of_a_job: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedRecorder, "overrun_seconds", dict.fromkeys(range(202), 0.2))
    ours = [rank(number, owner="us") for number in (0, 1)]
    theirs = [rank(number, f"job {number // ranks_of_a_job}", "them") for number in range(2, 202)]
    alone = Counter(number for _, number, _ in SimulatedNode(ours).run(60))
    beside = Counter(number for _, number, _ in SimulatedNode([*theirs, *ours]).run(60))
    assert beside[1] >= 0.8 * alone[1]
    assert len(beside) > 100, "they have their turns as well"


@pytest.mark.usefixtures("simulated")
def test_recordings_that_fail_at_once_are_not_more_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [rank(number) for number in range(200)]
    monkeypatch.setattr(SimulatedRecorder, "overrun_seconds", dict.fromkeys(range(200), 0.2))
    recording = len(SimulatedNode(ranks).run(20))
    monkeypatch.setattr(SimulatedRecorder, "overrun_seconds", dict.fromkeys(range(200), -math.inf))
    assert len(SimulatedNode(ranks).run(20)) <= 1.5 * recording


@pytest.mark.usefixtures("simulated")
def test_a_rank_that_arrives_late_joins_the_next_stretch() -> None:
    node = SimulatedNode([rank(0), rank(1)])
    node.run(2)
    node.source.collect([rank(0), rank(1), rank(2)], SPAN)
    assert next(iter(stretches(node.run(10)).values())) == [0, 1, 2]


@pytest.mark.usefixtures("simulated")
def test_a_higher_rate_holds_after_one_period_at_most() -> None:
    node = SimulatedNode([rank(0)])
    node.source.set_rate(0.01)
    node.run(10)
    node.source.set_rate(10.0)
    assert len(node.run(12)) >= 2


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("sample_ms", "least_hertz"), [(0.8, 5.0), (1.0, 3.75), (2.0, 1.25)])
def test_many_threaded_ranks_are_sampled_at_five_hertz_within_budget(sample_ms: float, least_hertz: float) -> None:
    """60, 75 and 150 threads by what py-spy was measured to take."""
    SimulatedRecorder.cost_seconds = (0.02, sample_ms / 1000)
    node = SimulatedNode([rank(number) for number in range(8)], Budget(0.01, 10.0))
    node.run(120)
    node.used_ratios.clear()
    started = node.run(300)
    assert max(node.used_ratios) <= 1.0
    assert node.budget is not None
    assert node.budget.rate_hertz >= least_hertz
    assert min(plan.rate_hz for _, _, plan in started) >= 5
    assert all(ranks == list(range(8)) for ranks in stretches(started).values())
    times = list(stretches(started))
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 10 * 5.0 / least_hertz


@pytest.mark.usefixtures("simulated")
def test_a_far_too_expensive_recording_is_charged_over_minutes() -> None:
    SimulatedRecorder.cost_seconds = (0.01, 0.0005)
    budget = Budget(0.02, 10.0)
    node = SimulatedNode([rank(number) for number in range(3)], budget)
    node.run(60)
    SimulatedRecorder.extra_seconds[2] = 2.0
    rates = []
    for _ in range(12):
        node.run(10)
        rates.append(budget.rate_hertz)
    assert min(rates) >= 5
    before = node.source.child_cpu_seconds - node.source.charged_cpu_seconds
    assert 1.0 < before < 2.0
    node.run(1200)
    assert node.source.child_cpu_seconds - node.source.charged_cpu_seconds < 0.05
    # Again and again, it does reach the budget.
    for _ in range(60):
        SimulatedRecorder.extra_seconds[2] = 2.0
        node.run(10)
    assert budget.rate_hertz < 5


def test_recordings_since_the_last_call_make_one_sample(tmp_path: Path) -> None:
    with collector(tmp_path, SUCCEED) as source:
        source.collect([rank(0)], SPAN)
        for tenth in range(100):
            settle(source, tenth / 10)
        assert len(calls(tmp_path)) == 3  # of 4 s each, in 10 s
        sample = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(sample, StackSample)
        assert sample.samples == 3 * 20
        assert source.child_cpu_seconds > 0
        source.set_rate(0)
        settle(source, 1000.0)
        assert len(calls(tmp_path)) == 3


def test_the_store_keeps_reported_samples_under_the_current_name(tmp_path: Path) -> None:
    kept: list[Recording] = []
    store = ProfileStore.from_config(Config(profile_dir=str(tmp_path / "profiles")))
    with closing(store), collector(tmp_path, SUCCEED) as source:
        source.keep_recordings(lambda recording: (kept.append(recording), store.record(recording))[1])
        reported = {}
        for name in ("job", "team/job"):
            named = rank(3, job=name)
            source.collect([named], SPAN)
            for tenth in range(100):
                settle(source, (1000.0 if name == "job" else 2000.0) + tenth / 10)
            sample = source.collect([named], SPAN)[named.key]
            assert isinstance(sample, StackSample)
            reported[name] = sample.samples
        assert [recording.run for recording in kept] == ["job"] * 3 + ["team/job"] * 3
        assert store.flush(180)
        ever = Span(0, time.time_ns())
        assert {name: store.query(Query(name, ever)).samples_total for name in reported} == reported
        assert store.status().samples_stored == sum(reported.values())
        assert {(recording.rank, recording.period_nanos) for recording in kept} == {(3, 10**8)}
        assert all(recording.span.end_unix_nanos <= time.time_ns() for recording in kept)


def test_a_rank_that_keeps_failing_is_tried_ever_less_often(tmp_path: Path) -> None:
    with collector(tmp_path, FAIL) as source:
        source.collect([rank(0)], SPAN)
        for second in range(300):
            settle(source, float(second))
        problem = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(problem, Problem)
        assert problem.kind == "unreadable"
        assert "nope" in problem.text
        assert 5 <= len(calls(tmp_path)) <= 12  # of 75
        assert source.collect([rank(0)], SPAN)[rank(0).key] == problem  # it still stands


def test_a_recording_that_overstays_is_killed(tmp_path: Path) -> None:
    with collector(tmp_path, "exec sleep 60") as source:
        source.collect([rank(0)], SPAN)
        source.poll(0.0)
        wait_until(lambda: len(calls(tmp_path)) == 1)
        source.poll(100.0)
        problem = source.collect([rank(0)], SPAN)[rank(0).key]
        assert isinstance(problem, Problem)
        assert problem.kind == "timeout"

        def is_reaped() -> bool:
            source.poll(100.0)
            return is_gone(calls(tmp_path)[0])

        wait_until(is_reaped)


def test_recordings_of_departed_ranks_and_at_close_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.daemon.stacks.collector.CLOSING_SECONDS", 180.0)
    with collector(tmp_path, "exec sleep 60") as source:
        source.collect([rank(0), rank(5)], SPAN)
        source.poll(0.0)
        source.poll(2.0)
        wait_until(lambda: len(calls(tmp_path)) == 2)
        source.collect([rank(0)], SPAN)
        assert source.running == 1
        source.close()
        assert all(is_gone(pid) for pid in calls(tmp_path))


def test_a_dump_that_hangs_does_not_hold_the_daemon_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.daemon.stacks.collector.DUMP_TIMEOUT_SECONDS", 0.2)
    with collector(tmp_path, "exec sleep 60") as source:
        problem = source.dump_all([rank(0)])[rank(0).key]
        assert isinstance(problem, Problem)
        assert problem.kind == "timeout"


def test_a_dump_that_ended_while_the_daemon_lagged_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, late = Child.poll, []

    def poll(child: Child) -> Ended | None:
        if not late:  # it runs, and before anything else happens it ends and the time is over
            late.append(child)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.3)
            return None
        return real(child)

    thread = {"thread_name": "MainThread", "os_thread_id": ME, "frames": [{"name": "f", "filename": "t.py", "line": 1}]}
    monkeypatch.setattr("rankscope.daemon.stacks.collector.DUMP_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(Child, "poll", poll)
    with collector(tmp_path, f"echo '{json.dumps([thread])}'") as source:
        dump = source.dump_all([rank(0)])[rank(0).key]
    assert isinstance(dump, StallDump), dump


def test_a_dump_is_retried_when_a_thread_moved_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.daemon.stacks.collector.DUMP_TIMEOUT_SECONDS", 180.0)
    thread = {"thread_name": "MainThread", "os_thread_id": ME, "frames": [{"name": "f", "filename": "t.py", "line": 1}]}
    moved = "echo 'Error: Failed to copy PyFrameObject: Bad address (os error 14)' >&2; exit 1"
    moves_twice = f"[ $(wc -l < {tmp_path}/calls) -gt 2 ] || {{ {moved}; }}; echo '{json.dumps([thread])}'"
    with collector(tmp_path, moves_twice) as source:
        dump = source.dump_all([rank(0)])[rank(0).key]
    assert isinstance(dump, StallDump), dump
    assert dump.stack == (Frame("f", "t.py", 1),)
    with collector(tmp_path, moved) as source:
        problem = source.dump_all([rank(0)])[rank(0).key]
    assert isinstance(problem, Problem)
    assert "Bad address" in problem.text
    assert len(calls(tmp_path)) == 3 + 5


def test_output_that_is_all_nonsense_is_a_problem(tmp_path: Path) -> None:
    nonsense = 'while [ "$1" != --output ]; do shift; done; head -c 5000 /dev/urandom > "$2"'
    with collector(tmp_path, nonsense) as source:
        source.collect([rank(0)], SPAN)
        settle(source, 0.0)
        assert isinstance(source.collect([rank(0)], SPAN)[rank(0).key], Problem)
        assert isinstance(source.dump_all([rank(0)])[rank(0).key], Problem)


def test_without_py_spy_every_rank_says_how_to_get_it(tmp_path: Path) -> None:
    source = StacksCollector(tmp_path / "py-spy")
    source.collect([rank(0)], SPAN)
    source.poll(0.0)
    problem = source.collect([rank(0)], SPAN)[rank(0).key]
    assert isinstance(problem, Problem)
    assert problem.kind == "missing"
    assert "pip install py-spy" in problem.text
    assert source.dump_all([rank(0)])[rank(0).key] == problem
    source.close()


def test_frames_count_once_per_stack_and_separately_by_line() -> None:
    outer, inner, other_line = Frame("f", "/t.py", 1), Frame("g", "/t.py", 8), Frame("g", "/t.py", 9)
    sample = summarise({(inner, inner, outer): 3, (other_line, outer): 2}, 1, SPAN)
    found = {count.frame: (count.inclusive, count.own) for count in sample.frames}
    assert found == {outer: (5, 0), inner: (3, 3), other_line: (2, 2)}
    assert (sample.samples, sample.errors, sample.distinct_stacks, sample.phase_counts) == (5, 1, 2, {"other": 5})


def test_library_time_also_counts_for_the_calling_user_line() -> None:
    library, line, loop = (
        Frame("open", "/x/site-packages/a.py", 3),
        Frame("load", "/t.py", 8),
        Frame("main", "/t.py", 1),
    )
    sample = summarise({(library, line, loop): 3, (): 1}, 0, SPAN)
    assert {count.frame: count.own for count in sample.frames} == {library: 3, line: 3, loop: 0}


def test_cutting_keeps_own_frames_first_and_some_library_frames() -> None:
    stacks: Counter[Stack] = Counter()
    for line in range(100):
        stacks[(Frame("lib", "/opt/site-packages/x.py", line), Frame("own", "/home/me/train.py", line))] = 100 - line
    stacks[tuple(Frame("deep", "/opt/site-packages/y.py", line) for line in range(100))] = 500
    sample = summarise(stacks, 0, SPAN)
    own = [count for count in sample.frames if count.frame.function == "own"]
    assert len(sample.frames) == MAX_FRAMES
    assert [count.frame.line for count in own] == list(range(MAX_FRAMES - MAX_LIBRARY_FRAMES))
    assert sample.frames[0] == sample.frames[0].__class__(
        Frame("deep", "/opt/site-packages/y.py", 0), 500, 500, "other"
    )


class UnkillableChild:
    """Stands in for a py-spy that waits for a file system which does not answer."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.has_ended = False

    def kill(self) -> None:
        pass

    def wait(self, seconds: float) -> Ended | None:
        return Ended(-9, 0.5) if self.has_ended else None


def test_unkillable_children_cost_only_their_owner_its_stacks() -> None:
    now = [0.0]
    killed = KilledChildren(lambda: now[0])
    hostile = [replace(rank(number), owner="pod a") for number in range(STUCK_PER_OWNER + 1)]
    other = replace(rank(0, "other"), owner="pod b")
    children = [UnkillableChild(number) for number in range(STUCK_PER_OWNER)]
    for child, held in zip(children, hostile, strict=False):
        killed.kill(cast(Child, child), held)
    assert killed.hold(hostile[0])
    assert killed.reap() == []
    assert killed.stuck == 0  # it may take a moment
    now[0] = 5.0
    assert killed.stuck == STUCK_PER_OWNER
    objections = [killed.objection(each) for each in hostile]
    assert all(problem is not None and problem.kind == "stuck" for problem in objections)
    assert killed.objection(other) is None
    for child in children:
        child.has_ended = True
    assert killed.reap() == [0.5] * STUCK_PER_OWNER
    assert killed.stuck == 0
    assert killed.objection(hostile[-1]) is None


def test_a_far_too_expensive_rank_is_retried_soon_then_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_CPU_SECONDS", 0.2)
    monkeypatch.setattr(recording, "RANK_CORE_RATIO", 0.002)
    with collector(tmp_path, "while :; do :; done") as source:
        source.collect([rank(0)], SPAN)
        now = [0.0]

        def is_given_up() -> bool:
            now[0] += 0.001
            source.poll(now[0])
            found = source.collect([rank(0)], SPAN).get(rank(0).key)
            return isinstance(found, Problem) and found.kind == "expensive" and not source.running

        def is_tried_again() -> bool:
            source.poll(now[0])
            return len(calls(tmp_path)) == 2

        def is_reaped() -> bool:
            source.poll(now[0])
            return is_gone(calls(tmp_path)[-1])

        wait_until(is_given_up)
        assert len(calls(tmp_path)) == 1
        now[0] += 20.0
        wait_until(is_tried_again)  # once the killed child is reaped
        wait_until(is_given_up)
        wait_until(is_reaped)
        settle(source, now[0] + 50.0)
        assert len(calls(tmp_path)) == 2
