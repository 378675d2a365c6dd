from __future__ import annotations

import math

import pytest

from rankscope.analysis.models.mfu import estimated_flops_per_second, estimated_hfu_ratio, pipe_peaks

PEAKS = pipe_peaks("NVIDIA H200")
HALF = {"hmma": 989e12}
MHZ = 1e6
IDLE = {"any": 0.0, "hmma": 0.0, "imma": 0.0, "dfma": 0.0}

# An H200 (driver 580), 15 November 2026: which pipe was busy for which share of the time, the SM clock in MHz, the
# TFLOP/s that the load measured of itself, and what the estimate has to be of those.
LOADS = [
    ("bf16-1024", "hmma", 0.130, 1980, 134.2, 0.958),
    ("bf16-4096", "hmma", 0.904, 1499, 663.7, 1.020),
    ("bf16-8192", "hmma", 0.935, 1448, 666.0, 1.015),
    ("bf16-16384", "hmma", 0.970, 1402, 673.3, 1.009),
    ("fp16-8192", "hmma", 0.937, 1361, 639.2, 0.997),
    ("fp64-4096", "dfma", 0.947, 1631, 52.2, 1.001),
]


@pytest.mark.parametrize(("name", "pipe", "ratio", "clock", "tflops", "expected"), LOADS, ids=[one[0] for one in LOADS])
def test_known_loads_are_met_within_five_percent(
    name: str, pipe: str, ratio: float, clock: float, tflops: float, expected: float
) -> None:
    active = IDLE | {"any": ratio, pipe: ratio}
    estimate = estimated_flops_per_second(active, PEAKS, clock * MHZ, 1980 * MHZ)
    assert estimate is not None
    assert estimate / (tflops * 1e12) == pytest.approx(expected, abs=0.004)
    assert abs(estimate / (tflops * 1e12) - 1) <= 0.05
    assert estimated_hfu_ratio(active, clock * MHZ, 1980 * MHZ) == pytest.approx(ratio * clock / 1980)


def test_a_transformer_step_is_met_within_eight_percent() -> None:
    """H200: 8 layers at 57.4 % and 1755 MHz while 520 to 530 TFLOP/s were counted."""
    estimate = estimated_flops_per_second(IDLE | {"any": 0.574, "hmma": 0.574}, PEAKS, 1755 * MHZ, 1980 * MHZ)
    assert estimate == pytest.approx(525e12, rel=0.05)


def test_under_the_power_cap_pipe_activity_alone_overestimates() -> None:
    assert 0.970 * 989 > 1.4 * 673.3


def test_several_pipes_add_up_each_with_its_own_peak() -> None:
    active = {"any": 0.7, "hmma": 0.4, "imma": 0.1, "dfma": 0.2}
    estimate = estimated_flops_per_second(active, {"hmma": 1000e12, "dfma": 60e12}, 1e9, 2e9)
    assert estimate == pytest.approx((400e12 + 12e12) / 2)
    assert estimated_hfu_ratio(active, 1e9, 2e9) == pytest.approx(0.3)


def test_integer_work_is_no_flops() -> None:
    assert estimated_flops_per_second(IDLE | {"any": 0.744, "imma": 0.744}, PEAKS, 1804 * MHZ, 1980 * MHZ) == 0.0


def test_pipes_that_are_not_told_apart_count_as_half_precision() -> None:
    assert estimated_flops_per_second({"any": 0.5}, PEAKS, 1e9, 2e9) == pytest.approx(0.25 * 989e12)
    assert estimated_hfu_ratio({"any": 0.5}, 1e9, 2e9) == 0.25
    # Without that of half precision, it is what the others leave.
    rest = estimated_flops_per_second({"any": 0.5, "dfma": 0.3}, {"hmma": 1000e12, "dfma": 10e12}, 2e9, 2e9)
    assert rest == pytest.approx(203e12)


def test_fp32_work_outside_the_tensor_pipe_is_zero_not_unknown() -> None:
    assert estimated_flops_per_second(IDLE, PEAKS, 1980 * MHZ, 1980 * MHZ) == 0.0


def test_an_unknown_peak_matters_only_for_an_active_pipe() -> None:
    assert estimated_flops_per_second({"hmma": 0.5, "dfma": 0.0}, HALF, 2e9, 2e9) == pytest.approx(494.5e12)
    assert estimated_flops_per_second({"hmma": 0.5, "dfma": 0.1}, HALF, 2e9, 2e9) is None


@pytest.mark.parametrize(
    ("active", "peaks", "clock", "highest"),
    [
        ({}, HALF, 1e9, 2e9),
        ({"imma": 0.5}, HALF, 1e9, 2e9),
        ({"any": 0.5}, {}, 1e9, 2e9),
        ({"any": 0.5}, {"hmma": None}, 1e9, 2e9),
        ({"any": 0.0}, {"hmma": None}, 1e9, 2e9),
        ({"any": 0.5}, HALF, None, 2e9),
        ({"any": 0.5}, HALF, 1e9, None),
        ({"any": 0.5}, HALF, 1e9, 0.0),
        ({"any": math.nan}, HALF, 1e9, 2e9),
        ({"any": 1.5}, HALF, 1e9, 2e9),
        ({"any": 0.5}, {"hmma": math.inf}, 1e9, 2e9),
        ({"any": 0.5}, HALF, -1.0, 2e9),
    ],
)
def test_what_is_not_known_or_not_sensible_gives_no_estimate(
    active: dict[str, float], peaks: dict[str, float | None], clock: float | None, highest: float | None
) -> None:
    assert estimated_flops_per_second(active, peaks, clock, highest) is None


def test_a_boost_above_the_maximum_clock_counts_as_the_peak() -> None:
    assert estimated_hfu_ratio({"hmma": 1.0}, 2.1e9, 2.0e9) == 1.0


@pytest.mark.parametrize(
    ("name", "half_tflops", "double_tflops"),
    [
        ("NVIDIA H200", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA B200", 2250, 37),
        ("NVIDIA L4", 121, None),
        ("Some GPU", None, None),
    ],
)
def test_each_pipe_has_the_peak_of_its_number_format(
    name: str, half_tflops: float | None, double_tflops: float | None
) -> None:
    told = {pipe: None if peak is None else peak / 1e12 for pipe, peak in pipe_peaks(name).items()}
    assert told == {"hmma": half_tflops, "dfma": double_tflops}
