"""In which steps NCCL is asked for its times, in jobs in which that costs a known share of a step."""

from __future__ import annotations

from random import Random

import pytest

from rankscope.probe.nccl_turns import BLOCK, COST_BUDGET_RATIO, FIRST_STEP, PAIRS, ROUND, Turns

AFTER = FIRST_STEP + 2 * PAIRS * BLOCK


def played(cost: float, steps: int = ROUND, noise: float = 0.0, seed: int = 1) -> Turns:
    turns, random = Turns(), Random(seed)
    for step in range(1, steps):
        turns.observe(step, 0.1 * (1 + cost * turns.is_on(step)) * (1 + noise * random.gauss(0, 1)))
    return turns


def on_ratio(turns: Turns) -> float:
    """Outside of trials."""
    steps = range(ROUND + AFTER, 2 * ROUND)
    return sum(map(turns.is_on, steps)) / len(steps)


def test_it_is_on_in_every_step_before_the_first_trial() -> None:
    assert all(map(Turns().is_on, range(1, FIRST_STEP)))


def test_half_the_steps_of_a_trial_are_without_it() -> None:
    trial = [Turns().is_on(step) for step in range(FIRST_STEP, AFTER)]
    assert trial == ([True] * BLOCK + [False] * 2 * BLOCK + [True] * BLOCK) * (PAIRS // 2)


@pytest.mark.parametrize("cost", [0.0, 0.002, -0.01])
def test_it_stays_on_where_it_costs_nothing(cost: float) -> None:
    turns = played(cost)
    assert turns.cost_ratio == pytest.approx(cost, abs=1e-6)
    assert on_ratio(turns) == 1.0


@pytest.mark.parametrize("cost", [0.01, 0.05, 0.13])
def test_it_is_rarely_on_where_it_costs_something(cost: float) -> None:
    turns = played(cost)
    assert turns.cost_ratio == pytest.approx(cost, abs=1e-6)
    assert on_ratio(turns) * cost <= COST_BUDGET_RATIO * 1.2
    assert on_ratio(turns) > 0


def test_noise_is_not_taken_for_a_cost() -> None:
    assert [on_ratio(played(0.0, noise=0.05, seed=seed)) for seed in range(20)].count(1.0) >= 18


def test_a_job_becoming_slower_is_not_taken_for_a_cost() -> None:
    turns = Turns()
    for step in range(1, ROUND):
        turns.observe(step, 0.1 * (1 + step / 2000))
    assert abs(turns.cost_ratio) < COST_BUDGET_RATIO
    assert on_ratio(turns) == 1.0


def test_a_stall_in_a_trial_is_no_cost() -> None:
    turns = Turns()
    for step in range(1, ROUND):
        turns.observe(step, 0.7 if step % 10 == 0 else 0.1)
    assert on_ratio(turns) == 1.0


def test_a_later_trial_decides_again() -> None:
    turns = played(0.05)
    assert on_ratio(turns) < 1.0
    for step in range(ROUND, 2 * ROUND):
        turns.observe(step, 0.1)
    assert turns.cost_ratio == pytest.approx(0.0)
    assert on_ratio(turns) == 1.0


def test_a_trial_without_timed_steps_decides_nothing() -> None:
    turns = Turns()
    for step in range(1, ROUND, 4 * BLOCK):
        turns.observe(step, 0.1)
    assert turns.cost_ratio != turns.cost_ratio  # NaN
    assert on_ratio(turns) == 1.0


def test_the_first_step_of_a_turn_is_not_whole() -> None:
    turns = Turns()
    assert not turns.is_whole(FIRST_STEP + 3 * BLOCK)
    assert turns.is_whole(FIRST_STEP + 3 * BLOCK + 1)
    assert not turns.is_whole(FIRST_STEP + 5 * BLOCK)
