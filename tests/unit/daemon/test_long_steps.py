"""Which steps of a rank are long, and what it did in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rankscope.analysis.stats.long_steps import find_long
from rankscope.daemon.samples import LongSteps
from rankscope.daemon.steps.long_steps import RecentSteps, bound_waits, sum_up
from rankscope.daemon.windows.window import window_columns
from rankscope.v1 import window_pb2
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.test_window_columns import row_of

USUAL, WAIT = 0.020, 0.002


def steps(count: int, **long: float) -> np.ndarray:
    """So many usual steps; `s3=0.6` lets the step of index 3 take as much longer."""
    made = np.full(count, USUAL)
    for name, seconds in long.items():
        made[int(name[1:])] += seconds
    return made


def found(step_seconds: np.ndarray, more_wait: Sequence[tuple[int, float]] = (), **columns: np.ndarray) -> LongSteps:
    wait = np.full(len(step_seconds), WAIT)
    for index, seconds in more_wait:
        wait[index] += seconds
    checkpoint = columns.get("checkpoint", np.zeros(len(step_seconds)))
    before = RecentSteps()
    return sum_up(
        find_long(before.step_seconds, step_seconds),
        before,
        step_seconds,
        columns.get("wait", wait),
        checkpoint,
        columns.get("ahead"),
    )


def test_a_step_is_long_from_twice_the_usual_on() -> None:
    made = steps(64, s3=0.6, s10=USUAL * 0.9, s20=USUAL * 1.1)
    assert np.flatnonzero(find_long(np.empty(0), made)).tolist() == [3, 20]


def test_short_steps_vary_by_as_much() -> None:
    made = np.full(64, 0.004)
    made[5], made[9] = 0.012, 0.015
    assert np.flatnonzero(find_long(np.empty(0), made)).tolist() == [9]


def test_stalls_are_long_beside_steps_that_vary() -> None:
    """HF Trainer's steps take twice the median in one of six; stalls of 600 ms come in addition."""
    made = steps(64)
    made[::6] *= 2.2
    made[5::10] += 0.6
    assert np.flatnonzero(find_long(np.empty(0), made)).tolist() == [5, 15, 25, 35, 45, 55]


def test_where_many_steps_are_long_that_is_usual() -> None:
    made = steps(60)
    made[::4] += 0.6
    assert not find_long(np.empty(0), made).any()
    before = RecentSteps().followed_by(steps(64), np.full(64, WAIT), np.full(64, WAIT))
    assert not find_long(before.step_seconds, steps(30) * 3).any()  # it has become slower


def test_a_window_of_few_steps_is_compared_with_those_before() -> None:
    before = RecentSteps().followed_by(steps(64), np.full(64, WAIT), np.full(64, WAIT))
    assert find_long(before.step_seconds, steps(2, s1=3.0)).tolist() == [False, True]
    assert not find_long(np.empty(0), steps(2, s1=3.0)).any()


def test_a_rank_that_waits_as_long_is_not_late() -> None:
    victim = found(steps(64, s3=0.6), [(3, 0.6)])
    assert (victim.steps, victim.late_steps) == (1, 0)
    assert (victim.seconds, victim.waited_seconds) == (pytest.approx(0.6), pytest.approx(0.6))
    culprit = found(steps(64, s3=0.6))
    assert (culprit.late_steps, culprit.waited_seconds) == (1, pytest.approx(0.0))


def test_a_wait_may_end_in_the_next_step() -> None:
    assert found(steps(64, s3=0.6), [(4, 0.6)]).late_steps == 0
    # Unless that one is long itself: then it is the wait for another rank.
    one_after_the_other = found(steps(64, s3=0.6, s4=0.6), [(4, 0.6)])
    assert (one_after_the_other.late_steps, one_after_the_other.waited_seconds) == (1, pytest.approx(0.6))


