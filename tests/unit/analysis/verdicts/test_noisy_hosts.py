"""Ranks that share CPUs, by the host's clock: what a busy machine does to a rank is no fault of the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.windows import JobWindow, RankEvidence, columns_of
from tests.unit.analysis.synthetic import SyntheticJob, watch, watch_each

PAIR = SyntheticJob(data=2)
WINDOW_SECONDS = 2.0


def is_slow(verdict: Verdict, rank: int) -> bool:
    return (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (rank,))


def queueing(job: SyntheticJob, seconds: float) -> SyntheticJob:
    """Every rank also queues for a CPU for so long in each step."""
    total = job.self_seconds + seconds
    factors = {rank: (factor * job.self_seconds + seconds) / total for rank, factor in job.slow_ranks.items()}
    extra = {rank: {"starved_seconds": seconds} for rank in range(job.world_size)}
    return job.but(self_seconds=total, slow_ranks=factors, extra=extra)


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_excess_must_exceed_part_of_what_ranks_queue(ranks: int) -> None:
    a_little_slow, slow = (SyntheticJob(data=ranks, slow_ranks={1: factor}) for factor in (1.14, 1.30))
    assert is_slow(watch((a_little_slow, 8))[-1], 1)
    assert not any(v.kind.is_finding for v in watch((queueing(a_little_slow, 0.030), 8)))
    assert is_slow(watch((queueing(slow, 0.030), 8))[-1], 1)


def test_less_than_a_millisecond_of_a_host_is_noise() -> None:
    small = PAIR.but(self_seconds=0.003, transfer_seconds=0.001, noise=0.005)
    assert not any(v.kind.is_finding for v in watch((small.but(slow_ranks={0: 1.27}), 8)))
    assert is_slow(watch((small.but(slow_ranks={0: 1.5}), 8))[-1], 0)


@dataclass(frozen=True)
class VaryingJob:
    """From window to window, the work of each rank varies by chance, by so much of it: neighbours come and go."""

    job: SyntheticJob
    variation: float

    def window(
        self, random: np.random.Generator, number: int = 0, evidence: dict[int, RankEvidence] | None = None
    ) -> JobWindow:
        factors = 1 + self.variation * random.standard_normal(self.job.world_size)
        slow = {rank: self.job.slow_ranks.get(rank, 1.0) * max(factor, 0.1) for rank, factor in enumerate(factors)}
        return self.job.but(slow_ranks=slow).window(random, number, evidence)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_that_vary_from_window_to_window_are_not_slow(ranks: int) -> None:
    job = VaryingJob(SyntheticJob(data=ranks), variation=0.15)
    verdicts = [verdict for each in watch_each((job, 60), seeds=range(5)) for verdict in each]
    assert not any(verdict.kind is Kind.SLOW_RANK for verdict in verdicts)


def test_a_slow_rank_is_found_among_ranks_that_vary() -> None:
    job = VaryingJob(PAIR, variation=0.10)
    verdicts = watch((job, 10), (VaryingJob(PAIR.but(slow_ranks={1: 1.8}), variation=0.10), 8), seed=1)
    assert is_slow(verdicts[-1], 1) and verdicts[-1].is_alarm


@pytest.mark.parametrize(("ranks", "windows"), [(2, 5), (3, 3)])
def test_a_rank_is_slow_once_windows_show_their_noise(ranks: int, windows: int) -> None:
    verdicts = watch((SyntheticJob(data=ranks, slow_ranks={1: 1.5}), windows))
    assert not any(verdict.kind.is_finding for verdict in verdicts[:-1])
    assert is_slow(verdicts[-1], 1)


@dataclass(frozen=True)
class QueueingRank:
    """Rank 2 queues for a CPU in the windows listed, and its peers a little in all."""

    windows: Sequence[int]
    peers_seconds: float = 0.010
    job: SyntheticJob = field(default_factory=SyntheticJob)

    def window(
        self, random: np.random.Generator, number: int = 0, evidence: dict[int, RankEvidence] | None = None
    ) -> JobWindow:
        queued = dict.fromkeys(range(self.job.world_size), self.peers_seconds)
        if number in self.windows:
            queued[2] = 0.120
        total = {rank: 1 + seconds / self.job.self_seconds for rank, seconds in queued.items()}
        extra = {rank: {"starved_seconds": seconds} for rank, seconds in queued.items()}
        return self.job.but(slow_ranks=total, extra=extra).window(random, number, evidence)


def test_queueing_for_seconds_on_a_contended_machine_is_not_starvation() -> None:
    assert not any(v.kind.is_finding for v in watch((QueueingRank(range(5, 9)), 14)))
    alone = watch((QueueingRank(range(5, 9), peers_seconds=0.0), 9))[-1]
    assert is_slow(alone, 2) and alone.cause.phase == "starved"


def test_queueing_all_the_time_on_a_contended_machine_is_starvation() -> None:
    verdict = watch((QueueingRank(range(5, 20)), 12))[-1]
    assert is_slow(verdict, 2) and verdict.is_alarm and verdict.cause.phase == "starved"


def test_queueing_of_all_ranks_is_not_the_cause_of_one() -> None:
    job = queueing(SyntheticJob(slow_ranks={1: 1.6}), 0.030)
    long_steps = {"long_seconds": 0.004, "late_seconds": 0.002, "long_ratio": 0.05, "late_ratio": 0.02}
    noisy = job.but(extra={rank: {**figures, **long_steps} for rank, figures in job.extra.items()})
    verdict = watch((noisy, 8))[-1]
    assert is_slow(verdict, 1) and verdict.cause.phase == "forward"


def window(number: int, steps: int, slow_seconds: float = 0.0, departed: tuple[int, ...] = ()) -> JobWindow:
    rows = [
        {
            "rank": rank,
            "steps": steps,
            "step_seconds": 0.050 + slow_seconds,
            "self_seconds": 0.045 + (slow_seconds if rank == 0 else 0.0),
            "wait_seconds": 0.005 + (slow_seconds if rank else 0.0),
            "transfer_seconds": 0.004,
            "self_spread_ratio": 1.05,
            "starved_seconds": 0.0,
        }
        for rank in range(8)
        if rank not in departed
    ]
    return JobWindow(1000.0 + WINDOW_SECONDS * number, WINDOW_SECONDS, 8, columns_of(rows), departed=departed)


def last_verdict(*windows: JobWindow) -> Verdict:
    fleet = FleetDetector()
    return [fleet.evaluate({"job": each})["job"] for each in windows][-1]


FULL = [window(number, 40) for number in range(6)]


def test_windows_that_steps_hardly_fill_show_no_slow_rank() -> None:
    few = [window(number, 10, slow_seconds=0.020) for number in range(6, 12)]
    assert last_verdict(*FULL, *few).kind is Kind.HEALTHY
    many = [replace(each, columns=replace(each.columns, steps=3 * each.columns.steps)) for each in few]
    assert is_slow(last_verdict(*FULL, *many), 0)


def test_windows_after_a_rank_died_show_no_slow_rank() -> None:
    dying = [window(number, 28, slow_seconds=0.020, departed=(3,)) for number in range(6, 12)]
    assert last_verdict(*FULL, *dying).kind is Kind.HEALTHY


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("windows", [1, 2, 3, 4, 6])
def test_a_rank_that_is_back_is_not_slow_again(ranks: int, windows: int) -> None:
    """The windows of the fault are remembered for longer than it lasts."""
    healthy = SyntheticJob(data=ranks)
    verdicts = watch((healthy, 10), (healthy.but(slow_ranks={1: 1.6}), windows), (healthy, 12))
    is_slow_in = [verdict.kind is Kind.SLOW_RANK for verdict in verdicts]
    begins = [number for number, slow in enumerate(is_slow_in) if slow and not is_slow_in[number - 1]]
    assert all(10 <= number < 10 + windows for number in begins), is_slow_in
    assert len(begins) == (1 if windows >= 3 else len(begins))
    assert not is_slow_in[-1]
