"""The GPU benchmarks' own arithmetic: nobody sees a wrong ruler on a machine that is seldom to be had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.aftermath import Bench, Course, Window, summary
from benchmarks.gpu.capturing import Captured, during_millis
from benchmarks.gpu.comparing import QUANTITIES, Load, compare, compare_moving_clock, integral
from benchmarks.gpu.jobs import TrainingJob
from benchmarks.gpu.lab import LabJob
from benchmarks.gpu.observing import Observed, Scrape, Smi
from benchmarks.gpu.overhead import block_medians
from benchmarks.gpu.reporting import Report
from benchmarks.gpu.unpacking import misfit
from benchmarks.gpu.verdict_rows import Cell, Facts, Row, Said, _slowdown_in_turns, judge
from benchmarks.gpu.verdicts import chosen
from rankscope.v1 import job_service_pb2, window_pb2
from tools.jobs.alternation import is_on
from tools.jobs.launcher import Steps
from tools.jobs.shapes import SHAPES

GPU = 'gpu="GPU-1",node="n"'
QUANTITY = {one.name: one for one in QUANTITIES}


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("grpcio-1.85.1-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("grpcio-1.85.1-cp311-cp311-manylinux2014_x86_64.whl", False),
        ("grpcio-1.85.1-cp312-cp312-manylinux2014_aarch64.whl", False),
        ("grpcio-1.85.1-cp312-cp312-musllinux_1_2_x86_64.whl", False),
        ("protobuf-7.36.2-cp310-abi3-manylinux2014_x86_64.whl", True),
        ("protobuf-7.36.2-cp313-abi3-manylinux2014_x86_64.whl", False),
        ("py_spy-0.4.3-py2.py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl", True),
        ("rich-15.0.0-py3-none-any.whl", True),
        ("numpy-2.4.6-cp312-cp312t-manylinux_2_28_x86_64.whl", False),
    ],
)
def test_a_wheel_is_taken_only_where_its_tags_fit(name: str, fits: bool) -> None:
    assert (misfit(Path(name), (3, 12), "x86_64") is None) is fits


def observed(clock: float, clocks_of_smi: list[str], watts: float = 690.0) -> Observed:
    series = {
        f'rankscope_gpu_clock_hertz{{{GPU},clock="memory"}}': 3.2e9,
        f'rankscope_gpu_clock_hertz{{{GPU},clock="sm"}}': clock,
        f"rankscope_gpu_power_watts{{{GPU}}}": watts,
    }
    scrapes = [Scrape(100 + 0.25 * number, series) for number in range(80)]
    smis = [
        Smi(100.0 + number, 0.1, {"clocks.sm": text, "power.draw": "700.00"})
        for number, text in enumerate(clocks_of_smi)
    ]
    return Observed(scrapes, smis)


def test_a_steady_clock_must_agree_exactly_in_both_sources() -> None:
    load = [Load("bf16-4096", 100.0, 112.0)]
    right = compare(QUANTITY["SM clock"], observed(1980e6, ["1980"] * 12), load)
    wrong = compare(QUANTITY["SM clock"], observed(1979e6, ["1980"] * 12), load)
    assert right.compared == right.agreed > 4
    assert (wrong.agreed, wrong.largest) == (0, 1e6)


def test_a_clock_that_moves_is_left_out_and_told() -> None:
    found = compare(QUANTITY["SM clock"], observed(1755e6, ["1755", "1800"] * 6), [Load("bf16-16384", 100.0, 112.0)])
    assert found.compared == 0
    assert found.moving > 4


def test_a_clock_that_moved_between_nvidia_smi_readings_is_omitted() -> None:
    seen = observed(1755e6, ["1800"] * 12)
    seen.clocks += [(100 + 0.02 * number, 1755.0 if number % 50 == 7 else 1800.0) for number in range(600)]
    load = [Load("bf16-16384", 100.0, 112.0)]
    assert compare(QUANTITY["SM clock"], seen, load).compared == 0
    found = compare_moving_clock(seen, load)
    assert (found.among, found.jitter_mhz) == (found.shown, (45.0, 45.0))
    assert found.shown > 20


def test_a_clock_that_nobody_else_saw_is_told() -> None:
    seen = observed(1754e6, ["1800"] * 12)
    seen.clocks += [(100 + 0.02 * number, 1800.0) for number in range(600)]
    assert compare_moving_clock(seen, [Load("bf16-16384", 100.0, 112.0)]).among == 0


def test_nvidia_smi_is_compared_with_nvml_only_at_steady_clock() -> None:
    said = {"clocks.sm": "1800"}
    smis = [Smi(100.0, 0.1, said, (1800.0, 1800.0)), Smi(101.0, 0.1, said, (1800.0, 1755.0)), Smi(102.0, 0.1, said)]
    smis.append(Smi(103.0, 0.1, said, (1755.0, 1755.0)))
    found = compare_moving_clock(Observed([], smis), [])
    assert (found.bracketed, found.same) == (2, 1)


def test_only_the_steady_part_of_a_load_is_compared() -> None:
    assert compare(QUANTITY["power"], observed(0, ["0"] * 12), [Load("idle", 100.0, 103.0)]).compared == 0


def test_power_may_differ_by_five_per_cent() -> None:
    load = [Load("bf16-4096", 100.0, 112.0)]
    near = compare(QUANTITY["power"], observed(0, ["0"] * 12, watts=666.0), load)
    far = compare(QUANTITY["power"], observed(0, ["0"] * 12, watts=660.0), load)
    assert near.agreed == near.compared > 4
    assert far.agreed == 0


def test_the_speed_of_a_load_leaves_out_its_beginning() -> None:
    chunks = [(10.0, 10.2, 5.0), (10.4, 10.6, 2.0), (10.6, 11.4, 8.0)]
    assert Load("bf16-1024", 10.0, 12.0, chunks).flops_per_second == pytest.approx(10.0)


def test_energy_is_power_over_time() -> None:
    assert integral([(0.0, 100.0), (1.0, 100.0), (3.0, 200.0)]) == pytest.approx(400.0)


def test_the_captured_steps_are_found_in_the_jobs_own_record(tmp_path: Path) -> None:
    """Steps of 10 ms, of which the fourth to sixth were captured; those took 12 ms on a device that lags behind."""
    lines, ends = [], [1000.0 + 0.01 * (number + 1) for number in range(10)]
    for number, end in enumerate(ends):
        millis = 12.0 if number in (3, 4, 5) else 10.0
        lines.append(f"{round(end * 1e9)} {round((end + 0.02) * 1e9)} {millis}\n")
    (tmp_path / "steps-0").write_text("".join(lines))
    job = TrainingJob((), tmp_path, shape=SHAPES["small"])
    entry = {"rank": 0, "start_unix_ms": round(ends[2] * 1e3), "steps": 3, "summary": {"span_seconds": 0.03}}
    one = Captured((), 0, {"ranks": [entry]}, "", 0.0, 0.0)
    assert np.allclose(during_millis(job, one), 12.0)
    entry["steps"] = None
    assert len(during_millis(job, one)) == 3


def test_flops_of_a_shape_are_those_of_its_matrix_products() -> None:
    """Forward by hand: four projections and two of four times the width, scores and their product with the values."""
    shape = SHAPES["large"]
    projections = 2 * shape.tokens * shape.width**2 * (3 + 1 + 4 + 4)
    attention = 2 * 2 * shape.tokens * shape.sequence * shape.width
    assert shape.flops_per_step == 3 * shape.layers * (projections + attention)


def test_results_that_are_written_can_be_read(tmp_path: Path) -> None:
    from benchmarks.gpu.reporting import Report

    report = Report("title", tmp_path, "name", 60)

    def breaks() -> None:
        report.add("a | b", "1", "≤ 2", True)
        raise ValueError("no such thing")

    report.part("breaks", breaks)
    report.part("has no time", breaks, 1000)
    assert report.finish() is True
    rows = json.loads((tmp_path / "name.json").read_text())["rows"]
    assert [row["met"] for row in rows] == [True, False, False]
    assert "no such thing" in rows[1]["measured"]
    assert "left out" in rows[2]["measured"]
    assert r"| a \| b | 1 | ≤ 2 | yes |" in (tmp_path / "name.md").read_text()


def course(name: str, *medians: float) -> Course:
    made = [Window("w", 0.0, 1000, one, one * 0.9, one, one, 0.01, 0.0) for one in medians]
    return Course(name, tuple(made))


def test_the_aftermath_of_a_capture_is_compared_with_uncaptured_jobs(tmp_path: Path) -> None:
    report = Report("t", tmp_path, "aftermath", 10)
    courses = [course("captured 1", 7.0, 7.7, 7.7), course("not captured 1", 6.0, 6.6), course("captured 2", 8.0, 8.8)]
    # Without a daemon, and without the flag: told, and not mixed with the others.
    courses += [course("captured 2, daemon stopped", 8.0, 16.0), course("without TEARDOWN_CUPTI", 7.0, 9.0)]
    summary(Bench(report, tmp_path, False, 12, 5, courses))
    found = report.raw["summary"]["median"]
    assert found["captured"] == pytest.approx([1.1, 1.1, 1.1])
    assert found["control"] == pytest.approx([1.1])
    assert found["captured_to_control"] == pytest.approx(1.0)
    assert not report.finish()


def test_a_job_that_stays_slower_misses_the_target(tmp_path: Path) -> None:
    report = Report("t", tmp_path, "aftermath", 10)
    courses = [course("captured 1", 7.0, 7.2), course("not captured 1", 6.0, 6.0)]
    summary(Bench(report, tmp_path, False, 12, 5, courses))
    assert report.finish()


FIRST, FAULT, LAST = 1000.0, 1011.0, 1030.0


def facts(healthy_ms: float = 20.0, faulty_ms: float = 80.0, ranks: int = 4) -> Facts:
    """Steps of a job that is slow from FAULT on."""
    ends, now = [], FIRST
    while now < LAST:
        now += (healthy_ms if now < FAULT else faulty_ms) / 1e3
        ends.append(now)
    millis = np.diff(np.array([FIRST, *ends])) * 1e3
    return Facts([Steps(np.array(ends), np.array(ends), millis)] * ranks, FAULT)


def said(
    kind: str, at: float, culprits: tuple[int, ...] = (), severity: str = "ALARM", step_ms: float = 80.0, **more: object
) -> Said:
    verdict = job_service_pb2.Verdict(
        kind=job_service_pb2.VerdictKind.Value(f"VERDICT_KIND_{kind}"),
        severity=job_service_pb2.Severity.Value(f"SEVERITY_{severity}"),
        culprits=culprits,
        cause=job_service_pb2.Cause(phase=str(more.get("phase", "forward")), frames=more.get("frames", ())),
        impact_ratio=more.get("impact", 0.75),
    )
    span = {"start_unix_nanos": round((at - 2) * 1e9), "end_unix_nanos": round(at * 1e9)}
    ranks = [window_pb2.RankWindow(**span) for _ in range(4)]
    return Said(at, job_service_pb2.JobStatus(verdict=verdict, step_seconds=step_ms / 1e3, ranks=ranks))


SLOW_LINE = [window_pb2.FrameShare(function="slow_host", file="framework_job.py", line=9)]


def test_a_right_alarm_in_time_meets_every_target() -> None:
    heard = [said("HEALTHY", 1006, severity="NONE", step_ms=20)]
    heard += [said("SLOW_RANK", 1016, (2,), "WARNING", frames=SLOW_LINE)]
    heard += [said("SLOW_RANK", at, (2,), frames=SLOW_LINE) for at in (1018, 1020, 1022)]
    row = judge(Cell("ddp", "host"), heard, facts())
    assert row.misses == []
    assert row.alarm_seconds == pytest.approx(7)
    assert row.true_impact_ratio == pytest.approx(0.75, abs=0.01)
    assert row.step_error_ratio == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(
    ("heard", "missed"),
    [
        ([said("SLOW_RANK", 1018, (1,), frames=SLOW_LINE)], "verdict"),
        ([said("HEALTHY", 1018, severity="NONE")], "verdict"),
        ([said("SLOW_RANK", 1009, (2,), frames=SLOW_LINE)], "verdict"),  # before there was a fault
        ([said("SLOW_RANK", 1028, (2,), frames=SLOW_LINE)], "late"),
        ([said("DATA_IMBALANCE", 1014), said("SLOW_RANK", 1018, (2,), frames=SLOW_LINE)], "said before"),
        ([said("SLOW_RANK", 1018, (2,), frames=SLOW_LINE, impact=0.6)], "impact"),
        ([said("SLOW_RANK", 1018, (2,), frames=SLOW_LINE, step_ms=76)], "step"),
        ([said("SLOW_RANK", 1018, (2,))], "cause"),
    ],
)
def test_each_way_to_be_wrong_is_told(heard: list[Said], missed: str) -> None:
    assert missed in judge(Cell("ddp", "host"), heard, facts()).misses


def test_a_slow_device_is_not_blamed_on_a_program_line() -> None:
    right = [said("SLOW_RANK", 1018, (2,), phase="device")]
    wrong = [said("SLOW_RANK", 1018, (2,), phase="device", frames=SLOW_LINE)]
    assert judge(Cell("ddp", "gpu"), right, facts()).misses == []
    assert judge(Cell("ddp", "gpu"), wrong, facts()).misses == ["cause"]


def test_a_healthy_job_must_be_called_healthy_and_nothing_else() -> None:
    calm = Facts(facts(20.0, 20.0).steps, None)
    heard = [said("INSUFFICIENT_DATA", 1004, severity="NONE"), said("HEALTHY", 1012, severity="NONE", step_ms=20)]
    assert judge(Cell("fsdp2", "none"), heard, calm).misses == []
    heard.insert(1, said("SLOW_RANK", 1008, (3,), "WARNING", step_ms=20))
    assert set(judge(Cell("fsdp2", "none"), heard, calm).misses) == {"verdict", "said before"}


@pytest.mark.parametrize(("faulty_ms", "must_find"), [(22.0, True), (20.2, False)])
def test_a_small_fault_must_be_found_only_if_costly(faulty_ms: float, must_find: bool) -> None:
    quiet = [said("HEALTHY", 1018, severity="NONE", step_ms=faulty_ms)]
    loud = [said("SLOW_RANK", 1018, (2,), step_ms=faulty_ms, phase="device", impact=0.1)]
    cell = Cell("fsdp2", "gpu10")
    assert (cell.kind, cell.slow_ratio) == ("gpu", 0.1)
    assert (judge(cell, loud, facts(20.0, faulty_ms)).misses == []) is must_find
    assert (judge(cell, quiet, facts(20.0, faulty_ms)).misses == []) is not must_find


def test_the_cost_of_a_small_fault_comes_from_alternating_steps() -> None:
    """The job gets slower by itself, by more than the fault costs, and every block begins with slow steps."""
    starts = [2 + 40 * block for block in range(21)]
    millis = np.linspace(20.0, 30.0, 40 * 20)
    for block in range(20):
        if is_on(block):
            millis[40 * block : 40 * (block + 1)] *= 1.10
        millis[40 * block : 40 * block + 15] = 90.0
    ends = FAULT + 5 + np.cumsum(millis) / 1e3
    steps = Steps(ends, ends, millis)
    taking_turns = Facts([steps] * 4, FAULT, turns_unix_seconds=FAULT + 5, first_steps=starts)
    slowdown = _slowdown_in_turns(taking_turns)
    assert slowdown is not None
    assert slowdown.low <= slowdown.ratio <= slowdown.high
    assert slowdown.ratio == pytest.approx(1.10, abs=0.01)


def test_every_cell_has_its_turn_before_the_second_round() -> None:
    names = [cell.name for cell in chosen("ddp:none,hf:input", 2, 2)]
    assert names == ["ddp-none-1", "hf-input-1", "ddp-none-2", "hf-input-2"]


def test_a_failed_cell_is_a_row_of_equal_width() -> None:
    failed = Row("ddp", "host", 1, failure="rank 0 ended with 1")
    assert len(failed.cells()) == len(judge(Cell("ddp", "host"), [], facts()).cells())
    assert failed.misses == ["failed"]


def test_a_job_is_known_by_its_port_alone(tmp_path: Path) -> None:
    job = LabJob((), tmp_path, 2958)
    assert job.is_named("127.0.0.1:2958@node-1")
    assert not job.is_named("127.0.0.1:29581@node-1")


def test_blocks_of_steps_are_paired_by_what_was_on() -> None:
    """Steps with the probe take 11 ms, others 10; the first ones of each block are still those of the block before."""
    plan = {"first_step": 100, "steps_per_block": 20, "blocks": 8}
    millis = np.full(300, 10.0)
    for block in range(8):
        begin = 100 + 20 * block - 1  # step 101 is the first of block 0, and line 99 of the record
        millis[begin + 5 : begin + 20] = 11.0 if is_on(block) else 10.0
        millis[begin : begin + 5] = 50.0
    on, off = block_medians([millis, millis], plan, "mean")
    assert (on, off) == ([11.0] * 4, [10.0] * 4)
    assert [is_on(block) for block in range(4)] == [False, True, True, False]
