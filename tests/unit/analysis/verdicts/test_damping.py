"""What users are told over time: nothing too early, nothing wrong on the way to what is right, no flapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.findings import imbalance_impact
from rankscope.analysis.verdicts.job_summary import JobSummary
from rankscope.analysis.verdicts.rules import Damper
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import RankColumns, Stall
from tests.unit.analysis.device_jobs import WINDOW_SECONDS, DeviceJob, told
from tests.unit.analysis.synthetic import SyntheticJob, watch, watch_each

HEALTHY = DeviceJob()
LATE = HEALTHY.but(late={2: 0.060})
SLOW_DEVICE = HEALTHY.but(slow_device={2: 0.050})
MINUTE = round(60 / WINDOW_SECONDS)

SLOW_RANK = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,))
IMBALANCE = Verdict(Kind.DATA_IMBALANCE, "", Severity.ALARM)
FINE = Verdict(Kind.HEALTHY, "")
DOUBT = Verdict(Kind.INSUFFICIENT_DATA, "")


def changes(verdicts: Sequence[Verdict]) -> int:
    """The most changes of kind within a minute."""
    kinds = [verdict.kind for verdict in verdicts]
    changed = [before is not kind for before, kind in pairwise(kinds)]
    return max(sum(changed[start : start + MINUTE]) for start in range(len(changed)))


def test_healthy_needs_as_many_windows_as_an_alarm() -> None:
    first, second, third = watch((HEALTHY, 3))
    assert (first.kind, first.reason) == (Kind.INSUFFICIENT_DATA, "1 of 3 windows compared")
    assert (second.kind, second.reason) == (Kind.INSUFFICIENT_DATA, "2 of 3 windows compared")
    assert third.kind is Kind.HEALTHY


@pytest.mark.parametrize("fault", [LATE, SLOW_DEVICE], ids=["late host", "slow device"])
def test_a_job_slow_from_the_start_is_never_called_healthy(fault: DeviceJob) -> None:
    assert told(watch((fault, 20))) == ["insufficient_data", "slow_rank"]


@pytest.mark.parametrize("fault", [LATE, SLOW_DEVICE], ids=["late host", "slow device"])
@pytest.mark.parametrize("begins_at", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("synchronises", [True, False])
def test_the_right_finding_comes_first_and_alarms_within_15_seconds(
    fault: DeviceJob, begins_at: float, synchronises: bool
) -> None:
    before, fault = HEALTHY.but(synchronises=synchronises), fault.but(synchronises=synchronises)
    begun = fault.but(begins_at=begins_at)
    for verdicts in watch_each((before, 10), (begun, 1), (fault, 10), seeds=range(3)):
        assert told(verdicts) == ["insufficient_data", "healthy", "slow_rank"]
        assert {verdict.culprits for verdict in verdicts} == {(), (2,)}
        alarmed = next(number for number, verdict in enumerate(verdicts) if verdict.is_alarm)
        assert (alarmed + 1 - 10 - begins_at) * WINDOW_SECONDS < 15


def test_two_windows_of_a_passing_fault_are_not_uneven_data() -> None:
    verdicts = watch((HEALTHY, 6), (LATE.but(begins_at=0.5), 2), (HEALTHY, 8))
    assert not any(verdict.kind is Kind.DATA_IMBALANCE for verdict in verdicts)


def test_waiting_caused_by_one_rank_is_not_uneven_data() -> None:
    """Even where it is lost in the noise of its steps and cannot be named."""
    unknown = JobSummary(*[float("nan")] * len(JobSummary._fields))
    uneven = unknown._replace(step_seconds=0.1, mean_waited_ratio=0.3, self_spread_ratio=1.5, slowest_excess_ratio=0.05)
    assert imbalance_impact(uneven, DEFAULT_POLICY) == 0.3
    assert imbalance_impact(uneven._replace(slowest_excess_ratio=0.2), DEFAULT_POLICY) is None


def test_a_slow_rank_replaces_uneven_data_within_15_seconds() -> None:
    uneven = SyntheticJob(data=8, uneven=0.4)
    verdicts = watch((uneven, 8), (uneven.but(uneven=0.02, slow_ranks={3: 2.0}), 7))
    assert verdicts[7].kind is Kind.DATA_IMBALANCE and verdicts[7].is_alarm
    assert (verdicts[-1].kind, verdicts[-1].culprits, verdicts[-1].is_alarm) == (Kind.SLOW_RANK, (3,), True)
    assert told(verdicts)[-2:] == ["data_imbalance", "slow_rank"]


def test_an_intermittently_slow_rank_is_told_once_and_stays() -> None:
    cycle = [(LATE, 3), (HEALTHY, 9)]
    verdicts = watch((HEALTHY, 5), *(cycle * 8))
    assert changes(verdicts[3:]) <= 3
    assert told(verdicts[MINUTE:]) == ["slow_rank"]
    # When it is gone for good, so is the verdict.
    assert watch((HEALTHY, 5), *(cycle * 3), (HEALTHY, MINUTE + 5))[-1].kind is Kind.HEALTHY


def test_one_fault_that_ends_is_forgotten_within_seconds() -> None:
    assert watch((HEALTHY, 5), (LATE, 10), (HEALTHY, 6))[-1].kind is Kind.HEALTHY


class TestDoubt:
    def play(self, *phases: tuple[str, int]) -> list[Verdict]:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        verdicts: list[Verdict] = []
        for what, windows in phases:
            for _ in range(windows):
                window = HEALTHY.window(random, len(verdicts))
                columns = window.columns
                if what == "few":
                    columns = columns.take(slice(0, 2))
                elif what == "unmeasured":
                    columns = replace(columns, self_seconds=np.full(4, np.nan), wait_seconds=np.full(4, np.nan))
                verdicts.append(fleet.evaluate({"job": replace(window, columns=columns)})["job"])
        return verdicts

    def test_a_window_in_which_ranks_are_missing_changes_nothing(self) -> None:
        assert told(self.play(("all", 5), ("few", 2), ("all", 5)))[1:] == ["healthy"]

    def test_ranks_that_stay_away_are_told(self) -> None:
        verdict = self.play(("all", 5), ("few", 3))[-1]
        assert (verdict.kind, verdict.reason) == (Kind.INSUFFICIENT_DATA, "2 of 4 ranks report")

    def test_healthy_comes_back_after_as_many_windows_as_at_first(self) -> None:
        verdicts = self.play(("all", 5), ("few", 4), ("all", 3))
        assert [verdict.reason for verdict in verdicts[-3:-1]] == [f"{n} of 3 windows compared" for n in (1, 2)]
        assert verdicts[-1].kind is Kind.HEALTHY

    def test_what_is_not_measured_is_named(self) -> None:
        verdict = self.play(("unmeasured", 8))[-1]
        assert verdict.kind is Kind.INSUFFICIENT_DATA
        assert verdict.reason.startswith("waiting on others is measured on 0 of 4 ranks; ")

    @pytest.mark.parametrize("gap", [1, 4, 7, 12, 20])
    def test_intermittently_measured_waiting_keeps_the_verdict_stable(self, gap: int) -> None:
        cycle = [("unmeasured", gap), ("all", 1)]
        verdicts = self.play(("all", 4), *(cycle * (200 // gap)))
        assert changes(verdicts[3:]) <= 2
        assert told(verdicts[100:]) in (["healthy"], ["insufficient_data", "healthy"])

    @pytest.mark.parametrize(("few", "whole"), [(3, 3), (4, 5), (5, 8)])
    def test_ranks_that_come_and_go_keep_the_verdict_stable(self, few: int, whole: int) -> None:
        cycle = [("all", whole), ("few", few)]
        assert changes(self.play(("all", 5), *(cycle * 12))[3:]) <= 3


def test_after_a_hang_healthy_needs_a_comparison_of_ranks() -> None:
    fleet, random = FleetDetector(), np.random.default_rng(0)
    for number in range(5):
        fleet.evaluate({"job": HEALTHY.window(random, number)})
    window = HEALTHY.window(random, 6)
    nothing = np.full(4, np.nan)
    still: RankColumns = replace(window.columns, steps=np.zeros(4), self_seconds=nothing, step_seconds=nothing)
    stall = Stall(9.0, "communication", ("all_reduce (distributed_c10d.py:2)",), same_stack_looks=2)
    hung = replace(window, columns=still, stalls=lambda: dict.fromkeys(range(4), stall))
    assert fleet.evaluate({"job": hung})["job"].kind is Kind.HANG
    moving = [fleet.evaluate({"job": HEALTHY.window(random, 7 + number)})["job"].kind for number in range(3)]
    assert moving == [Kind.INSUFFICIENT_DATA, Kind.INSUFFICIENT_DATA, Kind.HEALTHY]


class TestDamper:
    def settle(self, *said: Verdict) -> list[Kind]:
        damper, standing = Damper(DEFAULT_POLICY), DOUBT
        kinds = []
        for verdict in said:
            standing = damper.settle(verdict, standing)
            kinds.append(standing.kind)
        return kinds

    def test_only_an_alarm_of_another_kind_replaces_an_alarm(self) -> None:
        warning, slow = replace(SLOW_RANK, severity=Severity.WARNING), Verdict(Kind.INPUT_BOUND, "", Severity.ALARM)
        assert self.settle(FINE, slow, warning, SLOW_RANK)[-2:] == [Kind.INPUT_BOUND, Kind.SLOW_RANK]

    @pytest.mark.parametrize("kind", [Kind.SLOW_RANK, Kind.SLOW_STAGE])
    def test_what_explains_uneven_data_replaces_it_at_once(self, kind: Kind) -> None:
        warning = Verdict(kind, "", Severity.WARNING, culprits=(2,))
        assert self.settle(FINE, IMBALANCE, warning)[-1] is kind
        assert self.settle(FINE, IMBALANCE, FINE, IMBALANCE, warning)[-1] is kind, "also if it has come back"
        jitter = replace(warning, kind=Kind.JITTER, culprits=())
        assert self.settle(FINE, IMBALANCE, jitter)[-1] is Kind.DATA_IMBALANCE

    def test_uneven_data_does_not_replace_a_repeatedly_named_rank(self) -> None:
        said = [FINE, SLOW_RANK, FINE, SLOW_RANK, IMBALANCE, IMBALANCE]
        assert self.settle(*said)[-2:] == [Kind.SLOW_RANK, Kind.SLOW_RANK]

    def test_a_finding_is_told_at_once_after_doubt(self) -> None:
        assert self.settle(DOUBT, SLOW_RANK)[-1] is Kind.SLOW_RANK
