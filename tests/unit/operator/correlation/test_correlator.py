from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.verdicts.detector import JobDetector
from rankscope.analysis.verdicts.verdict import DEVICE, Cause, Kind, Severity
from rankscope.analysis.verdicts.windows import JobWindow
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.job_service import job_status, verdict_of
from rankscope.v1 import identity_pb2, rank_service_pb2, window_pb2
from rankscope.v1.window_pb2 import GroupSeat, StepOperations
from tests.daemon_messages import hold
from tests.support.step_programs import BYTES, Fault, Layout, packed, play

SECOND = 1_000_000_000


def tick(number: int, slow_rank: int | None = None, incarnation: int = 1) -> rank_service_pb2.WatchRanksResponse:
    """Four ranks, 20 steps of 55 ms; a slow one has 50 ms more of its own work, and all wait for it."""
    windows = []
    for rank in range(4):
        own, step = (0.1, 0.105) if rank == slow_rank else (0.05, 0.055 if slow_rank is None else 0.105)
        windows.append(
            window_pb2.RankWindow(
                identity=identity_pb2.RankIdentity(
                    job="j", rank=rank, world_size=4, node="a", pid=10 + rank, incarnation=incarnation
                ),
                start_unix_nanos=(1000 + 2 * number) * SECOND,
                end_unix_nanos=(1002 + 2 * number) * SECOND,
                steps=20,
                step_seconds=window_pb2.StepStatistics(mean=step, p50=step),
                self_seconds=window_pb2.StepStatistics(mean=own),
                wait_seconds=window_pb2.StepStatistics(mean=step - own),
            )
        )
    return rank_service_pb2.WatchRanksResponse(node="a", windows=windows)


class Fleet:
    def __init__(self) -> None:
        self.now = 1002.0
        self.seen: list[JobState] = []
        self.correlator = Correlator(clock=lambda: self.now, monotonic=lambda: self.now)
        self.correlator.listen(self.seen.extend)

    def play(self, *messages: rank_service_pb2.WatchRanksResponse) -> JobState:
        for message in messages:
            self.now = message.windows[0].end_unix_nanos / 1e9 + 0.1
            self.correlator.take(map(hold, message.windows), message.departed)
            self.correlator.tick()
        return self.seen[-1]


def test_streamed_windows_become_a_verdict_with_its_start_time() -> None:
    fleet = Fleet()
    healthy = fleet.play(*(tick(n) for n in range(4)))
    assert healthy.verdict.kind is Kind.HEALTHY
    slow = fleet.play(*(tick(n, slow_rank=1) for n in range(4, 9)))
    assert (slow.verdict.kind, slow.verdict.culprits, slow.verdict.severity) == (Kind.SLOW_RANK, (1,), Severity.ALARM)
    assert slow.since_unix_seconds == 1014 + 0.1  # the third slow window
    assert slow.step_seconds == 0.105


