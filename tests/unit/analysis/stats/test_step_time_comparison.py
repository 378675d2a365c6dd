from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.stats.robust import Floats
from rankscope.analysis.stats.step_time_comparison import (
    CompareError,
    StepTimes,
    compare,
    correlation_steps,
    quantile,
    two_sided_p,
    warmup_steps,
)


def noisy(random: np.random.Generator, steps: int, alike: float, spread: float = 0.05) -> Floats:
    """Step times around a second: neighbours are alike, and one of fifty is a spike."""
    noise = random.standard_normal(steps)
    for i in range(1, steps):
        noise[i] = alike * noise[i - 1] + np.sqrt(1 - alike**2) * noise[i]
    spikes = np.where(random.random(steps) < 0.02, random.uniform(1.5, 5, steps), 1.0)
    return np.asarray(np.exp(spread * noise) * spikes)


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
def test_equal_runs_are_seldom_called_different(alike: float) -> None:
    random = np.random.default_rng(7)
    pairs = 200
    alarms = sum(compare([noisy(random, 200, alike)], [noisy(random, 200, alike)]).significant for _ in range(pairs))
    assert alarms <= 0.07 * pairs


def test_assuming_independent_steps_raises_false_alarms_on_this_noise() -> None:
    """The healthy twin of the test above: its noise is such that the naive method fails."""
    random = np.random.default_rng(7)
    alarms = 0
    for _ in range(100):
        a, b = noisy(random, 200, 0.9), noisy(random, 200, 0.9)
        error = np.sqrt(np.log(a).var() / 200 + np.log(b).var() / 200)
        alarms += abs(np.log(a).mean() - np.log(b).mean()) > 1.96 * error
    assert alarms > 20


def test_runs_alternating_between_two_step_times_do_not_differ() -> None:
    random = np.random.default_rng(3)

    def alternating() -> Floats:
        slow = (np.arange(200) + random.integers(2)) % 2
        return np.asarray(np.where(slow, 1.3, 1.0) * (1 + 0.02 * random.standard_normal(200)))

    assert sum(compare([alternating()], [alternating()]).significant for _ in range(100)) <= 8


def test_a_three_percent_difference_is_found_in_200_noisy_steps() -> None:
    random = np.random.default_rng(11)
    found = [compare([noisy(random, 200, 0.0)], [noisy(random, 200, 0.0) * 1.03]) for _ in range(60)]
    assert sum(result.significant for result in found) >= 54
    held = sum((result.median.ci_low or 0) <= 0.03 <= (result.median.ci_high or 0) for result in found)
    assert held >= 54


def test_a_run_against_itself_is_no_difference() -> None:
    run = noisy(np.random.default_rng(1), 100, 0.3)
    result = compare([run], [run])
    assert result.median.difference_ratio == 0
    assert result.median.p_value == 1
    assert not result.significant
    assert result.cliffs_delta == 0
    assert (result.median.ci_low or 0) < 0 < (result.median.ci_high or 0)


def test_difference_is_the_ratio_of_medians_and_interval_matches_p() -> None:
    random = np.random.default_rng(2)
    for factor in (0.9, 0.99, 1.0, 1.02, 1.5):
        a, b = noisy(random, 150, 0.4), noisy(random, 170, 0.4) * factor
        result = compare([a], [b], warmup=0)
        low, high = result.median.ci_low, result.median.ci_high
        assert low is not None and high is not None
        assert result.median.difference_ratio == pytest.approx(np.median(b) / np.median(a) - 1)
        assert low <= result.median.difference_ratio <= high
        assert result.significant == (low > 0 or high < 0)
        turned = compare([b], [a], warmup=0)
        assert turned.median.p_value == pytest.approx(result.median.p_value)
        assert turned.cliffs_delta == pytest.approx(-result.cliffs_delta)


def test_constant_times_differ_or_not_without_a_division_by_zero() -> None:
    ones = np.ones(100)
    same, slower = compare([ones], [ones]), compare([ones], [ones * 1.1])
    assert (same.median.p_value, same.significant) == (1.0, False)
    assert slower.significant
    assert slower.median.ci_low == slower.median.ci_high == pytest.approx(0.1)


def test_a_coarse_clock_proves_no_difference_below_its_resolution() -> None:
    random = np.random.default_rng(5)
    a, b = (np.round(time + 0.1 * random.standard_normal(200)) for time in (12.45, 12.55))
    assert abs(np.median(b) / np.median(a) - 1) > 0.05
    assert not compare([a], [b]).significant


def test_step_times_of_a_run_are_kept_as_they_are() -> None:
    run = noisy(np.random.default_rng(1), 500, 0.5)
    times = StepTimes()
    assert times.median_seconds is None
    for window in np.split(run, 10):
        times.add(np.append(window, np.nan))
    assert (times.seconds == run).all()
    assert times.median_seconds == np.median(run)
    assert times.rounded() == pytest.approx(run.tolist(), rel=1e-5)


