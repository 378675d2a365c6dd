from __future__ import annotations

import itertools

from rankscope.daemon.budget import Budget, rate_ladder


class Machine:
    """A daemon whose CPU use is a fixed part plus a part per stack sample."""

    def __init__(self, budget: Budget, ranks: int = 1) -> None:
        self.budget, self.ranks = budget, ranks
        self.now = self.cpu = 0.0
        budget.observe(self.now, self.cpu, ranks)

    def run(self, seconds: float, fixed: float, per_hertz: float) -> list[float]:
        rates = []
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            self.cpu += 2.0 * (fixed + per_hertz * self.budget.rate_hertz)
            rates.append(self.budget.observe(self.now, self.cpu, self.ranks))
        return rates


def test_the_ladder_halves_to_one_hertz_and_then_off() -> None:
    assert rate_ladder(10.0) == (10.0, 5.0, 2.5, 1.0, 0.0)
    assert rate_ladder(2.0) == (2.0, 1.0, 0.0)
    assert rate_ladder(0.5) == (0.5, 0.0)
    assert rate_ladder(0.0) == (0.0,)


def test_within_the_budget_nothing_changes() -> None:
    assert set(Machine(Budget(0.01, 10.0)).run(120, 0.002, 0.0005)) == {10.0}


def test_over_the_budget_the_rate_halves_until_it_fits() -> None:
    rates = Machine(Budget(0.01, 10.0)).run(120, 0.003, 0.002)
    assert list(dict.fromkeys(rates)) == [10.0, 5.0, 2.5]
    assert rates[-1] == 2.5


def test_stacks_go_off_when_even_one_hertz_is_too_much() -> None:
    machine = Machine(Budget(0.01, 10.0))
    assert machine.run(120, 0.02, 0.0)[-1] == 0.0
    assert machine.budget.used_ratio is not None
    assert machine.budget.used_ratio > 1.9


def test_one_expensive_window_changes_nothing() -> None:
    machine = Machine(Budget(0.01, 10.0))
    machine.run(20, 0.001, 0.0)
    machine.cpu += 0.05
    assert set(machine.run(20, 0.001, 0.0)) == {10.0}


def test_the_budget_grows_with_the_ranks() -> None:
    assert set(Machine(Budget(0.01, 10.0), ranks=8).run(60, 0.07, 0.0)) == {10.0}


def test_the_rate_comes_back_step_by_step_once_there_is_room() -> None:
    machine = Machine(Budget(0.01, 10.0))
    machine.run(100, 0.02, 0.0)
    rates = machine.run(400, 0.001, 0.0)
    assert list(dict.fromkeys(rates)) == [0.0, 1.0, 2.5, 5.0, 10.0]
    assert rates.count(1.0) >= 10, "it stays on each rate for a while"


def test_a_rate_that_never_fits_is_tried_less_and_less_often() -> None:
    # Over the budget at 10 Hz, under half of it at 5 Hz: the one case that could swing for ever.
    rates = []
    machine = Machine(Budget(0.01, 10.0))
    for _ in range(2000):
        rates += machine.run(2, 0.0, 0.0015 if machine.budget.rate_hertz == 10.0 else 0.0005)
    raises = [index for index in range(1, len(rates)) if rates[index] > rates[index - 1]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(raises)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_a_job_that_ends_does_not_leave_its_cost_to_the_ranks_that_stay() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=8)
    machine.run(20, 0.07, 0.0)
    machine.ranks = 1
    assert set(machine.run(20, 0.008, 0.0)) == {10.0}


def test_without_ranks_there_is_nothing_to_sample_less() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=0)
    assert set(machine.run(60, 0.5, 0.0)) == {10.0}
    machine.ranks = 1
    assert set(machine.run(20, 0.005, 0.0)) == {10.0}


def test_the_arrival_of_a_job_is_not_taken_for_what_watching_it_costs() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=0)
    machine.ranks = 8
    machine.cpu += 0.7
    assert set(machine.run(60, 0.06, 0.0)) == {10.0}
