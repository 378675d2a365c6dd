"""Own work of ranks by step."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.step_graph.own_work import MIN_WINDOWS, Pace, PastPace, Spread

STAGES = np.array([0, 0, 1])
RANKS = np.arange(3)


def test_a_rank_slow_in_most_steps_holds_it_all() -> None:
    """Its quick steps are what it needs."""
    own = np.full((8, 3), 100.0)
    own[:5, 1] = 200.0
    assert Spread.of(own, STAGES).held_ns.tolist() == [0.0, 500.0, 0.0]


def test_what_a_rank_always_needs_longer_is_not_uneven() -> None:
    own = np.tile([100.0, 150.0, 80.0], (8, 1))
    spread = Spread.of(own, STAGES)
    assert spread.held_ns.tolist() == [0.0, 0.0, 0.0]
    assert (spread.even == 1.0).all()


def test_even_work_keeps_the_sum_of_a_stage() -> None:
    own = np.array([[100.0, 140.0, 90.0], [120.0, 100.0, 30.0], [100.0, 100.0, 90.0]] * 3)
    even = own * Spread.of(own, STAGES).even
    assert even[:, 0] == pytest.approx(even[:, 1])
    assert even.sum(axis=1) == pytest.approx(own.sum(axis=1)), "the only rank of a stage keeps its work"


def test_other_ranks_have_no_past() -> None:
    past = PastPace()
    for number in range(MIN_WINDOWS):
        assert past.usual(RANKS) is None
        past.learn(Pace(RANKS, 1000.0 + number, np.array([100.0, 200.0, 300.0])))
    usual = past.usual(RANKS)
    assert usual is not None
    assert (usual.step_ns, usual.own_ns.tolist()) == (1002.0, [100.0, 200.0, 300.0])
    assert past.usual(RANKS + 1) is None
    past.learn(Pace(RANKS + 1, 1000.0, np.ones(3)))
    assert past.usual(RANKS) is None
