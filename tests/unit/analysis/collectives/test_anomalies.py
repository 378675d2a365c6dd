from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.collectives.alpha_beta import Observations
from rankscope.analysis.collectives.anomalies import anomalies
from rankscope.analysis.verdicts.verdict import Severity
from tests.unit.analysis.collective_timings import observe, sizes, together


def slowed(observed: Observations, first: int, last: int, factor: float) -> Observations:
    seconds = observed.seconds.copy()
    seconds[first:last] *= factor
    return replace(observed, seconds=seconds)


def healthy(seed: int, count: int = 200, group: str = "dp_0", beta_gbps: float = 100.0) -> Observations:
    rng = np.random.default_rng(seed)
    return observe(sizes(rng, count), rng=rng, outliers=0.1, group=group, beta_gbps=beta_gbps)


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_group_with_outliers_is_no_anomaly(seed: int) -> None:
    assert anomalies(healthy(seed)) == ()


@pytest.mark.parametrize(("first", "last"), [(120, 200), (60, 200), (0, 80)])
def test_finds_a_temporarily_slow_group_even_if_mostly_slow(first: int, last: int) -> None:
    (found,) = anomalies(slowed(healthy(1), first, last, 2.5))
    assert found.against == "own" and found.severity is Severity.ALARM
    assert found.ratio == pytest.approx(2.5, rel=0.15)
    assert found.ongoing is (last == 200)
    assert found.since_seconds == pytest.approx(first, abs=6)
    assert found.lost_ratio > 0.3


def test_slight_or_momentary_slowness_is_no_anomaly() -> None:
    assert anomalies(slowed(healthy(1), 100, 200, 1.3)) == ()
    assert anomalies(slowed(healthy(1), 100, 106, 4.0)) == ()


def test_judges_one_size_against_itself_where_there_is_no_line() -> None:
    rng = np.random.default_rng(2)
    same = observe(np.full(100, 1 << 25), rng=rng)
    assert anomalies(same) == ()
    (found,) = anomalies(slowed(same, 70, 100, 3.0))
    assert found.against == "own"


def test_finds_the_one_slow_link_among_equal_groups() -> None:
    groups = [healthy(n, 60, f"dp_{n}", beta_gbps=40 if n == 2 else 100) for n in range(5)]
    (found,) = anomalies(together(*groups))
    assert (found.group, found.against, found.severity) == ("dp_2", "peers", Severity.ALARM)
    # Latency is the same; only what is large is slower.
    assert 1.5 < found.ratio < 3
    assert "dp_2" in found.reason


def test_leaves_the_healthy_twin_of_that_fleet_alone() -> None:
    assert anomalies(together(*(healthy(n, 60, f"dp_{n}") for n in range(5)))) == ()


def test_does_not_hold_one_kind_of_group_against_another() -> None:
    inside = [healthy(n, 60, f"tp_{n}", beta_gbps=300) for n in range(4)]
    between = [healthy(n + 9, 60, f"dp_{n}", beta_gbps=25) for n in range(4)]
    assert anomalies(together(*inside, *between)) == ()


def test_a_benchmark_over_sizes_has_no_time_windows() -> None:
    rng = np.random.default_rng(4)
    # A protocol that is bad at middling sizes: the same at any time.
    walked = slowed(observe(np.sort(sizes(rng, 60)), rng=rng), 20, 40, 4.0)
    assert anomalies(walked) != ()  # the same rows one after the other in time would be
    assert anomalies(replace(walked, in_order=False, time_seconds=np.full(60, np.nan))) == ()


def test_says_nothing_about_too_few_observations() -> None:
    assert anomalies(slowed(healthy(1, 20), 10, 20, 5.0)) == ()
