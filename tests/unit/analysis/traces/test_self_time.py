from __future__ import annotations

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph.clock_alignment import Clocks, ClockShift
from rankscope.analysis.traces.joins.channels import Calls, Channel
from rankscope.analysis.traces.joins.collective_matching import Matched
from rankscope.analysis.traces.joins.self_time import Arrivals, find_arrivals


def _arrivals(
    members: list[tuple[int, int, int, int]],
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
    offsets: dict[int, int] | None = None,
) -> Arrivals:
    """Members are (collective, rank, start, end)."""
    collective, rank, start, end = np.array(members, dtype=np.int64).T
    nothing = np.zeros(len(rank), dtype=np.int64)
    channels = (Channel("0", size=3),)
    columns = (rank, nothing, nothing, nothing + kind, nothing, nothing, nothing, start, end, nothing)
    calls = Calls(*columns, (), nothing, nothing, nothing, channels)
    matched = Matched(calls, np.arange(len(rank)), collective, ())
    shifts = {int(r): ClockShift((offsets or {}).get(int(r), 0)) for r in np.unique(rank)}
    return find_arrivals(matched, Clocks(shifts, 0.0, ()))


def test_transfer_is_time_with_all_present_and_the_rest_waiting() -> None:
    found = _arrivals([(0, 0, 0, 50), (0, 1, 10, 51), (0, 2, 30, 52), (1, 0, 100, 130), (1, 1, 90, 130)])
    assert found.transfer_ns.tolist() == [20, 30]
    assert found.wait_ns.tolist() == [30, 21, 2, 0, 10]
    assert found.last.tolist() == [2, 3]
    assert found.lead_ns.tolist() == [20, 10]


def test_arrivals_are_told_on_the_common_clock() -> None:
    found = _arrivals([(0, 0, 1000, 1050), (0, 1, 10, 50)], offsets={0: -1000})
    assert found.last.tolist() == [1]
    assert found.wait_ns.tolist() == [10, 0]


def test_a_root_that_leaves_early_has_no_negative_wait() -> None:
    found = _arrivals([(0, 0, 0, 20), (0, 1, 30, 60)], CollectiveKind.BROADCAST)
    assert found.transfer_ns.tolist() == [0]
    assert found.wait_ns.tolist() == [20, 30]
    assert found.possible.all()


def test_nobody_leaves_an_all_reduce_before_all_have_come() -> None:
    apart = [(0, 0, 0, 20_000), (0, 1, 80_000, 99_000), (1, 0, 200_000, 290_000), (1, 1, 280_000, 290_000)]
    assert _arrivals(apart).possible.tolist() == [False, True]
