from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.step_graph.clock_alignment import align
from tests.unit.analysis.traces.planted_jobs import PlantedJob

HOUR_US = 3.6e9


@settings(max_examples=12)
@given(
    offsets=st.lists(st.floats(-5 * HOUR_US, 5 * HOUR_US), min_size=4, max_size=4),
    jitter_us=st.floats(0.0, 80.0),
    slow=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_clocks_hours_apart_align_to_within_the_jitter(
    offsets: list[float], jitter_us: float, slow: int, seed: int
) -> None:
    # Of 12 steps, the residual of any seed is within 40 % of its mean; of 5, one in 240 is not within 60 %.
    job = PlantedJob(4, offsets_us=dict(enumerate(offsets)), jitter_us=jitter_us, slow={slow: 1.5}, seed=seed, steps=12)
    found = job.join()
    assert found.last_arrivals == job.last_arrivals()
    for rank in range(4):
        planted = (offsets[0] - offsets[rank]) * 1000
        assert abs(found.clocks.shifts[rank].offset_ns - planted) < 1000 * jitter_us + 100
    # Uniform jitter has a deviation of 0.29 of its range; the estimate is from 200 ends.
    assert found.clock_residual_us == pytest.approx(0.29 * jitter_us, rel=0.6, abs=0.02)


def test_clock_drift_is_corrected_in_a_long_capture() -> None:
    job = PlantedJob(4, steps=40, work_us=60_000, drifts={2: 40e-6}, offsets_us={2: 5e6})
    found = job.join()
    relative = found.clocks.shifts[2].drift_ratio - found.clocks.shifts[1].drift_ratio
    assert relative == pytest.approx(-40e-6, rel=0.1)
    assert found.clock_residual_us is not None and found.clock_residual_us < 4
    still = job.but(drifts={}).join()
    assert all(shift.drift_ratio == 0.0 for shift in still.clocks.shifts.values())


def test_ranks_that_share_no_group_are_aligned_through_others() -> None:
    """0 and 3 never meet: 0 meets 1, 1 meets 2, 2 meets 3."""
    job = PlantedJob(4, groups=(("a", ((0, 1), (2, 3))), ("b", ((1, 2),))), offsets_us={0: 9e6, 3: -7e6}, steps=8)
    found = job.join()
    assert found.clocks.components == ((0, 1, 2, 3),)
    assert found.clocks.shifts[3].offset_ns == pytest.approx(16e9, abs=20_000)


def test_rank_sets_that_share_nothing_are_reported_and_keep_clocks() -> None:
    job = PlantedJob(5, groups=(("a", ((0, 1),)), ("b", ((2, 3),))), offsets_us={1: 5e6, 2: 8e6}, silent=(4,))
    found = job.join()
    assert found.clocks.components == ((0, 1), (2, 3), (4,))
    assert found.clocks.shifts[2].offset_ns == found.clocks.shifts[4].offset_ns == 0
    assert found.clocks.shifts[3].offset_ns == pytest.approx(8e9, abs=20_000)
    assert any("2 sets of ranks share no collective" in note for note in found.notes)


@settings(max_examples=12)
@given(offsets=st.lists(st.floats(-HOUR_US, HOUR_US), min_size=5, max_size=5), seed=st.integers(0, 1000))
def test_last_arrivals_are_exact_except_within_clock_uncertainty(offsets: list[float], seed: int) -> None:
    job = PlantedJob(5, noise=0.2, jitter_us=8.0, offsets_us=dict(enumerate(offsets)), seed=seed)
    found, truth = job.join(), job.last_arrivals()
    wrong = sum(abs(found.last_arrivals[rank] - truth[rank]) for rank in truth)
    assert wrong <= 2 * found.close_arrivals <= 4
    assert sum(found.last_arrivals.values()) == found.collectives_matched == 20


def test_a_few_wild_ends_move_no_clock() -> None:
    found = PlantedJob(3, steps=5, jitter_us=0.0, noise=0.0).join()
    calls = found.matched.calls
    ends = calls.stop_ns.copy()
    ends[np.flatnonzero(calls.rank == 1)[:6]] += 50_000_000
    clocks = align(replace(found.matched.ends, end_ns=ends), [0, 1, 2])
    assert [shift.offset_ns for shift in clocks.shifts.values()] == [0, 0, 0]
