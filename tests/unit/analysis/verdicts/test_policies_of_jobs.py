"""Jobs of one fleet, each by its own policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from tests.unit.analysis.synthetic import SyntheticJob

LENIENT = replace(DEFAULT_POLICY, rank_ratio=2.0, starved_rank_ratio=2.0)
# One and the same trouble in all of them: rank 3 is a third slower than its peers.
SLOW = SyntheticJob(slow_ranks={3: 1.33}, extra={rank: {"mfu_ratio": 0.3} for rank in range(4)})
HEALTHY = SLOW.but(slow_ranks={})


class Fleet:
    def __init__(self, **policies: Policy) -> None:
        self.policies = policies
        self._judge = FleetDetector(policy_of=lambda job: self.policies.get(job))
        self._random = np.random.default_rng(0)
        self._tick = 0

    def play(self, windows: int = 8, job: SyntheticJob = SLOW) -> Mapping[str, Verdict]:
        told: Mapping[str, Verdict] = {}
        for _ in range(windows):
            self._tick += 1
            told = self._judge.evaluate({name: job.window(self._random, self._tick) for name in ("a", "b", "c")})
        return told


def kinds(verdicts: Mapping[str, Verdict]) -> dict[str, Kind]:
    return {job: verdict.kind for job, verdict in verdicts.items()}


def test_jobs_of_one_tick_are_judged_by_their_own_thresholds() -> None:
    told = Fleet(a=LENIENT, b=replace(DEFAULT_POLICY, mfu_target_ratio=0.4)).play()
    assert kinds(told) == {"a": Kind.HEALTHY, "b": Kind.SLOW_RANK, "c": Kind.SLOW_RANK}
    assert told["b"].culprits == (3,)


def test_a_target_of_one_job_is_not_anothers() -> None:
    told = Fleet(a=replace(DEFAULT_POLICY, mfu_target_ratio=0.4)).play(job=HEALTHY)
    assert kinds(told) == {"a": Kind.LOW_MFU, "b": Kind.HEALTHY, "c": Kind.HEALTHY}


def test_changed_thresholds_release_an_alarm_without_hysteresis() -> None:
    fleet = Fleet()
    assert fleet.play()["a"].severity is Severity.ALARM
    # Halfway to the new threshold lies 1.25, which the rank still exceeds.
    fleet.policies["a"] = replace(DEFAULT_POLICY, rank_ratio=1.5)
    told = fleet.play()
    assert kinds(told) == {"a": Kind.HEALTHY, "b": Kind.SLOW_RANK, "c": Kind.SLOW_RANK}
    del fleet.policies["a"]
    assert fleet.play()["a"].severity is Severity.ALARM


def test_a_new_policy_keeps_a_standing_communication_fault() -> None:
    fleet = Fleet()
    fleet.play(job=HEALTHY)
    slow = HEALTHY.but(transfer_seconds=0.03)
    assert fleet.play(job=slow)["a"].kind is Kind.SLOW_COMMUNICATION
    fleet.policies["a"] = LENIENT
    assert fleet.play(job=slow)["a"].kind is Kind.SLOW_COMMUNICATION
