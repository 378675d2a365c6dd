"""Verdicts from a few captured steps now and then, in a job whose steps are not known otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow, RankEvidence, StackProfile, columns_of
from tests.unit.analysis.synthetic import SyntheticJob

HEALTHY = SyntheticJob()
SLOW = HEALTHY.but(slow_ranks={2: 1.6})
APART = 12  # windows between two captures
SPIN = FrameSeen("spin", "train.py", 7, 0.5, 0.5, "forward")


def stacks(slow_rank: int | None = None) -> dict[int, RankEvidence]:
    usual = StackProfile(60, {"forward": 0.5, "communication": 0.5}, ())
    slow = StackProfile(60, {"forward": 1.0, "communication": 0.0}, (SPIN,))
    return {rank: RankEvidence(slow if rank == slow_rank else usual) for rank in range(4)}


def plain(job: SyntheticJob, number: int, evidence: Mapping[int, RankEvidence]) -> JobWindow:
    """Of a rank without probe: no step is known."""
    rows = [{"rank": rank} for rank in range(job.world_size)]
    return replace(job.window(np.random.default_rng(0), number, evidence), columns=columns_of(rows))


def blind(job: SyntheticJob, number: int, evidence: Mapping[int, RankEvidence]) -> JobWindow:
    """Of ranks whose probe counts steps and cannot tell what they wait for."""
    window = job.window(np.random.default_rng(0), number, evidence)
    unknown = np.full(job.world_size, np.nan)
    columns = replace(window.columns, self_seconds=unknown, wait_seconds=unknown, transfer_seconds=unknown)
    return replace(window, columns=columns)


def watch(
    *captures: SyntheticJob,
    steps: int = 5,
    seed: int = 0,
    after: int = 0,
    evidence: Mapping[int, RankEvidence] | None = None,
    between: Callable[[SyntheticJob, int, Mapping[int, RankEvidence]], JobWindow] = plain,
) -> Iterator[Verdict]:
    """The verdict after each capture, and then after each of so many windows more."""
    random, fleet = np.random.default_rng(seed), FleetDetector()
    number = 0
    seen = evidence if evidence is not None else stacks()
    for job in captures:
        for _ in range(APART - 1):
            fleet.evaluate({"job": between(job, number, seen)})
            number += 1
        window = replace(job.but(steps=steps).window(random, number, seen), is_captured=True)
        number += 1
        yield fleet.evaluate({"job": window})["job"]
    for _ in range(after):
        yield fleet.evaluate({"job": between(HEALTHY, number, seen)})["job"]
        number += 1


@pytest.mark.parametrize(("steps", "captures"), [(5, 6), (10, 4), (2, 14)])
def test_enough_captured_steps_name_a_slow_rank_with_low_confidence(steps: int, captures: int) -> None:
    verdicts = list(watch(*[SLOW] * captures, steps=steps))
    assert (verdicts[-1].kind, verdicts[-1].culprits) == (Kind.SLOW_RANK, (2,))
    assert (verdicts[-1].severity, verdicts[-1].confidence) == (Severity.ALARM, Confidence.LOW)
    assert verdicts[-1].reason.endswith("(in captured steps)")
    assert not any(verdict.is_alarm for verdict in verdicts[:-1])


@pytest.mark.parametrize("steps", [2, 5])
def test_a_healthy_job_stays_silent(steps: int) -> None:
    for seed in range(5):
        kinds = [verdict.kind for verdict in watch(*[HEALTHY] * 16, steps=steps, seed=seed)]
        assert {*kinds[14:]} == {Kind.HEALTHY}
        assert {*kinds[:3]} == {Kind.INSUFFICIENT_DATA}, "before 20 steps are captured"
        assert {*kinds} == {Kind.HEALTHY, Kind.INSUFFICIENT_DATA}


def test_one_bad_capture_is_no_evidence_for_later_windows() -> None:
    verdicts = list(watch(*[HEALTHY] * 6, SLOW, after=APART, evidence=stacks()))
    assert {verdict.kind for verdict in verdicts[6:]} == {Kind.HEALTHY}


def test_captured_findings_stand_between_captures_and_then_expire() -> None:
    verdicts = list(watch(*[SLOW] * 6, after=4 * APART))
    between, after = verdicts[6 : 6 + 2 * APART], verdicts[6 + 4 * APART - 5 :]
    assert {verdict.kind for verdict in between} == {Kind.SLOW_RANK}
    assert {verdict.kind for verdict in after} == {Kind.INSUFFICIENT_DATA}  # equal stacks show nothing


def test_a_rank_that_recovers_is_let_go_by_later_captures() -> None:
    assert [*watch(*[SLOW] * 6, *[HEALTHY] * 5)][-1].kind is Kind.HEALTHY


def test_stacks_are_judged_alone_while_captures_find_nothing() -> None:
    *_, first, last = watch(HEALTHY, after=2, evidence=stacks(slow_rank=1))
    for verdict in (first, last):
        assert (verdict.kind, verdict.culprits, verdict.confidence) == (Kind.SLOW_RANK, (1,), Confidence.LOW)


def test_captures_alone_judge_a_job_without_stacks() -> None:
    *_, last = watch(*[HEALTHY] * 6, after=2, evidence={})
    assert (last.kind, last.confidence) == (Kind.HEALTHY, Confidence.LOW)
    *_, early = watch(*[HEALTHY] * 3, after=2, evidence={})
    assert early.kind is Kind.INSUFFICIENT_DATA
    *_, soon = watch(*[HEALTHY] * 5, after=2, evidence={})
    assert (soon.kind, soon.reason) == (Kind.INSUFFICIENT_DATA, "2 of 3 windows compared (in captured steps)")


def test_the_cause_comes_from_stacks_around_a_capture() -> None:
    no_phases = {f"{phase}_seconds": np.nan for phase in ("input", "forward", "backward", "optimizer", "other")}
    only_self = dict.fromkeys(range(4), no_phases)
    *_, last = watch(*[SLOW.but(extra=only_self)] * 6, evidence=stacks(slow_rank=2))
    assert (last.kind, last.cause.phase) == (Kind.SLOW_RANK, "forward")
    assert [frame.function for frame in last.cause.frames] == ["spin"]


@pytest.mark.parametrize(("steps", "captures", "between"), [(5, 6, 20), (2, 14, 20), (5, 6, 3)])
def test_captures_judge_ranks_whose_probe_cannot_measure_waiting(steps: int, captures: int, between: int) -> None:
    """Also where a window holds fewer steps than are compared."""

    def window(job: SyntheticJob, number: int, evidence: Mapping[int, RankEvidence]) -> JobWindow:
        return blind(job.but(steps=between), number, evidence)

    verdicts = list(watch(*[SLOW] * captures, steps=steps, after=7 * APART, between=window))
    named, after = verdicts[captures - 1 : captures + 2 * APART], verdicts[-5:]
    assert {(verdict.kind, verdict.culprits, verdict.confidence) for verdict in named} == {
        (Kind.SLOW_RANK, (2,), Confidence.LOW)
    }
    assert all(verdict.reason.endswith("(in captured steps)") for verdict in named)
    assert {verdict.kind for verdict in after} == {Kind.HEALTHY}  # by stacks
    assert not any(verdict.is_alarm for verdict in verdicts[: captures - 1])
    healthy = list(watch(*[HEALTHY] * captures, steps=steps, after=APART, between=window, evidence={}))
    assert {verdict.kind for verdict in healthy[captures:]} == {Kind.HEALTHY}


def test_a_blind_job_without_captures_counts_ranks_with_measured_waiting() -> None:
    fleet = FleetDetector()
    for number in range(5):
        verdict = fleet.evaluate({"job": blind(HEALTHY, number, {})})["job"]
    assert verdict.kind is Kind.INSUFFICIENT_DATA
    assert verdict.reason.startswith("waiting on others is measured on 0 of 4 ranks")
