from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import (
    Algorithm,
    Fit,
    Observations,
    crossover_bytes,
    fit_collectives,
    predicted_seconds,
    steps,
)
from tests.unit.analysis.collective_timings import observe, sizes, together

ALL_REDUCE = CollectiveKind.ALL_REDUCE


def fit(observed: Observations) -> Fit:
    (found,) = fit_collectives(observed)
    return found


@settings(max_examples=20)
@given(
    alpha_us=st.floats(2, 50),
    beta_gbps=st.floats(10, 900),
    ranks=st.sampled_from([2, 8, 64]),
    kind=st.sampled_from([ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.SEND]),
    seed=st.integers(0, 1000),
)
def test_recovers_planted_latency_and_bandwidth_through_noise_and_outliers(
    alpha_us: float, beta_gbps: float, ranks: int, kind: CollectiveKind, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    observed = observe(
        sizes(rng, 200), kind=kind, ranks=ranks, alpha_us=alpha_us, beta_gbps=beta_gbps, rng=rng, outliers=0.1
    )
    found = fit(observed)
    assert found.alpha_seconds == pytest.approx(alpha_us * 1e-6, rel=0.12)
    assert found.beta_bytes_per_second == pytest.approx(beta_gbps * 1e9, rel=0.12)
    assert found.residual_p50 == pytest.approx(1.0, abs=0.05)


def test_claims_no_negative_latency_and_none_without_evidence() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        large = (2 ** rng.uniform(28, 33, 60)).astype(np.int64)
        found = fit(observe(large, alpha_us=0.0, beta_gbps=100, rng=rng))
        assert found.alpha_seconds is None or 0 <= found.alpha_seconds < 50e-6
        assert found.beta_bytes_per_second == pytest.approx(100e9, rel=0.1)


def test_predicts_the_golden_rows_time_from_its_bandwidth() -> None:
    golden = Fit("", ALL_REDUCE, 8, 5, 5, alpha_seconds=0.0, beta_bytes_per_second=485.1190995e9)
    assert golden.predict(np.array([17179869184]))[0] * 1e6 == pytest.approx(61974, abs=0.01)


@pytest.mark.parametrize(
    ("byte_counts", "ranks", "words"),
    [
        ([1024] * 50, 8, "1 distinct size, 3 are needed"),
        ([1024, 2048] * 25, 8, "2 distinct sizes, 3 are needed"),
        ([1000, 1100, 1200] * 20, 8, "sizes span a factor of 1.2"),
        ([1024, 1 << 20, 1 << 24], 8, "3 timed with a known size, 5 are needed"),
        ([1024, 1 << 20, 1 << 24] * 5, 1, "a group of one rank transfers nothing"),
        ([1024, 1 << 20, 1 << 24] * 5, -1, "the number of ranks is unknown"),
        ([-1] * 20, 8, "all sizes are unknown"),
    ],
)
def test_abstains_with_the_reason(byte_counts: list[int], ranks: int, words: str) -> None:
    size = np.array(byte_counts)
    count = len(size)
    observed = Observations(
        group=np.zeros(count, dtype=np.int64),
        kind=np.full(count, int(ALL_REDUCE)),
        ranks=np.full(count, ranks),
        bytes=size,
        seconds=np.full(count, 1e-3),
        time_seconds=np.full(count, np.nan),
        groups=("",),
    )
    found = fit(observed)
    assert words in found.reason
    assert not found.is_fitted and found.alpha_seconds is None
    with pytest.raises(ValueError, match="no fit of all_reduce"):
        found.predict(size)


def test_makes_no_bandwidth_out_of_the_noise_of_small_messages() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        found = fit(observe((2 ** rng.uniform(3, 9, 60)).astype(np.int64), alpha_us=20, beta_gbps=1e6, rng=rng))
        assert "only latency" in found.reason and found.beta_bytes_per_second is None


def test_distinguishes_rings_from_trees_by_time_growth_with_ranks() -> None:
    for algorithm in Algorithm:
        parts = []
        for ranks in (4, 16, 64, 256):
            rng = np.random.default_rng(ranks)
            parts.append(observe(sizes(rng, 80), ranks=ranks, alpha_us=5, beta_gbps=50, rng=rng, algorithm=algorithm))
        columns = ("group", "kind", "ranks", "bytes", "seconds", "time_seconds")
        pooled = Observations(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}, groups=("",)
        )
        found = fit(pooled)
        assert found.algorithm is algorithm and found.algorithm_observed
        assert found.alpha_seconds == pytest.approx(5e-6, rel=0.1)


def test_assumes_a_ring_where_one_count_of_ranks_cannot_tell() -> None:
    rng = np.random.default_rng(3)
    found = fit(observe(sizes(rng, 80), rng=rng))
    assert found.algorithm is Algorithm.RING and not found.algorithm_observed


def test_fits_each_group_and_kind_for_itself() -> None:
    rng = np.random.default_rng(5)
    fast = observe(sizes(rng, 60), beta_gbps=200, rng=rng, group="nvlink")
    slow = observe(sizes(rng, 60), beta_gbps=20, rng=rng, group="ib")
    both = together(fast, slow)
    found = fit_collectives(both)
    assert [one.group for one in found] == ["nvlink", "ib"]
    assert [round((one.beta_bytes_per_second or 0) / 1e9, -1) for one in found] == [200, 20]


def test_counts_the_steps_of_rings_and_trees() -> None:
    ranks = np.array([8])
    assert steps(ALL_REDUCE, ranks, Algorithm.RING)[0] == 14
    assert steps(CollectiveKind.ALL_GATHER, ranks, Algorithm.RING)[0] == 7
    assert steps(ALL_REDUCE, ranks, Algorithm.TREE)[0] == 6
    assert steps(CollectiveKind.ALL_GATHER, ranks, Algorithm.TREE)[0] == 7
    assert steps(CollectiveKind.SEND, ranks, Algorithm.RING)[0] == 1


def test_a_tree_wins_below_the_crossover_and_a_ring_above() -> None:
    where = crossover_bytes(ALL_REDUCE, 64, 5e-6, 50e9)
    assert where is not None
    for size, winner in ((where / 2, Algorithm.TREE), (where * 2, Algorithm.RING)):
        times = {
            algorithm: predicted_seconds(ALL_REDUCE, np.array([64]), np.array([size]), 5e-6, 50e9, algorithm)[0]
            for algorithm in Algorithm
        }
        assert min(times, key=lambda algorithm: times[algorithm]) is winner
    assert crossover_bytes(CollectiveKind.ALL_GATHER, 64, 5e-6, 50e9) is None
