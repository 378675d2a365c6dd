from __future__ import annotations

import itertools

import pytest

from rankscope.daemon.stacks.sampling_budget import MIN_RATE_HERTZ, Budget, plan_at, rate_ladder


class Machine:
    """A daemon whose CPU use is a fixed part, and for each recording a part for attaching and one for every sample."""

    def __init__(self, budget: Budget, ranks: int = 1) -> None:
        self.budget, self.ranks = budget, ranks
        self.now = self.own = self.sampling = 0.0
        budget.observe(self.now, self.own, self.sampling, ranks)

    def run(self, seconds: float, fixed: float, sample: float = 0.0, attaching: float = 0.0) -> list[float]:
        """Costs are CPU seconds: `fixed` a second, the others for each rank."""
        rates = []
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            self.own += 2.0 * fixed
            plan = plan_at(self.budget.rate_hertz)
            if plan is not None:
                recordings = 2.0 * self.ranks / plan.period_seconds
                self.sampling += recordings * (attaching + plan.seconds * plan.rate_hz * sample)
            rates.append(self.budget.observe(self.now, self.own, self.sampling, self.ranks))
        return rates


def test_recordings_make_the_samples_that_were_asked_for() -> None:
    for average in (100.0, 40.0, 10.0, 9.0, 6.0, 5.0, 4.4, 3.75, 3.0, 2.0, 1.0, 0.625, 0.1):
        plan = plan_at(average)
        assert plan is not None
        assert plan.rate_hz >= MIN_RATE_HERTZ
        assert plan.seconds * plan.rate_hz / plan.period_seconds == pytest.approx(average)
        assert plan.has_pause == (average < MIN_RATE_HERTZ)
    assert plan_at(0.0) is None


def test_a_rank_recorded_half_the_time_reports_every_eight_seconds() -> None:
    for average in (10.0, 7.0, 5.0, 3.75, 2.5):
        plan = plan_at(average)
        assert plan is not None
        assert plan.period_seconds <= 8.0


def test_the_ladder_falls_to_five_hertz_then_pauses_then_off() -> None:
    assert rate_ladder(10.0) == (10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 3.75, 2.5, 1.25, 0.625, 0.0)
    assert rate_ladder(7.5) == (7.5, 7.0, 6.0, 5.0, 3.75, 2.5, 1.25, 0.625, 0.0)
    assert rate_ladder(2.0) == (2.0, 1.25, 0.625, 0.0)
    assert rate_ladder(0.5) == (0.5, 0.0)
    assert rate_ladder(0.0) == (0.0,)
    costs = [plan.cost for rate in rate_ladder(10.0) if (plan := plan_at(rate))]
    assert costs == sorted(costs, reverse=True), "each rung is cheaper than the one before"


def test_within_the_budget_nothing_changes() -> None:
    assert set(Machine(Budget(0.01, 10.0)).run(120, 0.002, 0.0002, 0.015)) == {10.0}


@pytest.mark.parametrize("used_ratio", [1.04, 1.3, 1.57])
def test_processes_with_many_threads_are_sampled_at_five_hertz(used_ratio: float) -> None:
    """Of four CUDA ranks, 10 Hz took 104 to 157 % of the budget. A fifth of it is the daemon's own."""
    machine = Machine(Budget(0.01, 10.0), ranks=4)
    sample = (used_ratio - 0.2) * 0.01 / 15  # 15 samples a second, with 20 of them for attaching
    rates = machine.run(300, 0.2 * 0.04, sample, 20 * sample)
    assert rates[-1] >= 5.0
    assert rates[-60:] == [rates[-1]] * 60, "and it stays at that"
    assert machine.budget.used_ratio is not None
    assert 0.6 < machine.budget.used_ratio <= 1.0


@pytest.mark.parametrize("sample_ms", [1.5, 2.5, 4.0, 8.0])
def test_below_five_hertz_there_are_pauses_and_no_lower_rate(sample_ms: float) -> None:
    """8 ms are a process with 60 threads that all run Python code."""
    machine = Machine(Budget(0.01, 10.0), ranks=8)
    rates = machine.run(600, 0.016, sample_ms / 1000, 0.025)
    plans = [plan for rate in rates if (plan := plan_at(rate))]
    assert all(plan.rate_hz >= 5 for plan in plans)
    assert len(plans) == len(rates), "never off"
    assert machine.budget.used_ratio is not None
    assert machine.budget.used_ratio <= 1.0


