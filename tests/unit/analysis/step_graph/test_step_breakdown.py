"""Where a step goes: the parts of the critical path, which add up to the step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph import window_parts
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.path_windows import PathFinder, PathWindow
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_breakdown import (
    BUBBLE,
    COMMUNICATION,
    EXCESS,
    OWN,
    UNACCOUNTED,
    StepBreakdown,
    add_traffic,
    rows,
)
from rankscope.analysis.step_graph.window_parts import KindVotes
from rankscope.analysis.verdicts.critical_path import judge_path, where_steps_go
from tests.support.step_programs import BYTES, TRANSFER_NS, Fault, Layout, play

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"
REAL = {
    # All ranks send in one group.
    "deepspeed_pp2_dp2_healthy": {"pipeline", "data", "unknown"},
    "dp4_healthy": {"data", "global"},
    "ep2_healthy": {"data", "expert", "global", "unknown"},
    "pp2_dp2_late_host": {"pipeline", "data", "embedding", "global", "unknown"},
    "pp4_interleaved_healthy": {"pipeline", "embedding", "global"},
    "tp2_pp2_slow_gpu": {"tensor", "pipeline", "embedding", "global"},
}
MILLISECOND = 1e-3


def windows(operations: Operations) -> list[PathWindow]:
    return list(PathFinder().find_all(operations))


def breakdown(operations: Operations, culprits: Collection[int] = ()) -> StepBreakdown:
    result = where_steps_go(windows(operations), culprits)
    assert result is not None
    return result


def seconds(of: StepBreakdown, part: str, stage: int | None = None, group_kind: str = "") -> float:
    matches = [each for each in of.parts if (each.part, each.group_kind) == (part, group_kind)]
    return sum(each.seconds for each in matches if stage is None or each.stage == stage)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDINGS.glob("*.npz")))
def test_parts_of_a_real_step_add_up_to_the_nanosecond(name: str) -> None:
    found = windows(read_recording(RECORDINGS / f"{name}.npz").operations)
    culprits = judge_path(found).culprits
    for some in ([found[0]], found[:3], found):
        parts = where_steps_go(some, culprits)
        assert parts is not None and not seconds(parts, UNACCOUNTED)
        assert all(part.seconds >= 0 for part in parts.parts)
        assert bool(seconds(parts, EXCESS)) <= bool(culprits)
    alike = where_steps_go(found)
    assert alike is not None
    total = sum(float(window.step_ns.sum()) for window in found)
    assert alike.step_seconds == pytest.approx(total / alike.steps / 1e9, abs=1e-9)


@pytest.mark.parametrize("name", REAL)
def test_communication_has_the_kinds_of_its_groups(name: str) -> None:
    parts = breakdown(read_recording(RECORDINGS / f"{name}.npz").operations)
    assert {part.group_kind for part in parts.parts if part.part == COMMUNICATION} == REAL[name]
    assert {each.group_kind for each in parts.traffic} == REAL[name]


def test_the_excess_of_a_real_slow_rank_is_a_part() -> None:
    """The step takes 88 ms before rank 2 is late, and 340 ms after."""
    operations = read_recording(RECORDINGS / "pp2_dp2_late_host.npz").operations
    slow, healthy = breakdown(operations, (2,)), breakdown(operations)
    assert seconds(slow, EXCESS) == pytest.approx(0.27, abs=0.03)
    assert not seconds(healthy, EXCESS)
    assert slow.step_seconds - seconds(slow, EXCESS) < 0.1


PIPELINE = Layout(pipeline=4, micro_batches=8, noise=0.0, steps=30)


def test_a_balanced_pipeline_has_the_bubble_of_its_schedule() -> None:
    """Each micro-batch takes 10 ms forward and 20 ms backward: 8 of them, and 3 more to fill and drain."""
    parts = breakdown(play(PIPELINE))
    assert seconds(parts, OWN) == pytest.approx(0.24, rel=0.04)
    assert seconds(parts, BUBBLE) == pytest.approx(0.09, rel=0.05)


def test_more_micro_batches_make_the_same_bubble() -> None:
    many = breakdown(play(replace(PIPELINE, micro_batches=16)))
    assert seconds(many, BUBBLE) == pytest.approx(0.09, rel=0.05)
    assert seconds(many, OWN) == pytest.approx(0.48, rel=0.04)


def test_waiting_for_a_long_stage_is_its_own_work() -> None:
    """The loss takes 10 ms more, forward and backward: only filling and draining is the schedule's."""
    parts = breakdown(play(replace(PIPELINE, last_stage_ns=10_000_000)))
    assert seconds(parts, OWN, stage=3) == pytest.approx(0.4, rel=0.02)
    assert seconds(parts, BUBBLE) == pytest.approx(0.09, rel=0.06)


def test_a_job_without_a_pipeline_has_no_bubble() -> None:
    parts = breakdown(play(Layout(tensor=2, data=2, steps=30)))
    assert not seconds(parts, BUBBLE)
    assert [part.stage for part in parts.parts if part.part == OWN] == [None]


def test_a_slow_rank_adds_its_excess_and_nothing_else() -> None:
    """4 ms in each of 2 layers, forward and backward, of 4 micro-batches."""
    layout = Layout(pipeline=2, data=2, noise=0.0, steps=40)
    usual = breakdown(play(layout))
    slow = breakdown(play(replace(layout, faults=(Fault(2, 4_000_000),))), (2,))
    assert seconds(slow, EXCESS) == pytest.approx(0.064, rel=0.02)
    for part in (OWN, BUBBLE, COMMUNICATION):
        assert seconds(slow, part) == pytest.approx(seconds(usual, part), abs=6 * MILLISECOND)
    accused = breakdown(play(replace(layout, faults=(Fault(2, 4_000_000),))), (1,))
    assert seconds(accused, EXCESS) < 1 * MILLISECOND, "an innocent rank has none"


