from __future__ import annotations

import math

import pytest

from rankscope.analysis.tensor_estimate import estimated_flops_per_second, estimated_hfu_ratio

PEAK = 989e12
MHZ = 1e6


def test_a_matmul_under_the_power_cap_is_met_within_five_percent() -> None:
    """H200, bf16 matmul of 8192: 92.4 % of the tensor pipe at 677 TFLOP/s. The pipe alone would say 914."""
    # 692 of 989 TFLOP/s at 92.4 % is a clock of 1499 MHz.
    estimate = estimated_flops_per_second(0.924, PEAK, 1499 * MHZ, 1980 * MHZ)
    assert estimate == pytest.approx(677e12, rel=0.05)
    assert 0.924 * PEAK > 1.3 * 677e12


def test_a_transformer_step_is_met_within_five_percent() -> None:
    """H200, 8 layers of bf16: 57.4 % at 1755 of 1980 MHz while 520 to 530 TFLOP/s were counted."""
    assert estimated_flops_per_second(0.574, PEAK, 1755 * MHZ, 1980 * MHZ) == pytest.approx(525e12, rel=0.05)


def test_fp32_work_that_leaves_the_tensor_pipe_alone_is_zero_and_not_unknown() -> None:
    assert estimated_flops_per_second(0.0, PEAK, 1980 * MHZ, 1980 * MHZ) == 0.0


@pytest.mark.parametrize(
    "figures",
    [
        (None, PEAK, 1e9, 2e9),
        (0.5, None, 1e9, 2e9),
        (0.5, PEAK, None, 2e9),
        (0.5, PEAK, 1e9, None),
        (0.5, PEAK, 1e9, 0.0),
        (math.nan, PEAK, 1e9, 2e9),
        (1.5, PEAK, 1e9, 2e9),
        (0.5, math.inf, 1e9, 2e9),
        (0.5, PEAK, -1.0, 2e9),
    ],
)
def test_what_is_not_known_or_not_sensible_gives_no_estimate(figures: tuple[float | None, ...]) -> None:
    assert estimated_flops_per_second(*figures) is None


def test_a_boost_above_the_maximum_is_no_more_than_the_peak() -> None:
    assert estimated_hfu_ratio(1.0, 2.1e9, 2.0e9) == 1.0
