"""What waits until all ranks have sent the same steps, and how much of it is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankscope.analysis.step_graph import pending_operations
from rankscope.analysis.step_graph.pending_operations import PendingOperations
from rankscope.analysis.step_graph.window_operations import ROW, RankOperations
from tools.made_layouts import MadeJob, MadeLayout

JOB = MadeLayout(tensor=2, pipeline=2, data=2, micro_batches=2, layers=1)
RANKS = range(JOB.world)


def windows(count: int, steps: int = 5) -> list[list[RankOperations]]:
    job = MadeJob(JOB)
    return [job.packed([(job.step, played) for played in (job.play() for _ in range(steps))]) for _ in range(count)]


WINDOWS = windows(6)
WINDOW_ROWS = sum(part.size for part in WINDOWS[0])


def test_steps_of_all_ranks_wait_for_the_slowest() -> None:
    pending = PendingOperations()
    pending.add(WINDOWS[0][:-1])
    assert pending.last_common_step(RANKS) is None
    pending.add(WINDOWS[0][-1:])
    assert pending.last_common_step(RANKS) == 5
    sample = pending.take(RANKS, -1, 5, ())
    assert sample is not None and sample.outside_ns is None
    assert len(sample.operations) == WINDOW_ROWS


def test_steps_that_were_judged_are_dropped() -> None:
    pending = PendingOperations()
    for parts in WINDOWS[:3]:
        pending.add(parts)
    pending.drop(10)
    assert pending.rows == 2 * WINDOW_ROWS
    sample = pending.take(RANKS, 10, 15, ())
    assert sample is not None and np.unique(sample.operations.step).tolist() == [*range(10, 16)]


def test_too_few_steps_are_none() -> None:
    pending = PendingOperations()
    pending.add(windows(1, steps=4)[0])
    assert pending.take(RANKS, -1, 4, ()) is None


def test_when_it_is_too_much_the_latest_steps_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_operations, "MAX_ROWS", 3 * WINDOW_ROWS)
    monkeypatch.setattr(pending_operations, "MAX_RANK_ROWS", 1)
    pending = PendingOperations()
    for parts in WINDOWS:
        pending.add(parts)
        assert pending.rows <= 3 * WINDOW_ROWS
    assert pending.take(RANKS, -1, 30, ()) is not None


def test_what_a_rank_never_completes_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_operations, "MAX_ROWS", 3 * WINDOW_ROWS)
    monkeypatch.setattr(pending_operations, "MAX_RANK_ROWS", 1)
    pending = PendingOperations()
    pending.add(WINDOWS[0])
    for parts in WINDOWS[1:]:
        pending.add(parts[1:])
        assert pending.rows <= 3 * WINDOW_ROWS
    assert pending.last_common_step(RANKS) is None


def test_a_rank_that_lies_about_its_steps_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations seem to be of many steps, so that a step of the job seems to be small."""
    monkeypatch.setattr(pending_operations, "MAX_GRAPH_ROWS", WINDOW_ROWS // 3)
    pending = PendingOperations()
    lie = WINDOWS[0][0]
    rows = np.frombuffer(lie.rows, ROW).copy()
    rows["step"] = np.arange(len(rows))
    pending.add([lie._replace(rows=rows.tobytes()), *WINDOWS[0][1:]])
    assert pending.take(RANKS, -1, 1 << 20, ()) is None


@pytest.mark.parametrize("broken", [{"rows": b"x"}, {"tick_ns": 0}, {"rank": -1}])
def test_what_cannot_be_right_is_not_kept(broken: dict[str, Any]) -> None:
    pending = PendingOperations()
    pending.add(WINDOWS[0])
    pending.add([WINDOWS[1][0]._replace(**broken)])
    assert pending.rows == WINDOW_ROWS