def test_traffic_has_the_bytes_and_the_bandwidth_of_each_kind() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, noise=0.0, steps=30)
    parts = breakdown(play(layout))
    tensor, pipeline, data = sorted(parts.traffic, key=lambda each: -each.groups * each.bytes)[::-1]
    kinds = {each.group_kind: each for each in (tensor, pipeline, data)}
    assert set(kinds) == {"tensor", "pipeline", "data"}
    calls = 2 * 2 * layout.micro_batches  # two layers, forward and backward
    assert kinds["tensor"].bytes == pytest.approx(calls * BYTES["tensor"], rel=0.05)
    assert kinds["data"].bytes == pytest.approx(BYTES["data"])
    assert kinds["pipeline"].bytes == pytest.approx(layout.micro_batches * BYTES["pipeline"], rel=0.05)
    assert {(each.groups, each.min_ranks, each.max_ranks) for each in parts.traffic} == {(4, 2, 2)}
    for kind, each in kinds.items():
        # Between two ranks, nccl-tests' bus bandwidth is that of the array.
        assert each.bus_bytes_per_second == pytest.approx(BYTES[kind] * 1e9 / TRANSFER_NS[kind], rel=0.2)
        assert each.transfer_seconds > 0


def test_communication_that_hides_behind_no_work_is_on_the_path() -> None:
    layout = Layout(tensor=2, data=2, noise=0.0, steps=30)
    parts = breakdown(play(layout))
    assert seconds(parts, COMMUNICATION, group_kind="tensor") == pytest.approx(16 * 0.2 * MILLISECOND, rel=0.05)
    assert seconds(parts, COMMUNICATION, group_kind="data") == pytest.approx(4 * MILLISECOND, rel=0.05)


def test_rows_for_people_name_the_culprit_and_the_groups() -> None:
    parts = breakdown(play(Layout(pipeline=2, data=2, noise=0.0, steps=40, faults=(Fault(2, 4_000_000),))), (2,))
    shown = {row.name: row for row in rows(parts, "rank 2")}
    assert list(shown) == [
        "own work of stage 0",
        "own work of stage 1",
        "excess of rank 2",
        "pipeline bubble",
        "pipeline communication",
        "data communication",
    ]
    assert shown["data communication"].details == "2 groups of 2 ranks, 64 MiB at 16.8 GB/s"
    assert sum(row.ratio for row in shown.values()) == pytest.approx(1.0)


def test_totals_grow_with_the_steps_between_windows() -> None:
    parts = breakdown(play(Layout(tensor=2, data=2, noise=0.0, steps=30)))
    totals = add_traffic(add_traffic({}, parts, 10), parts, 90)
    assert totals["data"].bytes == pytest.approx(100 * BYTES["data"])
    assert totals["data"].exposed_seconds == pytest.approx(0.4, rel=0.05)
    assert totals["data"].transfer_seconds == pytest.approx(0.4, rel=0.05)


def test_kinds_are_named_in_the_first_windows_and_then_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = play(Layout(tensor=2, pipeline=2, steps=6))
    answers = [GroupKind.TENSOR, GroupKind.UNKNOWN]
    looked: list[int] = []

    def infer(given: Operations, **_: object) -> tuple[GroupKind, ...]:
        looked.append(len(given))
        return (answers[len(looked) % 2],) * len(given.groups)

    monkeypatch.setattr(window_parts, "infer_group_kinds", infer)
    votes = KindVotes()
    kinds = [votes.add(operations)[0] for _ in range(64)]
    assert kinds[0] is GroupKind.UNKNOWN and set(kinds[1:]) == {GroupKind.TENSOR}
    assert len(looked) < 10
    renamed = tuple(replace(group, name=f"new {group.name}") for group in operations.groups)
    before = len(looked)
    votes.add(replace(operations, groups=renamed))
    assert len(looked) == before + 1, "new groups are looked at when they appear"


def test_peers_that_were_not_recorded_are_no_stage() -> None:
    """Of three stages, the first two are known."""
    operations = play(Layout(pipeline=3, data=2, steps=20))
    first = take_rows(operations, operations.rank < 4)
    finder = PathFinder()
    assert list(finder.find_all(first))
    assert finder.stages == {0: 0, 1: 0, 2: 1, 3: 1}


@pytest.mark.parametrize("seed", range(20))
def test_wild_times_leave_parts_that_are_finite_and_add_up(seed: int) -> None:
    random = np.random.default_rng(seed)
    operations = play(Layout(tensor=2, pipeline=2, steps=14, seed=seed))
    wild = random.random(len(operations)) < 0.2
    start = np.where(wild, random.integers(0, 1 << 60, len(operations)), operations.start_ns)
    size = np.where(wild, np.iinfo(np.int64).max, operations.bytes)
    changed = replace(operations, start_ns=start, stop_ns=np.maximum(operations.stop_ns, start + 1), bytes=size)
    for window in windows(changed):
        parts = where_steps_go([window], (0,))
        assert parts is not None
        assert all(np.isfinite(part.seconds) and part.seconds >= 0 for part in parts.parts)
        assert parts.step_seconds == pytest.approx(window.step_seconds, rel=1e-6)
        for each in parts.traffic:
            assert np.isfinite([each.bytes, each.transfer_seconds, each.bus_bytes_per_second or 0.0]).all()