def test_a_checkpoint_does_not_make_a_rank_late() -> None:
    checkpoint = np.zeros(64)
    checkpoint[3] = 0.6
    made = found(steps(64, s3=0.6), checkpoint=checkpoint)
    assert (made.late_steps, made.checkpoint_seconds) == (0, pytest.approx(0.6))


def test_the_other_steps_have_means_of_their_own() -> None:
    made = found(steps(64, s3=0.6), [(3, 0.6)])
    assert made.usual_wait_seconds == pytest.approx(WAIT)
    assert made.usual_self_seconds == pytest.approx(USUAL - WAIT)


def test_where_waiting_was_not_measured_nobody_is_late() -> None:
    wait = np.full(64, WAIT)
    wait[3] = np.nan
    made = found(steps(64, s3=0.6), wait=wait)
    assert (made.steps, made.waited_seconds, made.late_steps) == (1, None, 0)
    wait[[3, 20]] = np.nan, WAIT + 0.6
    assert found(steps(64, s3=0.6, s20=0.6), wait=wait).waited_seconds == pytest.approx(1.2)  # as in the other one
    assert found(steps(64, s3=3.0, s20=0.6), wait=wait).waited_seconds is None  # that is too little of it


def test_a_device_that_stalls_lets_its_host_get_ahead() -> None:
    ahead = np.full(64, 0.1)
    assert found(steps(64, s3=0.6), ahead=ahead).late_ahead_seconds == pytest.approx(0.0)
    ahead[4] += 0.6
    assert found(steps(64, s3=0.6), ahead=ahead).late_ahead_seconds == pytest.approx(0.6)


def test_figures_of_a_window_are_those_of_usual_steps() -> None:
    statistics = window_pb2.StepStatistics
    window = window_pb2.RankWindow(
        steps=10,
        step_seconds=statistics(mean=0.08),
        self_seconds=statistics(mean=0.078, p10=0.01, p90=0.02),
        wait_seconds=statistics(mean=0.002),
        long_steps=window_pb2.LongSteps(
            steps=1, seconds=0.6, waited_seconds=0.0, late_steps=1, usual_self_seconds=0.018, usual_wait_seconds=0.002
        ),
    )
    row = row_of(window_columns([window], make.span()))
    assert row["step_seconds"] == 0.08 and row["self_seconds"] == 0.018
    assert row["long_seconds"] == row["late_seconds"] == pytest.approx(0.06)
    assert row["long_ratio"] == row["late_ratio"] == pytest.approx(0.1)


def test_a_long_step_with_usual_backward_is_own_time() -> None:
    """Its wait was not measured. Where backward is as much longer, it may have waited there."""
    made, unknown = steps(64, s3=0.6, s20=0.6), np.full(64, np.nan)
    is_long, backward = find_long(np.empty(0), made), np.full(64, 0.010)
    backward[20] += 0.6
    wait = bound_waits(is_long, RecentSteps(), made, unknown, backward)
    assert wait[3] == 0.0 and np.isnan(np.delete(wait, 3)).all()
    assert np.isnan(bound_waits(is_long, RecentSteps(), made, unknown, unknown)).all()


def test_measured_waits_are_kept_beside_bounds() -> None:
    made = steps(64, s3=0.6)
    wait = np.full(64, WAIT)
    is_long = find_long(np.empty(0), made)
    assert (bound_waits(is_long, RecentSteps(), made, wait, np.full(64, 0.010)) == wait).all()


def test_steps_that_have_become_slow_are_not_long() -> None:
    """A rank slows down in each step: its first slow steps are rare among the last ones, but come in a row."""
    before = RecentSteps().followed_by(steps(64), np.full(64, WAIT), np.full(64, np.nan))
    slow = np.full(2, USUAL + 0.6)
    assert find_long(before.step_seconds, slow).all()
    before = before.followed_by(slow, np.full(2, WAIT), np.full(2, np.nan))
    assert not find_long(before.step_seconds, slow).any()
    assert not find_long(before.step_seconds, np.full(9, USUAL + 0.6)).any()
