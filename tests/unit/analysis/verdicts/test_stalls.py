"""A loss that sits in few steps: one rank often, one rank rarely, another one each time, all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Kind, Severity, headline
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow, RankEvidence, StackProfile
from tests.unit.analysis.stalling_job import ALL, WINDOW_SECONDS, StallingJob, Stalls, watch

SIZES = pytest.mark.parametrize("ranks", [4, 64, 1024])


def one_rank(rank: int, every: int, seconds: float) -> Stalls:
    return lambda step, random: {rank: seconds} if step % every == 0 else {}


def another_rank(ranks: int, share: float, seconds: float) -> Stalls:
    return lambda step, random: {int(random.integers(ranks)): seconds} if random.random() < share else {}


def together(every: int, seconds: float) -> Stalls:
    return one_rank(ALL, every, seconds)


@SIZES
def test_stalls_of_one_rank_in_every_tenth_step(ranks: int) -> None:
    verdicts = watch(StallingJob(one_rank(2, 10, 0.6), ranks), 20)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}
    last = verdicts[-1]
    assert (last.kind, last.severity) == (Kind.SLOW_RANK, Severity.ALARM)
    assert last.impact_ratio == pytest.approx(0.6 / (0.6 + 10 * 0.022), abs=0.03)
    assert headline(last) == "rank 2 stalls in every 10th step for 600 ms"
    assert next(n for n, verdict in enumerate(verdicts) if verdict.is_alarm) <= 5


@SIZES
def test_rare_stalls_of_one_rank(ranks: int) -> None:
    verdicts = watch(StallingJob(one_rank(2, 100, 3.0), ranks), 30)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}
    assert headline(verdicts[-1]) == "rank 2 stalls in every 100th step for 3.0 s"
    assert verdicts[-1].impact_ratio == pytest.approx(3 / (3 + 100 * 0.022), abs=0.03)


def test_a_rank_that_sleeps_where_all_queue_only_stalls() -> None:
    verdicts = watch(StallingJob(one_rank(2, 100, 3.0), starved_seconds=0.006), 30)
    assert {headline(one) for one in verdicts if one.kind.is_finding} <= {
        f"rank 2 stalls in every {often} step for 3.0 s" for often in ("90th", "100th", "110th")
    }


def test_stalls_that_were_not_measured_count_as_the_others() -> None:
    job = StallingJob(one_rank(2, 100, 3.0), measured=lambda step: step % 3 == 0)
    verdicts = watch(job, 80)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}
    assert all(headline(verdict) == "healthy" for verdict in verdicts if verdict.kind is Kind.HEALTHY)
    assert headline(verdicts[-1]) == "rank 2 stalls in every 100th step for 3.0 s"
    assert verdicts[-1].impact_ratio == pytest.approx(3 / (3 + 100 * 0.022), abs=0.05)


def test_stalls_outside_of_backward_need_no_measured_wait() -> None:
    """On a CPU, where DDP measures few steps."""
    job = StallingJob(one_rank(2, 100, 3.0), measured=lambda step: step % 7 == 0, backward_seconds=0.010)
    verdicts = watch(job, 30)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}
    assert headline(verdicts[-1]).endswith("0th step for 3.0 s")
    assert verdicts[-1].impact_ratio == pytest.approx(3 / (3 + 100 * 0.022), abs=0.06)


def test_stalls_of_unknown_ranks_are_nobodys() -> None:
    """No backward pass is timed."""
    job = StallingJob(one_rank(2, 100, 3.0), measured=lambda step: step % 7 == 1)
    assert headline(watch(job, 30)[-1]) == "healthy"


@pytest.mark.parametrize(("ranks", "seed"), [(4, 0), (4, 1), (4, 2), (64, 0), (64, 1), (1024, 0)])
def test_stalls_that_move_name_no_rank(ranks: int, seed: int) -> None:
    verdicts = watch(StallingJob(another_rank(ranks, 0.05, 0.2), ranks), 40, seed)
    assert all(verdict.culprits == () for verdict in verdicts)
    last = verdicts[-1]
    assert (last.kind, last.severity) == (Kind.JITTER, Severity.ALARM)
    assert last.impact_ratio == pytest.approx(0.01 / (0.01 + 0.022), abs=0.06)
    assert headline(last) == "ranks stall in turn; no rank is to blame"


@pytest.mark.parametrize("seed", range(8))
def test_stalls_that_move_between_two_ranks(seed: int) -> None:
    verdicts = watch(StallingJob(another_rank(2, 0.05, 0.2), 2), 40, seed)
    assert all(verdict.culprits == () for verdict in verdicts)
    assert verdicts[-1].kind is Kind.JITTER


@SIZES
def test_stalls_of_all_ranks_together_are_only_mentioned(ranks: int) -> None:
    verdicts = watch(StallingJob(together(50, 1.0), ranks), 30)
    assert not any(verdict.kind.is_finding for verdict in verdicts)
    said = headline(verdicts[-1])
    assert said.startswith("healthy; all ranks together stall in every 50th step for 1.0 s, 4")


def test_stalls_together_are_not_mentioned_beside_larger_losses() -> None:
    """Short ones of all ranks, and of one rank long ones of which most are not measured."""
    every, one = together(20, 0.05), one_rank(2, 100, 3.0)
    job = StallingJob(lambda step, random: {**every(step, random), **one(step, random)}, measured=lambda s: s % 100 > 0)
    assert not any("together" in headline(verdict) for verdict in watch(job, 30)[10:])


def test_long_first_steps_of_a_job_are_no_stalls() -> None:
    """It compiles, on all ranks for different times."""

    def stalls(step: int, random: np.random.Generator) -> Mapping[int, float]:
        first = {rank: float(random.uniform(0.1, 0.3)) for rank in range(4)} if step in (20, 25, 30) else {}
        return first or one_rank(2, 10, 0.6)(step - 500, random) if step >= 500 or first else {}

    verdicts = watch(StallingJob(stalls), 20)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}
    assert headline(verdicts[-1]) == "rank 2 stalls in every 10th step for 600 ms"


def test_stalls_together_that_were_not_measured_are_mentioned_too() -> None:
    verdicts = watch(StallingJob(together(50, 1.0), measured=lambda step: step % 3 == 0), 60)
    assert headline(verdicts[-1]).startswith("healthy; all ranks together stall in every 50th step for 1.0 s, 4")


def test_a_checkpoint_of_one_rank_is_no_stall_of_it() -> None:
    job = StallingJob(one_rank(0, 100, 1.0), are_checkpoints=True)
    verdicts = watch(job, 40)
    assert not any(verdict.kind.is_finding for verdict in verdicts)
    assert "together stall in every 100th step for 1.0 s" in headline(verdicts[-1])


@pytest.mark.parametrize("ranks", [4, 64])
@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_job_may_stall_now_and_then(ranks: int, seed: int) -> None:
    verdicts = watch(StallingJob(another_rank(ranks, 0.002, 0.1), ranks), 60, seed)
    assert not any(verdict.kind.is_finding for verdict in verdicts)
    assert headline(verdicts[-1]) == "healthy"


def test_a_finding_ends_some_gaps_after_the_last_stall() -> None:
    verdicts = watch(StallingJob(lambda step, random: {2: 0.6} if step % 10 == 0 and step < 400 else {}), 40)
    assert verdicts[15].culprits == (2,)
    assert verdicts[-1].kind is Kind.HEALTHY


def test_a_rank_that_stalls_most_is_named() -> None:
    def stalls(step: int, random: np.random.Generator) -> Mapping[int, float]:
        if step % 20 == 0:
            return {2: 0.4}
        return {int(random.integers(8)): 0.03} if random.random() < 0.03 else {}

    verdicts = watch(StallingJob(stalls, 8), 30)
    assert {verdict.culprits for verdict in verdicts if verdict.kind.is_finding} == {(2,)}


def test_two_ranks_that_stall_together_are_both_named() -> None:
    verdicts = watch(StallingJob(lambda step, random: {4: 0.5, 5: 0.5} if step % 20 == 0 else {}, 8), 20)
    assert verdicts[-1].culprits == (4, 5)
    assert verdicts[-1].impact_ratio == pytest.approx(0.5 / (0.5 + 20 * 0.022), abs=0.03)


def recordings(late: Mapping[int, float], end: float) -> Mapping[int, RankEvidence]:
    """A recording of every window. In a stall, a rank is in `collect`."""
    made = {}
    for rank, seconds in late.items():
        share = min(1.0, seconds / WINDOW_SECONDS)
        shares = {"train": (1.0, 1.0 - share), "collect": (share, share)}
        frames = tuple(FrameSeen(name, f"/job/{name}.py", 7, *both, "other") for name, both in shares.items())
        made[rank] = RankEvidence(StackProfile(100, {"other": 1.0}, frames, WINDOW_SECONDS, end))
    return made


@pytest.mark.parametrize("first", [1, 1000], ids=["from-the-start", "later"])
def test_the_line_that_stalls_share_is_named(first: int) -> None:
    moving = another_rank(4, 0.05, 0.2)
    job = StallingJob(lambda step, random: moving(step, random) if step >= first else {}, evidence=recordings)
    assert headline(watch(job, 50)[-1]) == "ranks stall in turn, in collect (collect.py:7); no rank is to blame"


def test_the_line_of_stalls_of_all_ranks_is_mentioned() -> None:
    every = together(50, 1.0)
    job = StallingJob(lambda step, random: every(step, random) if step >= 1000 else {}, evidence=recordings)
    assert headline(watch(job, 50)[-1]).endswith("47 % of the time, in other at collect.py:7 (collect)")


@pytest.mark.parametrize(("silent", "culprits"), [(0, (2,)), (2, ())])
def test_a_rank_that_never_tells_hides_only_itself(silent: int, culprits: tuple[int, ...]) -> None:
    fleet = FleetDetector()
    for window in StallingJob(one_rank(2, 10, 0.6)).windows(12):
        window.columns.late_seconds[silent] = np.nan
        verdict = fleet.evaluate({"job": window})["job"]
    assert verdict.culprits == culprits
    assert culprits or headline(verdict) == "healthy"


@pytest.mark.parametrize(("samples", "seconds"), [(0, 2.0), (1, 1e12), (100, 0.0)])
def test_absurd_recordings_of_stalls_name_no_line(samples: int, seconds: float) -> None:
    def absurd(late: Mapping[int, float], end: float) -> Mapping[int, RankEvidence]:
        made = recordings(late, end)
        if sum(late.values()) == 0:
            return made
        frame = FrameSeen("collect", "/job/collect.py", 7, float("nan"), float("inf"), "other")
        return {rank: RankEvidence(StackProfile(samples, {}, (frame,), seconds, end)) for rank in made}

    moving = another_rank(4, 0.05, 0.2)
    job = StallingJob(lambda step, random: moving(step, random) if step >= 1000 else {}, evidence=absurd)
    assert headline(watch(job, 50)[-1]).startswith("ranks stall in turn")


@pytest.mark.parametrize("ranks", [4, 64])
def test_a_stall_between_two_windows_is_one_stall(ranks: int) -> None:
    """The step ends in one window on some ranks and in the next on others. All stall together, and nobody in turn."""
    fleet = FleetDetector()
    windows = list(StallingJob(together(50, 1.0), ranks).windows(40))
    for first, second in pairwise(windows[5:]):
        if first.columns.long_seconds[0] > 0 and not second.columns.long_seconds[0] > 0:
            _move_long_steps(first, second, of=slice(0, None, 3))
    verdicts = [fleet.evaluate({"job": window})["job"] for window in windows]
    assert not any(verdict.kind.is_finding for verdict in verdicts)
    assert headline(verdicts[-1]).startswith("healthy; all ranks together stall in every 50th step for 1.0 s")


def _move_long_steps(first: JobWindow, second: JobWindow, of: slice) -> None:
    """To the next window, on some of the ranks."""
    for name in ("long_seconds", "late_seconds", "long_ratio", "late_ratio"):
        before, after = getattr(first.columns, name), getattr(second.columns, name)
        after[of] = before[of] * first.columns.steps[of] / second.columns.steps[of]
        before[of] = np.nan
    moved = second.columns.long_seconds[of]
    second.columns.step_seconds[of] += moved
    first.columns.step_seconds[of] -= moved * second.columns.steps[of] / first.columns.steps[of]
