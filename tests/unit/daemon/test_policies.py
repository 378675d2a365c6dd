from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from rankscope.daemon.captures.duty_cycle import DutyCycle, DutySettings
from rankscope.daemon.loop import Daemon
from rankscope.daemon.samples import RankProcess, Span
from rankscope.daemon.server.policies import BadPolicyError, PolicyBoard, PolicyDutyCycle
from rankscope.daemon.stacks.collector import StacksCollector
from rankscope.daemon.stacks.recording import RankRecorder
from rankscope.daemon.stacks.sampling_budget import Plan
from rankscope.v1.policy_service_pb2 import ApplyPoliciesRequest, RunPolicy
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.captures.test_duty_cycle import ScriptedCaptures

BASE_HERTZ = 10.0


def rank(number: int, pod: str | None = "p") -> RankProcess:
    return RankProcess("j", number, number, 2, 100 + number, 1, (100 + number,), pod=pod)


class Played:
    def __init__(self, base_hertz: float = BASE_HERTZ) -> None:
        self.now = 0.0
        self.board = PolicyBoard(base_hertz, lambda: self.now)

    def apply(self, lease_seconds: float = 60.0, **fields: float) -> list[str]:
        policy = RunPolicy(run="ns/r", pods=["p"], **fields)  # type: ignore[arg-type]  # fields of the message
        return self.board.apply(ApplyPoliciesRequest(policies=[policy], lease_seconds=lease_seconds))

    def rates(self, budget_hertz: float = BASE_HERTZ) -> dict[int, float]:
        ranks = [rank(0), rank(1, "other"), rank(2, None)]
        return {key[1]: hertz for key, hertz in self.board.stack_rates(ranks, budget_hertz).items()}


def test_a_policy_applies_only_to_ranks_of_its_pods() -> None:
    played = Played()
    assert played.apply(stack_rate_hertz=2.0) == []
    assert played.rates() == {0: 2.0}
    assert played.board.duty_cycle_of_policy([rank(0)]) is None


def test_a_policy_expires_when_the_operator_is_silent() -> None:
    played = Played()
    played.apply(stack_rate_hertz=2.0, duty_cycle_steps=3, duty_cycle_seconds=600)
    played.now = 59.0
    assert played.rates() == {0: 2.0}
    assert played.board.duty_cycle_of_policy([rank(1, "other"), rank(0)]) == PolicyDutyCycle(3, 600.0)
    played.now = 60.0
    assert played.rates() == {}
    assert played.board.duty_cycle_of_policy([rank(0)]) is None
    assert played.board.held() == []


def test_renewal_keeps_a_policy_and_an_empty_entry_withdraws_it() -> None:
    played = Played()
    played.apply(stack_rate_hertz=2.0)
    played.now = 50.0
    played.apply(stack_rate_hertz=2.0)
    played.now = 100.0
    assert played.rates() == {0: 2.0}
    played.board.apply(ApplyPoliciesRequest(policies=[RunPolicy(run="ns/r")], lease_seconds=60))
    assert played.rates() == {}


def test_the_budget_stands_above_every_policy() -> None:
    played = Played()
    played.apply(stack_rate_hertz=50.0)
    assert played.rates() == {0: 50.0}
    assert played.rates(budget_hertz=5.0) == {0: 5.0}  # no more than others, and half like them
    assert played.rates(budget_hertz=0.0) == {0: 0.0}
    played.apply(stack_rate_hertz=4.0)
    assert played.rates(budget_hertz=5.0) == {0: 2.0}


def test_what_the_nodes_owner_has_turned_off_stays_off() -> None:
    played = Played(base_hertz=0.0)
    assert "off on this node" in played.apply(stack_rate_hertz=2.0)[0]
    assert played.rates(budget_hertz=0.0) == {}


@pytest.mark.parametrize(("asked", "kept"), [(1e9, 100.0), (-1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0)])
def test_rates_beyond_the_bounds_are_cut_and_told(asked: float, kept: float) -> None:
    played = Played()
    assert f"{kept:g} holds" in played.apply(stack_rate_hertz=asked)[0]
    assert played.rates() == {0: kept}


