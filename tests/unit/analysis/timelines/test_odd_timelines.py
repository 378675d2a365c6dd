"""Recorders differ, and files have holes: what still can be told is told, and what was done about it is noted."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.timelines.report import TimelineReport, analyze
from rankscope.analysis.timelines.timeline import JobSizes, TimelineError, read_columns
from rankscope.analysis.verdicts.verdict import Kind
from tests.unit.analysis.timelines.simulation import Fault, Shape, simulate

Columns = dict[str, np.ndarray]
SHAPE = Shape(stages=3, replicas=4, micro_batches=4)
CULPRIT = (1, 2, 0)
SLOW = Fault(compute=lambda step, place: 1.8 if place == CULPRIT else 1.0)


def recorded(steps: int = 22, shape: Shape = SHAPE, fault: Fault | None = SLOW) -> Columns:
    return simulate(shape, steps, fault=fault, seed=3)


def judged(columns: Columns, sizes: JobSizes | None = None) -> TimelineReport:
    return analyze(read_columns(columns), sizes or JobSizes())


def kept(columns: Columns, rows: np.ndarray) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def assert_finds_the_culprit(report: TimelineReport) -> None:
    verdict = report.judgement.verdict
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (SHAPE.rank(CULPRIT),)), verdict.reason


def test_the_order_of_the_rows_does_not_matter() -> None:
    columns = recorded()
    backwards = kept(columns, np.arange(len(columns["step"]))[::-1])
    first, second = judged(columns).decomposition, judged(backwards).decomposition
    assert np.array_equal(first.step_seconds, second.step_seconds)
    assert (first.m_w, first.m_s) == (second.m_w, second.m_s)


def test_columns_that_can_be_worked_out_may_be_missing() -> None:
    columns = recorded()
    whole = judged(columns)
    for name in ("rank", "seq_id", "mc", "gmc", "mb_id"):
        del columns[name]
    report = judged(columns)
    assert_finds_the_culprit(report)
    assert report.decomposition.slowdown == pytest.approx(whole.decomposition.slowdown, rel=1e-12)


def test_steps_with_a_hole_are_left_out_and_counted() -> None:
    columns = recorded(25)
    hole = (columns["step"] == 7) & (columns["rank"] == 5) & (columns["optype"] == "backward-compute")
    gone = (columns["step"] == 11) & (columns["rank"] == 0)
    report = judged(kept(columns, ~(hole & (columns["seq_id"] == 2)) & ~gone))
    assert_finds_the_culprit(report)
    assert sorted(set(range(25)) - set(report.steps.tolist())) == [7, 11]
    assert any("2 of 25 steps left out" in note and "7, 11" in note for note in report.notes)


def test_rows_written_twice_count_once() -> None:
    columns = recorded()
    plain = judged(columns)
    twice = np.r_[np.arange(len(columns["step"])), np.arange(0, len(columns["step"]), 3)]
    report = judged(kept(columns, twice))
    assert report.decomposition.slowdown == plain.decomposition.slowdown
    assert any("duplicate rows" in note for note in report.notes)


def test_steps_with_another_micro_batch_count_get_their_own_graph() -> None:
    long, short = recorded(12), simulate(Shape(3, 4, 1, 2), 12, fault=SLOW, seed=4)
    short["step"] = short["step"] + 100
    mixed = {name: np.concatenate([long[name], short[name]]) for name in long}
    report = judged(mixed)
    assert_finds_the_culprit(report)
    assert len(np.unique(report.decomposition.typical_seconds)) == 2
    assert report.steps.tolist() == [*range(12), *range(100, 112)]


def test_unknown_operations_are_work_unless_they_overlap_others() -> None:
    columns = recorded()
    after = columns["optype"] == "gc"
    extra = kept(columns, after)
    extra["optype"] = np.full(after.sum(), "count-tokens")
    extra["duration"] = np.where(extra["rank"] == SHAPE.rank(CULPRIT), 0.2, 0.0001)
    beside = kept(columns, columns["optype"] == "forward-compute")
    beside["optype"] = np.full(len(beside["step"]), "tp-all-reduce")
    report = judged({name: np.concatenate([columns[name], extra[name], beside[name]]) for name in columns})
    assert "count-tokens" in report.families
    assert "tp-all-reduce" not in report.families
    assert any("'tp-all-reduce': it overlaps" in note for note in report.notes)
    assert any("'count-tokens': treated as" in note for note in report.notes)


def test_without_sends_the_stages_still_follow_each_other() -> None:
    columns = recorded()
    whole = judged(columns)
    report = judged(kept(columns, ~np.char.endswith(columns["optype"].astype(str), ("send"))))
    silent = judged(
        kept(columns, ~np.isin(columns["optype"], ["forward-send", "forward-recv", "backward-send", "backward-recv"]))
    )
    for one in (report, silent):
        assert_finds_the_culprit(one)
        assert any("instant" in note for note in one.notes)
        assert one.decomposition.step_seconds.mean() == pytest.approx(whole.decomposition.step_seconds.mean(), rel=0.03)


def test_sends_and_receives_that_meet_nobody_may_be_written_too() -> None:
    """As recorders of interleaved schedules do: one receive per compute, where the model begins of no length."""
    shape = Shape(2, 2, 1, 4, 2)
    columns = simulate(shape, 20, seed=5)
    plain = judged(columns)
    first = (columns["optype"] == "forward-compute") & (columns["stage"] == 0)
    idle = kept(columns, first & (columns["mc"] == 0))
    idle["optype"] = np.full(len(idle["step"]), "forward-recv")
    idle["start_ts"] = idle["start_ts"] - 1e-5
    idle["duration"] = np.full(len(idle["step"]), 1e-6)
    idle["mc"] = idle["gmc"] = idle["mb_id"] = np.full(len(idle["step"]), -1)
    both = {name: np.concatenate([columns[name], idle[name]]) for name in columns}
    both.pop("seq_id")
    report = judged(both)
    assert report.notes == ()
    assert report.decomposition.slowdown == pytest.approx(plain.decomposition.slowdown, rel=0.01)


def test_reduce_scatters_beside_a_separate_all_reduce_depend_on_backward() -> None:
    """Overlapped with the backward of the other micro-batches' ranks, a scatter that is done early costs nothing."""
    columns = recorded(fault=None)
    scatters = columns["optype"] == "grads-reduce-scatter"
    separate = kept(columns, scatters)
    separate["optype"] = np.full(scatters.sum(), "separate-grads-all-reduce")
    separate["mc"] = np.full(scatters.sum(), -1)
    joined = {name: np.concatenate([columns[name], separate[name]]) for name in columns}
    plain, report = judged(columns), judged(joined)
    assert report.judgement.verdict.kind is Kind.HEALTHY
    added = report.decomposition.step_seconds.mean() - plain.decomposition.step_seconds.mean()
    # The chain grows by the separate one; the scatter leaves it, but the all-reduces wait for the scatter.
    assert 0 < added < 0.006