def test_the_budget_is_exceeded_for_less_than_half_a_minute() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=4)
    machine.run(30, 0.008, 0.0014, 0.02)
    own, sampling = machine.own, machine.sampling
    machine.run(30, 0.008, 0.0014, 0.02)
    assert machine.own + machine.sampling - own - sampling <= 0.01 * 4 * 30


def test_stacks_go_off_when_even_the_fewest_are_too_much() -> None:
    machine = Machine(Budget(0.01, 10.0))
    assert machine.run(600, 0.008, 0.02, 0.1)[-1] == 0.0


@pytest.mark.parametrize("fixed", [0.008, 0.02, 0.5])
def test_work_that_others_cause_leaves_stacks_half_of_the_budget(fixed: float) -> None:
    """Calls and processes to look at, which anybody on the node may add."""
    cheap = Machine(Budget(0.01, 10.0))
    assert set(cheap.run(300, fixed, 0.0001, 0.002)) == {10.0}
    expensive = Machine(Budget(0.01, 10.0))
    rates = expensive.run(300, fixed, 0.0005, 0.01)
    assert 0.0 < rates[-1] < 10.0
    before = expensive.sampling
    expensive.run(100, fixed, 0.0005, 0.01)
    assert 0.3 < (expensive.sampling - before) / 100 / 0.01 <= 0.5


def test_one_expensive_window_changes_nothing() -> None:
    machine = Machine(Budget(0.01, 10.0))
    machine.run(20, 0.001)
    machine.own += 0.05
    assert set(machine.run(20, 0.001)) == {10.0}


def test_the_budget_grows_with_the_ranks() -> None:
    assert set(Machine(Budget(0.01, 10.0), ranks=8).run(60, 0.07)) == {10.0}


def test_the_rate_rises_step_by_step_once_there_is_room() -> None:
    machine = Machine(Budget(0.01, 10.0))
    machine.run(200, 0.02, 0.02, 0.1)
    rates = machine.run(900, 0.001, 0.0002, 0.004)
    steps = list(dict.fromkeys(rates))
    assert steps[0] == 0.0
    assert steps == sorted(steps)
    assert steps[-1] == 10.0
    assert all(rates.count(rate) >= 10 for rate in steps), "it stays on each rate for a while"


def test_a_rate_that_never_fits_is_tried_ever_less_often() -> None:
    # Far over the budget at 10 Hz and far below at any other: the one case that could swing forever.
    rates = []
    machine = Machine(Budget(0.01, 10.0))
    for _ in range(2000):
        rates += machine.run(2, 0.0, 0.0015 if machine.budget.rate_hertz == 10.0 else 0.0003)
    raises = [index for index in range(1, len(rates)) if rates[index] == 10.0 > rates[index - 1]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(raises)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


def test_an_ended_jobs_cost_is_not_left_to_other_ranks() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=8)
    machine.run(20, 0.07)
    machine.ranks = 1
    assert set(machine.run(20, 0.008)) == {10.0}


def test_without_ranks_there_is_nothing_to_sample_less() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=0)
    assert set(machine.run(60, 0.5)) == {10.0}
    machine.ranks = 1
    assert set(machine.run(20, 0.005)) == {10.0}


def test_a_jobs_arrival_does_not_count_as_its_running_cost() -> None:
    machine = Machine(Budget(0.01, 10.0), ranks=0)
    machine.ranks = 8
    machine.own += 0.7
    assert set(machine.run(60, 0.06)) == {10.0}


def test_before_any_measurement_the_thread_count_estimates_the_cost() -> None:
    few, many = Budget(0.01, 10.0), Budget(0.01, 10.0)
    for now in (0.0, 2.0, 4.0):
        few.observe(now, 0.0, 0.0, 4, threads=12)
        many.observe(now, 0.0, 0.0, 4, threads=80)
    assert few.rate_hertz == 10.0
    assert many.rate_hertz == MIN_RATE_HERTZ


def test_what_was_measured_wins_over_the_guess() -> None:
    budget = Budget(0.01, 10.0)
    for now in range(0, 200, 2):
        budget.observe(float(now), 0.0, 0.0001 * now, 4, threads=80)
    assert budget.rate_hertz > MIN_RATE_HERTZ
