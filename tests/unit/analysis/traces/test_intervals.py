"""Sets of time against a bitmap, which cannot be wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces import intervals
from rankscope.analysis.traces.intervals import Intervals

LENGTH = 40
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12)


def made(spans: list[tuple[int, int]]) -> Intervals:
    start = np.array([start for start, _ in spans], dtype=np.int64)
    return start, start + np.array([length for _, length in spans], dtype=np.int64)


def bitmap(spans: Intervals) -> npt.NDArray[np.bool_]:
    bits = np.zeros(LENGTH, dtype=bool)
    for start, end in zip(*spans, strict=True):
        bits[start:end] = True
    return bits


def is_tidy(spans: Intervals) -> bool:
    start, end = spans
    return bool((end > start).all() and (start[1:] > end[:-1]).all())


@given(SPANS)
def test_a_union_is_disjoint_and_covers_exactly_its_intervals(spans: list[tuple[int, int]]) -> None:
    joined = intervals.union(*made(spans))
    assert is_tidy(joined)
    assert (bitmap(joined) == bitmap(made(spans))).all()
    assert intervals.total(*joined) == bitmap(made(spans)).sum()


@given(SPANS, SPANS)
def test_intersection_and_difference_part_a_set_by_another(
    left_spans: list[tuple[int, int]], right_spans: list[tuple[int, int]]
) -> None:
    left, right = intervals.union(*made(left_spans)), intervals.union(*made(right_spans))
    both, only = intervals.intersection(left, right), intervals.difference(left, right)
    assert (bitmap(both) == (bitmap(left) & bitmap(right))).all()
    assert (bitmap(only) == (bitmap(left) & ~bitmap(right))).all()
    assert (both[1] > both[0]).all() and (only[1] > only[0]).all()


@given(SPANS, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_coverage_between_two_moments_equals_a_clips_total(
    spans: list[tuple[int, int]], begin: int, finish: int
) -> None:
    begin, finish = sorted((begin, finish))
    joined = intervals.union(*made(spans))
    covered = intervals.covered_until(joined, np.array([begin, finish]))
    assert covered[1] - covered[0] == bitmap(joined)[begin:finish].sum()
    assert intervals.total(*intervals.clip(joined, begin, finish)) == bitmap(joined)[begin:finish].sum()
    assert (intervals.contains(joined, np.arange(LENGTH)) == bitmap(joined)).all()


def test_gaps_lie_between_neighbours_and_not_outside() -> None:
    start, end = intervals.gaps(intervals.union(np.array([5, 1, 20]), np.array([9, 6, 21])))
    assert (start.tolist(), end.tolist()) == ([9], [20])


def test_merging_keeps_an_empty_event_unless_covered_or_touched() -> None:
    start, end = intervals.merge(np.array([10, 21, 15, 20, 30]), np.array([20, 21, 15, 20, 30]))
    assert (start.tolist(), end.tolist()) == ([10, 21, 30], [20, 21, 30])
    assert intervals.total(start, end) == 10
