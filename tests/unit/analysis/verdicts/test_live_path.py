"""Verdicts on jobs whose ranks have different roles, window by window, as the detector gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.stats.robust import number_groups, occurrence, take_rows
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_picture import StepPicture
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import JobWindow, columns_of
from tests.support.step_programs import Fault, Layout, packed, play

WINDOW_NS = 1_000_000_000
RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"
LAYOUTS = {
    "tp2 pp2": Layout(tensor=2, pipeline=2, steps=150),
    "pp2 dp2": Layout(pipeline=2, data=2, steps=150),
    "tp2 pp2 dp2": Layout(tensor=2, pipeline=2, data=2, steps=120),
    "pairs": Layout(pipeline=3, data=2, pairs=True, steps=120),
}
MANY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))


def windows(operations: Operations) -> Iterator[JobWindow]:
    """The windows that the daemons of a job would send. Every step is in the window in which it ends."""
    steps, step = np.unique(operations.step, return_inverse=True)
    ends, begins = np.full(len(steps), 0), np.full(len(steps), np.iinfo(np.int64).max)
    np.maximum.at(ends, step, operations.stop_ns)
    np.minimum.at(begins, step, operations.start_ns)
    for number in range(int(begins[0] // WINDOW_NS), int(ends[-1] // WINDOW_NS)):
        inside = ends // WINDOW_NS == number
        if inside.any():
            rows = take_rows(operations, np.isin(operations.step, steps[inside]))
            yield window(rows, float((ends - begins)[inside].mean()) / 1e9, number)


def window(rows: Operations, step_seconds: float, number: int) -> JobWindow:
    steps = np.unique(rows.step)
    sent, columns = [], []
    for rank in rows.ranks:
        mine = take_rows(rows, rows.rank == rank)
        waited = float((mine.stop_ns - mine.start_ns).sum()) / 1e9 / len(steps)
        columns.append(
            {
                "rank": rank,
                "steps": len(steps),
                "self_steps": len(steps),
                "step_seconds": step_seconds,
                "wait_seconds": min(waited, step_seconds),
                "self_seconds": max(step_seconds - waited, 0.0),
                "host_seconds": 0.9 * step_seconds,
                "transfer_seconds": 0.001,
                "self_spread_ratio": 1.5,
            }
        )
        sent.append(packed(mine, rank, gpu_ns=17_000_000 * rank))
    return JobWindow(
        float(number + 1),
        1.0,
        len(rows.ranks),
        columns_of(columns),
        operations=lambda is_sample: sent[: 1 if is_sample else None],
    )


def verdicts(operations: Operations) -> list[Verdict]:
    detector = FleetDetector()
    return [detector.evaluate({"job": one})["job"] for one in windows(operations)]


@MANY
def test_a_healthy_job_raises_nothing(layout: Layout) -> None:
    """The last stage has more to do, and sums of waiting differ by stage."""
    given = verdicts(play(replace(layout, last_stage_ns=6_000_000)))
    assert {one.kind for one in given} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}
    assert given[-1].kind is Kind.HEALTHY


@MANY
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_slow_rank_is_named_with_its_cost_and_bound(layout: Layout, on_device: bool) -> None:
    rank = layout.world // 2
    slow = replace(layout, faults=(Fault(rank, 4_000_000, on_device=on_device),))
    given = verdicts(play(slow))
    assert {one.culprits for one in given} == {(), (rank,)}, "no other rank is ever named"
    last = given[-1]
    assert (last.kind, last.severity, last.culprits) == (Kind.SLOW_RANK, Severity.ALARM, (rank,))
    assert last.cause.bound == (DEVICE if on_device else HOST)
    usual, real = (float(play(one).stop_ns.max()) / one.steps for one in (layout, slow))
    assert last.impact_ratio == pytest.approx(1 - usual / real, abs=0.07)


def test_a_job_of_unmatched_operations_is_judged_by_sums() -> None:
    """All replays of a CUDA graph have the same sequence numbers."""
    operations = play(Layout(data=4, steps=150, faults=(Fault(2, 8_000_000),)))
    call, _ = number_groups(operations.rank, operations.group, operations.kind, operations.step)
    given = verdicts(replace(operations, sequence=occurrence(call)))
    assert (given[-1].kind, given[-1].severity, given[-1].culprits) == (Kind.SLOW_RANK, Severity.ALARM, (2,))


@MANY
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_rank_slow_in_every_tenth_step_is_named_alone(layout: Layout, on_device: bool) -> None:
    """Its waiting ranks pass their waits on: sums of waiting name several ranks."""
    layout, rank = replace(layout, steps=300), layout.world // 2
    slow = replace(layout, faults=(Fault(rank, 40_000_000, every=10, first_step=80, on_device=on_device),))
    given = verdicts(play(slow))
    assert {one.culprits for one in given} == {(), (rank,)}
    last = given[-1]
    assert (last.kind, last.severity, last.cause.bound) == (
        Kind.SLOW_RANK,
        Severity.ALARM,
        DEVICE if on_device else HOST,
    )
    assert last.cause.stalls.startswith("in every 10th step")
    always = replace(slow, faults=(replace(slow.faults[0], first_step=1),))
    usual, real = (float(play(one).stop_ns.max()) / one.steps for one in (layout, always))
    assert last.impact_ratio == pytest.approx(1 - usual / real, abs=0.07)


@MANY
def test_long_steps_of_all_ranks_name_nobody(layout: Layout) -> None:
    faults = tuple(Fault(rank, 40_000_000, every=10) for rank in range(layout.world))
    given = verdicts(play(replace(layout, faults=faults)))
    assert {one.kind for one in given} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}


@pytest.mark.parametrize("name", ["pp2_dp2_late_host", "pp2_dp2_healthy"])
def test_where_steps_go_is_known_while_a_job_runs(name: str) -> None:
    detector = FleetDetector()
    seen = []
    for one in windows(read_recording(RECORDINGS / f"{name}.npz").operations):
        verdict = detector.evaluate({"job": one})["job"]
        breakdown = detector.breakdown("job")
        if breakdown is not None:
            parts = {part.part for part in breakdown.parts}
            assert ("excess" in parts) == (verdict.kind is Kind.SLOW_RANK)
            assert breakdown.step_seconds == pytest.approx(sum(part.seconds for part in breakdown.parts))
            seen.append(breakdown)
    slow = name == "pp2_dp2_late_host"
    assert seen[0].step_seconds < 0.13 and (seen[-1].step_seconds > 0.3) == slow
    totals = [each.totals["data"].bytes for each in seen]
    assert totals == sorted(totals) and totals[-1] > 50 * seen[-1].traffic[1].bytes


def test_a_job_without_operations_has_no_breakdown() -> None:
    detector = FleetDetector()
    for one in windows(play(Layout(tensor=2, data=2, steps=40))):
        detector.evaluate({"job": replace(one, operations=lambda is_sample: [])})
    assert detector.breakdown("job") is None and detector.breakdown("another") is None


PIPELINE = Layout(pipeline=4, micro_batches=8, steps=160)


def test_a_rank_without_peers_is_compared_with_its_own_past() -> None:
    slow = replace(PIPELINE, faults=(Fault(2, 4_000_000, first_step=60),))
    given = verdicts(play(slow))
    assert {one.culprits for one in given} == {(), (2,)}
    assert (given[-1].kind, given[-1].cause.bound) == (Kind.SLOW_RANK, HOST)
    usual, real = (
        float(play(one).stop_ns.max()) / one.steps for one in (PIPELINE, replace(slow, faults=(Fault(2, 4_000_000),)))
    )
    assert given[-1].impact_ratio == pytest.approx(1 - usual / real, abs=0.07)


def test_longer_steps_of_all_ranks_are_no_fault_of_one() -> None:
    faults = tuple(Fault(rank, 3_000_000, first_step=60) for rank in range(4))
    given = verdicts(play(replace(PIPELINE, faults=faults)))
    assert {one.kind for one in given} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}


# Megatron-LM on ranks of one H200; in the faulty jobs, rank 2 is slow in every layer from some step on.
HEALTHY = ("pp2_dp2_healthy", "pp4_interleaved_healthy", "ep2_healthy", "deepspeed_pp4_healthy")
FAULTY = {
    "pp2_dp2_late_host": (HOST, 88, 340),
    "pp4_late_host": (HOST, 235, 480),
    "tp2_pp2_slow_gpu": (DEVICE, 240, 356),
    "tp4_slow_gpu": (DEVICE, 425, 671),
    "pp4_gpu_every_10th": (DEVICE, 229, 296),
}
SLOW_RANKS = {"tp4_slow_gpu": 1}


def pictures(name: str) -> list[tuple[Verdict, StepPicture | None]]:
    detector = FleetDetector()
    operations = read_recording(RECORDINGS / f"{name}.npz").operations
    return [(detector.evaluate({"job": one})["job"], detector.picture("job")) for one in windows(operations)]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_real_healthy_job_raises_nothing_and_shows_nobody(name: str) -> None:
    shown = pictures(name)
    assert {verdict.kind for verdict, _ in shown} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}
    assert shown[-1][0].kind is Kind.HEALTHY
    drawn = [picture for _, picture in shown if picture is not None]
    assert drawn
    assert all(picture.focus is None for picture in drawn)


@pytest.mark.parametrize("name", FAULTY)
def test_the_slow_rank_of_a_real_job_is_shown(name: str) -> None:
    """The milliseconds are the job's own iterations, before and after. The culprit is in focus while it is named."""
    bound, usual, slow = FAULTY[name]
    shown = pictures(name)
    assert {verdict.culprits for verdict, _ in shown} == {(), (SLOW_RANKS.get(name, 2),)}
    last, picture = shown[-1]
    assert last.cause.stalls == ("in every 10th step for 800 ms" if name.endswith("10th") else "")
    assert (last.kind, last.severity, last.cause.bound) == (Kind.SLOW_RANK, Severity.ALARM, bound)
    assert last.impact_ratio == pytest.approx(1 - usual / slow, abs=0.1)
    focused = [drawn.focus.rank if drawn and drawn.focus else None for _, drawn in shown]
    assert focused == [verdict.culprits[0] if verdict.culprits else None for verdict, _ in shown]
    assert picture is not None
    assert picture.focus is not None
    assert picture.focus.waiting or picture.focus.waiting_meanwhile
    assert picture.step > 60, "it is of the latest windows"
    assert picture.size_bytes < 100_000


def test_a_step_that_shows_more_of_the_loss_stays() -> None:
    faults = (Fault(2, 4_000_000), Fault(2, 60_000_000, every=40))
    detector, shown = FleetDetector(), list[int]()
    for one in windows(play(replace(LAYOUTS["pp2 dp2"], faults=faults))):
        detector.evaluate({"job": one})
        picture = detector.picture("job")
        if picture is not None and picture.focus is not None:
            shown.append(picture.step)
    later = [step for step in shown if step >= 40]
    assert set(later) == {40, 80, 120}
    assert len(later) > 3, "of windows between them, too"


def test_a_job_not_judged_by_the_path_has_no_picture() -> None:
    detector = FleetDetector()
    assert detector.picture("job") is None
    given = list(windows(play(LAYOUTS["pp2 dp2"])))
    for one in given:
        detector.evaluate({"job": one, "sums": replace(one, operations=lambda is_sample: ())})
    assert detector.picture("job") is not None
    assert detector.picture("sums") is None
    detector.forget("job")
    assert detector.picture("job") is None