def test_step_times_of_a_long_run_are_a_fair_sample() -> None:
    random = np.random.default_rng(2)
    run = noisy(random, 100_000, 0.9)
    run[::64] = 100.0  # a checkpoint, in step with powers of two
    samples = []
    for size in (37, 5_000):  # windows of any size
        times = StepTimes(max_steps=4_000)
        for begin in range(0, len(run), size):
            times.add(run[begin : begin + size])
        assert times.stride == 32 and 3_000 < len(times.seconds) <= 4_000
        assert 0.5 / 64 < (times.seconds == 100.0).mean() < 2 / 64
        for share in (0.1, 0.5, 0.9):
            assert np.quantile(times.seconds, share) == pytest.approx(np.quantile(run, share), rel=0.01)
        # In order: what was slow for a while is slow for a while in the sample.
        ramp = StepTimes(max_steps=100)
        ramp.add(np.arange(1.0, 1001.0))
        assert (np.diff(ramp.seconds) > 0).all() and ramp.seconds[-1] > 900
        samples.append(times.seconds)
    assert not compare([samples[0]], [samples[1]]).significant


def test_samples_of_equal_long_runs_are_seldom_called_different() -> None:
    """Half of the noise changes every 500 steps only, of which the sample keeps 15."""
    random = np.random.default_rng(4)
    alarms = 0
    for _ in range(100):
        sides = []
        for _ in range(2):
            times = StepTimes(max_steps=1_000)
            times.add(np.repeat(noisy(random, 40, 0.5), 500) * np.exp(0.05 * random.standard_normal(20_000)))
            sides.append(times.seconds)
        alarms += compare(sides[:1], sides[1:]).significant
    assert alarms <= 7


def test_few_steps_are_said_to_be_too_few() -> None:
    result = compare([np.full(3, 1.0)], [np.full(50, 2.0)])
    assert result.median.difference_ratio == 1.0
    assert (result.median.p_value, result.median.ci_low, result.significant) == (None, None, False)
    assert result.reason == "A has 3 steps after warm-up; 8 are needed to distinguish a difference from noise"


def test_slow_steps_that_the_median_hides_show_in_the_mean() -> None:
    random = np.random.default_rng(6)
    a = 1 + 0.01 * random.standard_normal(400)
    b = a * np.where(random.random(400) < 0.2, 3.0, 1.0)
    result = compare([a], [b])
    assert result.mean.significant(0.95)
    assert result.mean.difference_ratio == pytest.approx(0.4, abs=0.1)
    assert abs(result.median.difference_ratio) < 0.01


def test_runs_that_vary_by_process_are_compared_as_runs() -> None:
    random = np.random.default_rng(8)

    def runs(count: int, factor: float) -> list[Floats]:
        return [noisy(random, 60, 0.3) * factor * np.exp(0.1 * random.standard_normal()) for _ in range(count)]

    alarms = naive = lone = 0
    for _ in range(100):
        a, b = runs(4, 1.0), runs(4, 1.0)
        alarms += compare(a, b).significant
        lone += compare(a, b[:1]).significant
        naive += compare(a[:1], b[:1]).significant
    assert alarms <= 10 and lone <= 10
    assert naive > 50  # one run each: these two processes do differ
    assert compare(runs(6, 1.0), runs(6, 1.4)).significant
    assert compare(runs(2, 1.0), runs(3, 1.0)).method == "runs"


def test_first_steps_that_compile_are_dropped_and_counted() -> None:
    run = noisy(np.random.default_rng(9), 100, 0.3)
    cold = np.concatenate(([30.0, 8.0, 4.0], run))
    assert warmup_steps(cold) == 3
    assert warmup_steps(run) == 0
    assert warmup_steps(np.ones(100)) == 0
    # A run that is slow for long is slow, not warming up.
    assert warmup_steps(np.concatenate((np.full(50, 2.0), np.full(50, 1.0)))) <= 25
    assert compare([cold], [run]).a.warmup_steps == 3
    assert compare([cold], [run], warmup=10).a.steps == 93


def test_correlation_is_seen_under_spikes() -> None:
    random = np.random.default_rng(10)
    assert correlation_steps(noisy(random, 5000, 0.0)) < 1.3
    assert 12 < correlation_steps(noisy(random, 5000, 0.9)) < 25
    assert correlation_steps(np.ones(50)) == 1.0


@pytest.mark.parametrize(
    "run", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], [1e-300], [1e300]], ids=str
)
def test_times_that_are_none_are_refused(run: list[float]) -> None:
    with pytest.raises(CompareError):
        compare([np.array(run)], [np.ones(100)])


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(CompareError, match="would be dropped"):
        compare([np.ones(10)], [np.ones(10)], warmup=10)


def test_students_distribution_agrees_with_tables() -> None:
    for freedom, t in ((1, 12.7062), (2, 4.30265), (10, 2.22814), (30, 2.04227), (1e9, 1.95996)):
        assert two_sided_p(t, freedom) == pytest.approx(0.05, rel=1e-4)
        assert quantile(0.95, freedom) == pytest.approx(t, rel=1e-5)
    assert two_sided_p(0, 5) == 1
