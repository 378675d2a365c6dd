"""The model of steps and memory by batch size, on numbers."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.models.batch_size import MAX_BATCH, BatchError, BatchModel, Point, answer, fit

GB = 1e9


def device_bound(*batches: int, fixed: float = 20_000.0, each: float = 10_000.0) -> list[Point]:
    """Steps of 20 ms and 10 ms per sample; 2 GB and 0.5 GB per sample."""
    return [Point(batch, fixed + each * batch, None, 2 * GB + 0.5 * GB * batch) for batch in batches]


def host_bound(*batches: int, host: float = 12_000.0, each: float = 100.0) -> list[Point]:
    """The device takes 0.1 ms per sample, and the host 12 ms."""
    return [Point(batch, max(host, each * batch), each * batch) for batch in batches]


def step_of(model: BatchModel, batch: int) -> int:
    return round(model.step.at(batch))


def test_two_points_give_the_line_through_them() -> None:
    model = fit(device_bound(8, 16))
    assert step_of(model, 64) == 20_000 + 10_000 * 64
    assert model.memory is not None and model.memory.at(64) == pytest.approx(34 * GB)
    assert (model.step_check, model.memory_check, model.holds) == (None, None, True)


def test_order_does_not_matter() -> None:
    assert fit(device_bound(32, 8, 16)) == fit(device_bound(8, 16, 32))


def test_a_third_point_tells_the_error_and_where() -> None:
    points = device_bound(8, 16, 32)
    points[2] = dataclasses.replace(points[2], step_us=1.05 * points[2].step_us)
    model = fit(points)
    assert model.step_check is not None and 0.02 < model.step_check.error_ratio < 0.1 and model.holds


def test_an_error_above_the_limit_says_nothing_about_steps() -> None:
    points = device_bound(8, 16, 32)
    points[1] = dataclasses.replace(points[1], step_us=1.5 * points[1].step_us)
    model = fit(points)
    assert model.step_check is not None and model.step_check.error_ratio > 0.1 and not model.holds
    found = answer(model, 80 * GB)
    assert (found.rows, found.saturated_at, found.best_batch, found.largest_batch) == ((), None, None, 140)


def test_the_device_below_the_hosts_time_gives_the_knee() -> None:
    """Both points take 12 ms; their traces show 0.8 and 1.6 ms of work."""
    model = fit(host_bound(8, 16))
    assert model.step.at(64) == 12_000 and step_of(model, 256) == 25_600
    assert answer(model).host_bound_below == 120


def test_host_time_that_wanders_does_not_break_the_model() -> None:
    steps = {8: 9e3, 16: 12e3, 32: 11e3}
    model = fit([dataclasses.replace(point, step_us=steps[point.batch]) for point in host_bound(*steps)])
    assert model.holds and model.step.floor == 11_000 and model.host_us == (9_000, 12_000)


def test_numbers_alone_show_a_floor_from_two_level_points() -> None:
    model = fit([Point(batch, max(12_000, 750.0 * batch)) for batch in (4, 8, 32, 64)])
    assert model.step.floor == 12_000 and step_of(model, 128) == 96_000 and model.holds


def test_growth_within_the_noise_is_none() -> None:
    assert not fit([Point(8, 10_000), Point(16, 10_100)]).step.grows
    assert fit([Point(8, 10_000), Point(16, 10_400)]).step.grows


def test_a_step_that_shrinks_says_nothing_about_larger_batches() -> None:
    model = fit([Point(8, 14_700), Point(16, 12_900)])
    found = answer(model)
    assert not model.step.grows and [row.batch for row in found.rows] == [8, 16]
    assert (found.saturated_at, found.best_batch) == (None, None)


def test_a_number_at_the_hosts_time_is_no_device_time() -> None:
    """Only one of the two points tells what the device does."""
    assert not fit([Point(8, 12_000, 3_000), Point(16, 12_100)]).step.grows


def test_memory_that_does_not_grow_is_no_model() -> None:
    model = fit([Point(8, 10_000, None, 3 * GB), Point(16, 20_000, None, 2 * GB)])
    assert model.memory is None and model.memory_reason == "memory does not grow from batch 8 to 16"
    assert answer(model, 80 * GB).largest_batch is None


def test_memory_of_one_point_is_no_model() -> None:
    model = fit([Point(8, 10_000, None, 3 * GB), Point(16, 20_000)])
    assert model.memory is None and "fewer than two" in model.memory_reason


def test_the_largest_batch_leaves_a_margin() -> None:
    """(72 GB − 2 GB) ÷ 0.5 GB."""
    found = answer(fit(device_bound(8, 16)), 80 * GB)
    assert (found.usable_bytes, found.largest_batch, found.largest_power_of_two) == (72 * GB, 140, 128)


def test_nothing_fits_where_the_fixed_part_does_not() -> None:
    found = answer(fit(device_bound(8, 16)), 2 * GB)
    assert (found.largest_batch, found.largest_power_of_two, found.rows, found.best_batch) == (0, 0, (), None)


def test_throughput_is_saturated_where_doubling_brings_little() -> None:
    model = fit(device_bound(1, 2))
    found = answer(model)
    at = found.saturated_at
    assert at == 20  # 9.5 times fixed ÷ per sample, rounded up
    assert model.samples_per_second(2 * at) / model.samples_per_second(at) - 1 < 0.05
    assert model.samples_per_second(2 * at - 2) / model.samples_per_second(at - 1) - 1 >= 0.05
    assert found.best_batch == 32


def test_the_best_batch_is_no_larger_than_what_fits() -> None:
    found = answer(fit(device_bound(1, 2)), 10 * GB)
    assert (found.largest_batch, found.best_batch) == (14, 8)


def test_gain_is_against_half_the_batch() -> None:
    first, second, *_ = answer(fit(device_bound(8, 16))).rows
    assert first.gain_ratio is None and second.gain_ratio is not None
    assert second.gain_ratio == pytest.approx((16 / 180) / (8 / 100) - 1)


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([Point(8, 1.0)], "one batch does not tell"),
        ([], "one batch does not tell"),
        ([Point(8, 1.0), Point(8, 2.0)], "batch 8 is given twice"),
        ([Point(0, 1.0), Point(8, 2.0)], "batch 0: a batch has 1 to"),
        ([Point(-4, 1.0), Point(8, 2.0)], "batch -4: a batch has 1 to"),
        ([Point(MAX_BATCH + 1, 1.0), Point(8, 2.0)], "a batch has 1 to"),
        ([Point(4, math.nan), Point(8, 2.0)], "batch 4: its step is not a number above zero"),
        ([Point(4, math.inf), Point(8, 2.0)], "batch 4: its step is not"),
        ([Point(4, 0.0), Point(8, 2.0)], "batch 4: its step is not"),
        ([Point(4, 1.0, math.nan), Point(8, 2.0)], "batch 4: its device time is not"),
        ([Point(4, 1.0, None, -1.0), Point(8, 2.0)], "batch 4: its memory is not"),
    ],
)
def test_what_is_no_measurement_is_refused(points: list[Point], reason: str) -> None:
    with pytest.raises(BatchError, match=reason):
        fit(points)


AMOUNTS = st.floats(1e-6, 1e15)
POINTS = st.builds(Point, st.integers(1, MAX_BATCH), AMOUNTS, st.none() | AMOUNTS, st.none() | AMOUNTS)


@given(st.lists(POINTS, min_size=2, max_size=6, unique_by=lambda point: point.batch), st.none() | AMOUNTS)
def test_whatever_was_measured_the_answers_are_numbers(points: list[Point], device_bytes: float | None) -> None:
    model = fit(points)
    found = answer(model, device_bytes)
    for row in found.rows:
        assert row.step_us > 0 and math.isfinite(row.samples_per_second)
        assert row.gain_ratio is None or math.isfinite(row.gain_ratio)
    assert found.largest_batch is None or 0 <= found.largest_batch <= MAX_BATCH
    assert len(found.rows) <= 12
