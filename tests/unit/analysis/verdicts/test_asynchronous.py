"""Asynchronous runs made up from known truths: each worker has a pace of its own, and a server answers all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.asynchronous import find_servers, staleness
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Verdict, headline, loss
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow, RankEvidence, StackProfile, columns_of

WINDOW_SECONDS = 2.0
WINDOWS = 12
SERVER_LINE = FrameSeen("Server.apply", "/job/server.py", 46, 0.9, 0.9, "other")


@dataclass(frozen=True)
class ParameterServer:
    """Rank 0 is the server. Seconds of own work for each worker's cycle, and of the server's for an update."""

    work: tuple[float, ...] = (0.040, 0.040, 0.040)
    update: float = 0.003
    server_steps: bool = True
    server_wait_measured: bool = True
    has_collectives: bool = False

    @property
    def cycles(self) -> list[float]:
        """With a server that is busy all the time, workers take as long as it takes to serve all of them."""
        alone = [work + 2 * self.update for work in self.work]
        busy = self.update * sum(1 / cycle for cycle in alone)
        return [max(cycle, self.update * len(self.work)) if busy >= 1 else cycle for cycle in alone]

    def window(self, number: int, clock_skew_seconds: float | None = None) -> JobWindow:
        rows = []
        for rank, (work, cycle) in enumerate(zip(self.work, self.cycles, strict=True), start=1):
            rows.append(_row(rank, number, cycle, cycle - work))
        if self.server_steps:
            between = 1 / sum(1 / cycle for cycle in self.cycles)
            # To receive a message that is there already takes a moment as well.
            wait = max(between - self.update, 0.0002) if self.server_wait_measured else 0.0
            rows.insert(0, _row(0, number, between, wait))
        else:
            rows.insert(0, {"rank": 0})
        stacks = StackProfile(100, {"other": 1.0}, (SERVER_LINE,), WINDOW_SECONDS)
        return JobWindow(
            1000.0 + WINDOW_SECONDS * number,
            WINDOW_SECONDS,
            len(rows),
            columns_of(rows),
            clock_skew_seconds=clock_skew_seconds,
            evidence=lambda: {0: RankEvidence(stacks=stacks)},
            has_collectives=self.has_collectives,
        )


def _row(rank: int, number: int, step_seconds: float, wait_seconds: float) -> dict[str, float]:
    """As many steps as end in the window."""
    ends = [int((number + place) * WINDOW_SECONDS / step_seconds) for place in (0, 1)]
    own = step_seconds - wait_seconds
    return {
        "rank": rank,
        "steps": ends[1] - ends[0],
        "step_seconds": step_seconds,
        "self_seconds": own,
        "wait_seconds": wait_seconds,
        "transfer_seconds": wait_seconds,
        "self_spread_ratio": 1.02,
        "starved_seconds": 0.0,
    }


def judge(*windows: JobWindow) -> list[Verdict]:
    fleet = FleetDetector()
    return [fleet.evaluate({"job": window})["job"] for window in windows]


def judge_runs(*runs: ParameterServer, windows: int = WINDOWS) -> list[Verdict]:
    made = [run.window(place * windows + number) for place, run in enumerate(runs) for number in range(windows)]
    return judge(*made)


HEALTHY = ParameterServer()
SLOW_WORKER = ParameterServer(work=(0.040, 0.120, 0.040))
SLOW_SERVER = ParameterServer(update=0.045)


def findings(verdicts: Sequence[Verdict]) -> set[Kind]:
    return {verdict.kind for verdict in verdicts if verdict.kind.is_finding}


def test_a_healthy_parameter_server_is_healthy_with_its_throughput() -> None:
    verdicts = judge_runs(HEALTHY)
    assert not findings(verdicts)
    assert verdicts[-1].kind is Kind.HEALTHY
    assert verdicts[-1].asynchronous == "asynchronous: 3 workers, 65.2 updates/s; each 21.7/s, 2.0 behind"


def test_a_slow_worker_costs_its_share_of_the_updates() -> None:
    verdict = judge_runs(HEALTHY, SLOW_WORKER)[-1]
    assert (verdict.kind, verdict.culprits, verdict.is_alarm) == (Kind.SLOW_RANK, (2,), True)
    rates = [sum(1 / cycle for cycle in run.cycles) for run in (HEALTHY, SLOW_WORKER)]
    assert verdict.impact_ratio == pytest.approx(1 - rates[1] / rates[0], abs=0.01)
    assert loss(verdict).startswith("costs 21% of the run's updates")
    assert "rank 2 7.94/s, 5.5 behind; the others 21.7/s, 1.4 behind" in verdict.asynchronous


def test_a_worker_that_is_slow_from_the_start_is_named() -> None:
    verdicts = judge_runs(SLOW_WORKER)
    assert findings(verdicts) == {Kind.SLOW_RANK}
    assert verdicts[-1].culprits == (2,)


def test_the_share_of_one_of_many_workers_is_small() -> None:
    """Less than 2 % of the updates: not worth an alarm, though the worker is three times slower."""
    many = ParameterServer(work=(0.120, *(0.040,) * 63), update=0.0001)
    assert judge_runs(many)[-1].kind is Kind.HEALTHY


def test_the_server_as_the_bottleneck_has_its_own_verdict() -> None:
    verdict = judge_runs(HEALTHY, SLOW_SERVER)[-1]
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (Kind.SLOW_SERVER, (0,), Confidence.HIGH)
    assert headline(verdict) == "the server (rank 0) is the bottleneck because of server.py:46 (Server.apply)"
    rates = [sum(1 / cycle for cycle in run.cycles) for run in (HEALTHY, SLOW_SERVER)]
    assert verdict.impact_ratio == pytest.approx(1 - rates[1] / rates[0], abs=0.02)


def test_a_slow_server_hides_a_slow_worker() -> None:
    """While workers queue, a faster one would only queue longer."""
    both = ParameterServer(work=(0.040, 0.060, 0.040), update=0.045)
    assert findings(judge_runs(both)) == {Kind.SLOW_SERVER}


def test_without_a_past_the_servers_own_time_is_no_loss() -> None:
    verdict = judge_runs(SLOW_SERVER)[-1]
    cycle = SLOW_SERVER.cycles[0]
    assert verdict.impact_ratio == pytest.approx((cycle - 0.040 - 0.045) / cycle, abs=0.01)


def test_a_server_whose_waiting_is_not_measured_gives_low_confidence() -> None:
    """One that answers remote calls, in threads of its own: what its main thread does is no evidence."""
    verdict = judge_runs(replace(SLOW_SERVER, server_wait_measured=False))[-1]
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (Kind.SLOW_SERVER, (0,), Confidence.LOW)
    assert verdict.cause.frames == ()


def test_a_server_without_steps_is_not_named() -> None:
    verdict = judge_runs(replace(SLOW_SERVER, work=(0.04, 0.08, 0.04), update=0.08, server_steps=False))[-1]
    assert verdict.kind is not Kind.SLOW_RANK  # all cycles are alike: nothing shows that they are asynchronous
    apart = ParameterServer(work=(0.060, 0.180, 0.060), update=0.005, server_steps=False)
    verdict = judge_runs(apart)[-1]
    assert verdict.kind is Kind.SLOW_RANK
    assert verdict.culprits == (2,)
    waiting = ParameterServer(work=(0.020, 0.090, 0.020), update=0.030, server_steps=False)
    verdict = judge_runs(waiting)[-1]
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (Kind.SLOW_SERVER, (), Confidence.LOW)
    assert headline(verdict) == "the server is the bottleneck (low confidence)"


def test_ranks_without_steps_are_named_as_the_reason_to_abstain() -> None:
    verdict = judge_runs(replace(HEALTHY, server_steps=False))[-1]
    assert verdict.kind is Kind.INSUFFICIENT_DATA
    assert "no steps of rank 0 are known" in verdict.reason
    assert "rankscope.probe.step()" in verdict.reason


def test_a_run_with_collectives_is_never_asynchronous() -> None:
    """As local SGD: its ranks step apart between two synchronisations."""
    verdicts = judge_runs(replace(SLOW_WORKER, has_collectives=True))
    assert not any(verdict.asynchronous for verdict in verdicts)


def test_collectives_that_come_late_end_an_asynchronous_run() -> None:
    windows = [SLOW_WORKER.window(number) for number in range(WINDOWS)]
    later = [replace(SLOW_WORKER, has_collectives=True).window(number) for number in range(WINDOWS, 2 * WINDOWS)]
    after = [SLOW_WORKER.window(number) for number in range(2 * WINDOWS, 3 * WINDOWS)]
    verdicts = judge(*windows, *later, *after)
    assert verdicts[WINDOWS - 1].asynchronous
    assert not any(verdict.asynchronous for verdict in verdicts[WINDOWS:])


def in_step(number: int, change: Callable[[dict[str, float]], dict[str, float]] = lambda row: row) -> JobWindow:
    """Synchronous ranks that send and receive only: a pipeline without replicas, whose stages are not known."""
    rows = [change(_row(rank, number, 0.05, 0.01)) for rank in range(4)]
    return JobWindow(1000.0 + 2 * number, 2.0, 4, columns_of(rows), has_collectives=False)


def test_synchronous_ranks_that_only_send_messages_are_synchronous() -> None:
    verdicts = judge(*(in_step(number) for number in range(WINDOWS)))
    assert verdicts[-1].kind is Kind.HEALTHY
    assert not verdicts[-1].asynchronous


def test_steps_at_the_borders_of_windows_are_no_drift() -> None:
    random = np.random.default_rng(0)

    def shifted(row: dict[str, float]) -> dict[str, float]:
        return row | {"steps": row["steps"] + int(random.integers(-2, 3))}

    verdicts = judge(*(in_step(number, shifted) for number in range(60)))
    assert not any(verdict.asynchronous for verdict in verdicts)


def test_ranks_that_hang_or_miss_windows_do_not_drift() -> None:
    def hanging(row: dict[str, float]) -> dict[str, float]:
        return row | {"steps": 0} if row["rank"] == 2 else row

    def missing(number: int) -> JobWindow:
        window = in_step(number)
        return replace(window, columns=window.columns.take(window.columns.rank != 2)) if number % 3 == 0 else window

    for windows in (
        [in_step(number, hanging if number >= 4 else lambda row: row) for number in range(WINDOWS)],
        [missing(number) for number in range(30)],
    ):
        assert not any(verdict.asynchronous for verdict in judge(*windows))


def test_ranks_that_exchange_nothing_are_not_asynchronous() -> None:
    """The first interval of local SGD, before any collective."""

    def alone(row: dict[str, float]) -> dict[str, float]:
        steps = row["steps"] // 2 if row["rank"] == 2 else row["steps"]
        return row | {"wait_seconds": 0.0, "self_seconds": row["step_seconds"], "steps": steps}

    assert not any(verdict.asynchronous for verdict in judge(*(in_step(number, alone) for number in range(WINDOWS))))


def test_clocks_of_ranks_that_do_not_meet_are_not_compared() -> None:
    """They are read at a common step, which such ranks reach at different times."""
    verdicts = judge(*(HEALTHY.window(number, clock_skew_seconds=30.0) for number in range(WINDOWS)))
    assert verdicts[-1].kind is Kind.HEALTHY

    def local(row: dict[str, float]) -> dict[str, float]:
        return row | {"transfer_seconds": 0.0}

    meeting = [replace(in_step(number), clock_skew_seconds=30.0, has_collectives=True) for number in range(WINDOWS)]
    assert "clocks" in judge(*meeting)[-1].reason
    rarely = [replace(in_step(n, local), clock_skew_seconds=30.0, has_collectives=True) for n in range(WINDOWS)]
    assert judge(*rarely)[-1].kind is Kind.HEALTHY


def test_servers_make_as_many_steps_as_their_workers() -> None:
    assert find_servers(np.array([60.0, 20, 21, 19])).tolist() == [0]
    assert sorted(find_servers(np.array([60.0, 20, 61, 21, 19])).tolist()) == [0, 2]
    assert find_servers(np.array([60.0, 30, 21, 19])).tolist() == []
    assert find_servers(np.array([20.0, 20])).tolist() == []


def test_staleness_is_what_others_update_in_a_cycle() -> None:
    assert staleness(np.array([0.1, 0.1, 0.2])) == pytest.approx([1.5, 1.5, 4.0])