def with_operations(number: int, operations: Operations) -> rank_service_pb2.WatchRanksResponse:
    """The steps that end in this window of 2 s."""
    message = tick(number)
    ends = {
        step: int(operations.stop_ns[operations.step == step].max()) for step in np.unique(operations.step).tolist()
    }
    steps = [step for step, end in ends.items() if end // (2 * SECOND) == number]
    for window in message.windows:
        rank = window.identity.rank
        mine = packed(take_rows(operations, (operations.rank == rank) & np.isin(operations.step, steps)), rank)
        window.operations.CopyFrom(
            window_pb2.StepOperations(
                first_step=mine.first_step,
                start_nanos=mine.start_ns,
                tick_nanos=mine.tick_ns,
                unix_less_gpu_nanos=mine.unix_less_gpu_ns,
                seats=[window_pb2.GroupSeat(**seat._asdict()) for seat in mine.seats],
                rows=mine.rows,
            )
        )
    return message


def test_operations_of_all_ranks_show_where_a_step_goes() -> None:
    operations = play(Layout(pipeline=2, data=2, steps=110, noise=0.0))
    fleet = Fleet()
    state = fleet.play(*(with_operations(number, operations) for number in range(7)))
    assert state.breakdown is not None
    step_seconds = float(operations.stop_ns.max()) / 110 / 1e9
    assert state.breakdown.step_seconds == pytest.approx(step_seconds, rel=0.02)
    assert state.exposed_communication_ratio == pytest.approx(
        sum(part.seconds for part in state.breakdown.parts if part.part == "communication") / step_seconds, rel=0.02
    ), "one statement with the parts"
    parts = {(part.part, part.group_kind) for part in state.breakdown.parts}
    assert parts == {("own", ""), ("bubble", ""), ("communication", "pipeline"), ("communication", "data")}
    sent = 7 * 2 / step_seconds * BYTES["data"]  # by each rank until now
    assert state.breakdown.totals["data"].bytes == pytest.approx(sent, rel=0.15)
    assert fleet.play(tick(7)).breakdown == state.breakdown, "a window without whole steps adds nothing"
    assert Fleet().play(tick(0)).breakdown is None


def test_a_restart_makes_the_old_windows_worthless() -> None:
    fleet = Fleet()
    fleet.play(*(tick(n, slow_rank=1) for n in range(2)))
    again = fleet.play(tick(2, slow_rank=1, incarnation=2))
    assert again.verdict.severity is Severity.NONE  # one window of the new processes, not a third


def test_a_failing_listener_does_not_stop_the_verdicts() -> None:
    fleet = Fleet()

    def broken(states: tuple[JobState, ...]) -> None:
        raise RuntimeError("a reader's fault")

    fleet.correlator.listen(broken)
    assert fleet.play(tick(0), tick(1), tick(2)).verdict.kind is Kind.HEALTHY
    assert len(fleet.seen) == 3


def test_an_ended_job_leaves_the_table() -> None:
    fleet = Fleet()
    fleet.play(tick(0))
    fleet.correlator.take([], [w.identity for w in tick(0).windows])
    fleet.correlator.tick()
    assert fleet.correlator.states == ()


def test_nothing_is_kept_of_jobs_that_came_and_went() -> None:
    """Some say that they end, some fall silent, some are replaced by others."""
    fleet = Fleet()
    lost = LostSeconds()
    fleet.correlator.listen(lost)
    for number in range(120):
        message = tick(number, slow_rank=1)
        for window in message.windows:
            window.identity.job = f"job-{number // 2}"
            window.identity.incarnation = number
        fleet.play(message)
        if number % 3 == 0:
            gone = [window.identity for window in message.windows]
            fleet.correlator.take([], gone)
    kept = (fleet.correlator._states, fleet.correlator._fleet._judges, fleet.correlator._table.jobs, lost._totals)
    assert max(map(len, kept)) < 25  # those of the last minute
    fleet.now += 61.0
    fleet.correlator.tick()
    assert [len(table) for table in kept] == [0, 0, 0, 0]


def test_ranks_of_a_silent_node_become_stale_and_come_back() -> None:
    fleet = Fleet()

    def stale() -> set[int]:
        (state,) = fleet.correlator.states
        return set(job_status(state, fleet.now).stale_seconds)

    for number in range(12):
        message = tick(number)
        if number >= 3:
            del message.windows[2:]
        fleet.play(message)
        if number == 3:
            assert stale() == set(), "one window may be late"
    assert stale() == {2, 3}
    fleet.play(tick(12))
    assert stale() == set()
    fleet.now += 30.0  # nothing arrives any more, and nothing is judged
    assert stale() == {0, 1, 2, 3}


def test_a_verdict_survives_the_wire() -> None:
    fleet = Fleet()
    state = fleet.play(*(tick(n, slow_rank=3) for n in range(5)))
    assert verdict_of(job_status(state).verdict) == state.verdict
    on_device = replace(state.verdict, cause=Cause("device", (), "same clock as its peers", DEVICE))
    assert verdict_of(job_status(replace(state, verdict=on_device)).verdict) == on_device


def test_a_job_that_cannot_be_judged_blocks_no_other_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its windows hold that nobody thought of."""
    judge, asked = JobDetector.absorb, []

    def absorb(self: JobDetector, window: JobWindow) -> JobWindow | None:
        asked.append(window.world_size)
        if window.world_size == 5:
            raise ZeroDivisionError("an absurd job")
        return judge(self, window)

    monkeypatch.setattr(JobDetector, "absorb", absorb)
    fleet = Fleet()
    for number in range(8):
        message = tick(number, slow_rank=1)
        for window in tick(number).windows:
            window.identity.job, window.identity.world_size = "odd", 5
            message.windows.append(window)
        state = fleet.play(message)
    assert {state.job for state in fleet.correlator.states} == {"j"}
    assert (state.verdict.kind, state.verdict.culprits) == (Kind.SLOW_RANK, (1,))
    assert asked.count(5) == 2  # with the others, and by itself; then it was left out


def test_the_state_has_a_picture_that_explains_the_verdict() -> None:
    operations = play(Layout(pipeline=2, data=2, steps=100, faults=(Fault(2, 20_000_000),)))
    messages = []
    for number in range(10):
        message = tick(number, slow_rank=2)
        for window in message.windows:
            mine = (operations.rank == window.identity.rank) & ((operations.step - 1) // 10 == number)
            sent = packed(take_rows(operations, mine), window.identity.rank)
            seats = [GroupSeat(**seat._asdict()) for seat in sent.seats]
            window.operations.CopyFrom(
                StepOperations(
                    first_step=sent.first_step,
                    start_nanos=sent.start_ns,
                    tick_nanos=sent.tick_ns,
                    unix_less_gpu_nanos=sent.unix_less_gpu_ns,
                    seats=seats,
                    rows=sent.rows,
                )
            )
        messages.append(message)
    fleet = Fleet()
    first = fleet.play(messages[0]).picture
    assert first is not None and first.focus is None, "no verdict stands yet"
    state = fleet.play(*messages[1:])
    assert state.verdict.culprits == (2,)
    assert state.picture is not None and state.picture.focus is not None
    assert state.picture.focus.rank == 2
    assert state.picture.step > 50
