"""A rank that trains alone, against its own past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity, headline
from rankscope.analysis.verdicts.windows import FrameSeen, GpuEvidence, JobWindow, RankEvidence, StackProfile
from tests.unit.analysis.synthetic import SyntheticJob, watch, watch_each

ALONE = SyntheticJob(data=1)
SLOW = ALONE.but(slow_ranks={0: 1.6})
SETTLED = 15  # windows
CALM = {Kind.HEALTHY, Kind.INSUFFICIENT_DATA}


@pytest.mark.parametrize("uneven", [0.0, 0.4])
def test_a_steady_rank_alone_is_never_slow(uneven: float) -> None:
    for verdicts in watch_each((ALONE.but(uneven=uneven), 100), seeds=range(10)):
        assert {verdict.kind for verdict in verdicts} <= CALM


def test_a_rank_alone_that_becomes_slower_is_a_warning() -> None:
    verdicts = watch((ALONE, SETTLED), (SLOW, 10))
    assert {verdict.kind for verdict in verdicts[:SETTLED]} <= CALM
    verdict = verdicts[-1]
    assert (verdict.kind, verdict.culprits, verdict.severity) == (Kind.SLOW_RANK, (0,), Severity.WARNING)
    assert verdict.cause.phase == "forward" and verdict.cause.evidence.endswith(" a step more forward than earlier")
    assert "of own work a step against 50.0 ms earlier in the run" in verdict.reason
    # 50 ms became 80: without it the step of 85 would be 55 again.
    assert verdict.impact_ratio == pytest.approx(30 / 85, abs=0.03)


def test_it_ends_when_the_rank_is_as_before() -> None:
    verdicts = watch((ALONE, SETTLED), (SLOW, 40), (ALONE, 10))
    assert verdicts[-11].kind is Kind.SLOW_RANK and verdicts[-1].kind is Kind.HEALTHY


@pytest.mark.parametrize("factor", [0.5, 1.15])
def test_a_little_slower_or_faster_is_nothing(factor: float) -> None:
    verdicts = watch((ALONE, SETTLED), (ALONE.but(slow_ranks={0: factor}), 30))
    assert {verdict.kind for verdict in verdicts} <= CALM


def test_a_slow_beginning_is_the_past_of_nothing() -> None:
    """Compilation and warm-up are over before the usual pace is known, and a fast start is no promise."""
    for factor in (0.5, 2.0):
        verdicts = watch((ALONE.but(slow_ranks={0: factor}), 4), (ALONE, 40))
        assert {verdict.kind for verdict in verdicts} <= CALM


def test_a_neighbour_that_takes_the_cpu_is_the_cause() -> None:
    starved = ALONE.but(slow_ranks={0: 2.0}, extra={0: {"starved_seconds": 0.055}})
    verdict = watch((ALONE, SETTLED), (starved, 10))[-1]
    assert verdict.kind is Kind.SLOW_RANK and verdict.cause.phase == "starved"
    assert "55.0 ms a step more without a CPU than earlier" in verdict.cause.evidence


@dataclass(frozen=True)
class Seen:
    """A job with what is seen of it while it behaves so."""

    job: SyntheticJob
    evidence: Mapping[int, RankEvidence]

    def window(self, random: np.random.Generator, number: int = 0, evidence: object = None) -> JobWindow:
        return self.job.window(random, number, self.evidence)


def stacks(share: float) -> Mapping[int, RankEvidence]:
    load = FrameSeen("load", "/job/data.py", 88, share, share, "other")
    step = FrameSeen("step", "/job/train.py", 20, 1.0, 1.0 - share, "forward")
    profile = StackProfile(20, {"other": share, "forward": 1.0 - share}, (load, step), 2.0)
    return {0: RankEvidence(stacks=profile)}


def test_the_line_that_takes_more_than_earlier_is_named() -> None:
    slow = SLOW.but(excess_phase="other")
    verdict = watch((Seen(ALONE, stacks(0.05)), SETTLED), (Seen(slow, stacks(0.4)), 60))[-1]
    assert headline(verdict).startswith("rank 0 is slow because of data.py:88 (load")
    assert "earlier 5 %" in verdict.cause.evidence


def test_a_gpu_that_clocks_down_is_the_cause() -> None:
    def gpu(megahertz: float, share: float) -> Mapping[int, RankEvidence]:
        return {0: RankEvidence(gpu=GpuEvidence(megahertz * 1e6, 1.98e9, 1.0, {"hw_thermal": share}))}

    fast, slow = Seen(ALONE, gpu(1900, 0.0)), Seen(SLOW, gpu(1200, 0.9))
    verdict = watch((fast, SETTLED), (slow, 10))[-1]
    assert verdict.cause.phase == "throttled"
    assert verdict.cause.evidence == "GPU at 1,200 of 1,980 MHz, hw_thermal 90% of the time; earlier at 1,900 MHz"