def test_incomplete_replicas_are_skipped_and_too_few_ranks_not_judged() -> None:
    columns = recorded()
    report = judged(kept(columns, ~((columns["dp_rank"] == 3) & (columns["stage"] == 0))), JobSizes(data=4))
    assert report.data_ranks.tolist() == [0, 1, 2]
    assert report.judgement.verdict.kind is Kind.INSUFFICIENT_DATA
    assert "9 of 12 ranks" in report.judgement.verdict.reason


def test_fewer_than_twenty_steps_are_not_judged_but_measured() -> None:
    report = judged(recorded(12))
    assert report.judgement.verdict.kind is Kind.INSUFFICIENT_DATA
    assert report.decomposition.slowdown > 1.1
    assert any("slow_rank" in note for note in report.notes)


def test_rank_numbers_that_repeat_across_places_are_ignored() -> None:
    columns = recorded()
    columns["rank"] = columns["rank"] % 4
    report = judged(columns)
    assert_finds_the_culprit(report)
    assert any("rank column" in note for note in report.notes)


def test_one_written_rank_per_tensor_parallel_group_is_noted() -> None:
    columns = recorded()
    columns["rank"] = columns["rank"] * 4
    report = judged(columns, JobSizes(pipeline=3, data=4, tensor=4))
    assert report.judgement.verdict.culprits == (SHAPE.rank(CULPRIT) * 4,)
    assert any("4 tensor-parallel ranks" in note for note in report.notes)


def test_half_of_a_stage_being_slow_is_uneven_data() -> None:
    fault = Fault(compute=lambda step, place: 1.5 if place[1] < 2 else 1.0)
    verdict = judged(recorded(fault=fault)).judgement.verdict
    assert (verdict.kind, verdict.culprits) == (Kind.DATA_IMBALANCE, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("duration"), "no column duration"),
        (lambda c: c.update(duration=np.where(c["step"] == 1, np.nan, c["duration"])), "duration is not a number"),
        (lambda c: c.update(duration=np.where(c["step"] == 1, -1.0, c["duration"])), "duration is negative"),
        (lambda c: c.update(start_ts=c["start_ts"].astype(object) + 0 * 1j), "start_ts holds text"),
        (lambda c: c.update(start_ts=np.where(c["step"] == 1, "soon", "1")), r"row \d+: 'soon'"),
        (lambda c: c.update(stage=c["stage"] + 1), "has no rows"),
        (lambda c: c.update(stage=c["stage"] - 1), "stage is negative"),
        (lambda c: c.update(stage=c["stage"] + 0.5), "not a whole number"),
        (lambda c: c.update(optype=c["stage"]), "optype holds numbers"),
        (lambda c: c.update(optype=np.full(len(c["step"]), "")), "optype is empty"),
        (lambda c: c.update(optype=np.full(len(c["step"]), "work")), "no forward-compute"),
        (lambda c: c.update(duration=np.zeros(len(c["step"]))), "all durations are zero"),
        (lambda c: c.update(start_ts=c["start_ts"] + 1e300), "too large for seconds"),
        (lambda c: c.update({name: column[:0] for name, column in c.items()}), "no rows"),
        (lambda c: c.update(kept(c, c["rank"] == 0)), "only one rank"),
        (lambda c: c.update(seq_id=-c["seq_id"]), "circular dependencies"),
    ],
)
def test_what_cannot_be_analysed_is_refused_with_a_reason(change: object, message: str) -> None:
    columns = recorded(3)
    assert callable(change)
    change(columns)
    with pytest.raises(TimelineError, match=message):
        judged(columns)