def test_a_duty_cycle_cannot_be_asked_for_without_a_pause() -> None:
    played = Played()
    assert "60 holds" in played.apply(duty_cycle_steps=5000, duty_cycle_seconds=0.1)[0]
    assert played.board.duty_cycle_of_policy([rank(0)]) == PolicyDutyCycle(100, 60.0)


@pytest.mark.parametrize("lease", [0.0, -5.0, 1e9, math.nan])
def test_a_lease_without_an_end_is_refused_as_a_whole(lease: float) -> None:
    played = Played()
    with pytest.raises(BadPolicyError, match="a lease of"):
        played.apply(lease_seconds=lease, stack_rate_hertz=2.0)
    assert played.rates() == {}


def test_runs_beyond_the_limit_are_refused_by_name() -> None:
    played = Played()
    flood = [RunPolicy(run=f"team/r{n}", pods=["p"], stack_rate_hertz=1.0) for n in range(1030)]
    notes = played.board.apply(ApplyPoliciesRequest(policies=flood, lease_seconds=60))
    assert len(played.board.held()) == 1024
    assert notes[0].startswith("team/r1024: ")


def test_a_ranks_own_lower_rate_means_fewer_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: Counter[int] = Counter()

    def start(self: RankRecorder, plan: Plan, now_seconds: float, due_seconds: float) -> None:
        started[self.rank.rank] += 1
        self.due_seconds = due_seconds

    monkeypatch.setattr(RankRecorder, "start", start)
    ranks = [rank(0), rank(1), rank(2)]
    now = [0.0]
    collector = StacksCollector(tmp_path / "py-spy", rate_hz=10.0, unix_nanos=lambda: round(now[0] * 1e9))
    try:
        collector.collect(ranks, Span(0, 1))
        collector.set_rates_of({ranks[1].key: 1.0, ranks[2].key: 0.0})
        for tick in range(400):
            now[0] = tick * 0.2
            collector.poll(now[0])
        assert started == {0: 20, 1: 4}
    finally:
        collector.close()


def test_a_policys_duty_cycle_runs_until_the_policy_ends() -> None:
    captures = ScriptedCaptures()
    policies: list[PolicyDutyCycle] = []
    own = DutySettings(0, 600.0, 0.5)
    now = [1e9]

    def settings(ranks: object) -> DutySettings:
        return DutySettings(policies[0].steps, policies[0].period_seconds, 0.5) if policies else own

    duty = DutyCycle(own, captures, 2.0, lambda: now[0], settings)
    ranks = [make.rank(0), make.rank(1)]

    def run(seconds: float) -> int:
        before = len(captures.started)
        for _ in range(round(seconds / 2)):
            now[0] += 2
            duty.observe(ranks, {})
            if any(capture.state == 2 for capture in captures.made.values()):  # armed
                captures.deliver()
        return len(captures.started) - before

    assert run(1200) == 0
    assert not duty.was_ever_on
    policies.append(PolicyDutyCycle(3, 100.0))
    assert 8 <= run(1000) <= 10
    assert captures.started[-1][0].steps == 3
    policies.clear()
    assert run(1000) == 0


def test_ranks_are_sampled_by_policy_within_the_budget() -> None:
    clock = make.FakeClock()
    found = [rank(0), rank(1, "other")]
    collectors = make.collectors(*found)
    daemon = Daemon(make.config(), collectors=collectors, clock=clock, own_cpu_seconds=lambda: 0.0)
    stacks = collectors.stacks
    assert isinstance(stacks, make.FakeSource)
    policy = RunPolicy(run="ns/r", pods=["p"], stack_rate_hertz=40.0)
    daemon.policies.apply(ApplyPoliciesRequest(policies=[policy], lease_seconds=3600))
    daemon.tick(make.span(0))
    assert stacks.rates_of[-1] == {0: 40.0}
    for number in range(1, 20):
        clock.sleep(2.0)
        stacks.charged_cpu_seconds += 2.0  # a whole core
        daemon.tick(make.span(number))
    own = stacks.rates[-1]
    assert own < 10.0
    assert stacks.rates_of[-1] == {0: own}
