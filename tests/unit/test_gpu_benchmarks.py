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
from benchmarks.gpu.observing import Observed, Scrape, Smi
from benchmarks.gpu.reporting import Report
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.unpacking import misfit

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


def test_a_clock_that_holds_still_must_be_the_same_in_both() -> None:
    load = [Load("bf16-4096", 100.0, 112.0)]
    right = compare(QUANTITY["SM clock"], observed(1980e6, ["1980"] * 12), load)
    wrong = compare(QUANTITY["SM clock"], observed(1979e6, ["1980"] * 12), load)
    assert right.compared == right.agreed > 4
    assert (wrong.agreed, wrong.largest) == (0, 1e6)


def test_a_clock_that_moves_is_left_out_and_told() -> None:
    found = compare(QUANTITY["SM clock"], observed(1755e6, ["1755", "1800"] * 6), [Load("bf16-16384", 100.0, 112.0)])
    assert found.compared == 0
    assert found.moving > 4


def test_a_clock_that_moved_between_two_looks_of_nvidia_smi_is_left_out_too() -> None:
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


def test_nvidia_smi_is_held_against_nvml_only_where_the_clock_stood_still_meanwhile() -> None:
    said = {"clocks.sm": "1800"}
    smis = [Smi(100.0, 0.1, said, (1800.0, 1800.0)), Smi(101.0, 0.1, said, (1800.0, 1755.0)), Smi(102.0, 0.1, said)]
    smis.append(Smi(103.0, 0.1, said, (1755.0, 1755.0)))
    found = compare_moving_clock(Observed([], smis), [])
    assert (found.bracketed, found.same) == (2, 1)


def test_nothing_outside_of_the_steady_part_of_a_load_is_compared() -> None:
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
    job = TrainingJob((), tmp_path, "run", SHAPES["small"])
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


def test_what_a_capture_left_behind_is_held_against_jobs_without_one(tmp_path: Path) -> None:
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
