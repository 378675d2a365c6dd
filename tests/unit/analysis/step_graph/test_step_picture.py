"""The picture of a step shows who is late and who waits, and stays small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph import step_picture
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations
from rankscope.analysis.step_graph.path_windows import JudgedSteps, PathFinder
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_picture import MAX_BARS, MAX_PATH, MAX_RANKS, StepPicture, draw_step
from rankscope.analysis.step_graph.window_operations import ROW, RankOperations, join
from tests.support.step_programs import Fault, Layout, packed, play

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"
LAYOUT = Layout(tensor=2, pipeline=2, data=2, steps=10)
LATE_NS = 30_000_000


def judged(operations: Operations) -> JudgedSteps:
    finder = PathFinder()
    assert finder.find(operations) is not None
    assert finder.judged is not None
    return finder.judged


def drawn(layout: Layout, *culprits: int) -> StepPicture:
    return draw_step(judged(play(layout)), culprits)


@pytest.fixture(scope="module")
def late() -> StepPicture:
    """Rank 5 is late in step 6 alone."""
    return drawn(replace(LAYOUT, faults=(Fault(5, LATE_NS, first_step=6, every=6),)), 5)


def test_the_costliest_step_is_drawn_with_its_late_stretch(late: StepPicture) -> None:
    focus = late.focus
    assert focus is not None
    assert (late.step, focus.rank, focus.is_compared_with_past) == (6, 5, False)
    assert focus.excess_ns == pytest.approx(LATE_NS, rel=0.1)
    assert focus.operation == (CollectiveKind.ALL_REDUCE, GroupKind.TENSOR, 2)
    assert focus.start_ns < focus.stop_ns - focus.excess_ns < focus.stop_ns < focus.end_ns
    assert late.lost_ns > 3 * LATE_NS


def test_the_ranks_that_wait_are_named_directly_and_in_turn(late: StepPicture) -> None:
    assert late.focus is not None
    assert late.focus.waiting == (4,), "its tensor group"
    assert late.focus.waiting_meanwhile
    assert 5 not in late.focus.waiting_meanwhile


def test_a_waiting_bar_says_until_when_and_for_whom(late: StepPicture) -> None:
    bars, focus = late.bars, late.focus
    assert focus is not None
    of_rank_4 = late.ranks[bars.row] == 4
    delayed = np.flatnonzero(of_rank_4 & (bars.arrived_ns == focus.stop_ns))
    assert len(delayed) == 1
    assert bars.awaited[delayed] == 5
    assert bars.arrived_ns[delayed] - bars.start_ns[delayed] == pytest.approx(LATE_NS, rel=0.2)
    alone = bars.awaited == UNKNOWN
    assert (bars.arrived_ns[alone] == bars.start_ns[alone]).all()


def test_all_late_stretches_of_the_culprit_are_marked(late: StepPicture) -> None:
    assert late.focus is not None
    lengths = late.focus.late_stop_ns - late.focus.late_start_ns
    assert np.count_nonzero(lengths > LATE_NS / 2) >= 4
    assert (late.focus.late_start_ns[1:] >= late.focus.late_stop_ns[:-1]).all()


@pytest.mark.parametrize("name", [path.stem for path in sorted(RECORDINGS.glob("*.npz"))])
def test_the_path_of_a_recorded_step_has_no_gap(name: str) -> None:
    finder = PathFinder()
    next(finder.find_all(read_recording(RECORDINGS / f"{name}.npz").operations))
    assert finder.judged is not None
    picture = draw_step(finder.judged)
    path = picture.path
    assert picture.focus is None
    assert (path.start_ns[1:] == path.stop_ns[:-1]).all()
    assert path.stop_ns[-1] == picture.step_ns
    assert (path.row >= 0).all()


def test_the_healthy_twin_has_no_focus_and_a_usual_step() -> None:
    steps = judged(play(LAYOUT))
    picture = draw_step(steps)
    assert (picture.focus, picture.lost_ns) == (None, 0)
    assert picture.step_ns == pytest.approx(np.median(steps.window.step_ns), rel=0.05)


def test_a_rank_without_late_work_is_not_in_focus() -> None:
    assert drawn(replace(LAYOUT, faults=(Fault(5, LATE_NS),)), 2).focus is None


def test_ranks_are_in_the_order_of_stages() -> None:
    picture = drawn(LAYOUT)
    assert picture.ranks.tolist() == list(range(8))
    assert picture.stages.tolist() == [0] * 4 + [1] * 4


def test_a_rank_alone_in_its_stage_has_its_past() -> None:
    layout = Layout(pipeline=4, micro_batches=8, steps=90, faults=(Fault(2, LATE_NS, first_step=80),))
    finder = PathFinder()
    for _ in finder.find_all(play(layout)):
        pass
    assert finder.judged is not None
    focus = draw_step(finder.judged, [2]).focus
    assert focus is not None
    assert focus.is_compared_with_past
    assert focus.excess_ns == pytest.approx(2 * LATE_NS, rel=0.1), "two layers"


def test_large_jobs_show_the_culprit_and_ranks_near_it() -> None:
    layout = Layout(tensor=4, pipeline=4, data=4, steps=6, faults=(Fault(37, LATE_NS),))
    picture = drawn(layout, 37)
    assert picture.focus is not None
    assert len(picture.ranks) == MAX_RANKS
    assert picture.ranks_left_out == 64 - MAX_RANKS
    ranks = set(picture.ranks.tolist())
    tensor_group, neighbours = {36, 37, 38, 39}, {21, 53}
    assert tensor_group | neighbours <= ranks
    assert picture.bars.row.max() < MAX_RANKS


def test_a_step_of_many_operations_keeps_those_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(LAYOUT)
    monkeypatch.setattr(step_picture, "MAX_BARS", 50)
    monkeypatch.setattr(step_picture, "MAX_PATH", 20)
    some = drawn(LAYOUT)
    assert len(some.bars.row) == 50
    assert some.bars_left_out == len(whole.bars.row) - 50
    assert len(some.path.row) == 20
    assert some.path.stop_ns[-1] <= some.step_ns


def test_the_picture_of_forged_operations_is_bounded() -> None:
    """Daemons send what they like: times that contradict each other, groups of other ranks, no rows at all."""
    operations = play(replace(LAYOUT, steps=6, faults=(Fault(5, LATE_NS),)))
    sent = [packed(take_rows(operations, operations.rank == rank), rank) for rank in operations.ranks]
    chosen, pictures = np.random.default_rng(0), 0
    for _ in range(60):
        finder = PathFinder()
        if finder.find(join([forged(part, chosen) for part in sent])) is None:
            continue
        assert finder.judged is not None
        picture = draw_step(finder.judged, [int(chosen.integers(0, 9))])
        pictures += 1
        assert len(picture.bars.row) <= MAX_BARS
        assert len(picture.path.row) <= MAX_PATH
        assert picture.bars.row.min() >= 0
        assert (picture.bars.arrived_ns <= picture.bars.stop_ns).all()
        assert picture.size_bytes <= 300_000
    assert pictures > 30


def forged(part: RankOperations, chosen: np.random.Generator) -> RankOperations:
    rows = np.frombuffer(part.rows, ROW).copy()
    for name in chosen.choice(ROW.names, chosen.integers(0, 3)):
        some = np.flatnonzero(chosen.random(len(rows)) < chosen.choice([0.01, 0.2, 1.0]))
        garbage = chosen.integers(0, 256, (len(some), ROW[name].itemsize), dtype=np.uint8)
        rows[name][some] = garbage.view(ROW[name]).ravel()
    return part._replace(rows=b"" if chosen.random() < 0.02 else rows.tobytes())


def test_a_rank_alone_can_be_drawn() -> None:
    operations = play(LAYOUT)
    picture = draw_step(judged(take_rows(operations, operations.rank == 3)))
    assert picture.ranks.tolist() == [3]
    assert (picture.bars.awaited == UNKNOWN).all()
