"""Seconds per reason, from bits that are looked at and counters that the driver keeps."""

from __future__ import annotations

import pytest

from rankscope.daemon.gpu.nvml_counters import REASONS, ThrottleClock

POWER_CAP, HW_THERMAL = REASONS["power_cap"], REASONS["hw_thermal"]


def test_a_bit_counts_between_the_readings_that_show_it() -> None:
    clock = ThrottleClock()
    for at, mask in ((10.0, 0), (11.0, HW_THERMAL), (13.0, HW_THERMAL | POWER_CAP), (14.0, 0)):
        clock.add(mask, {}, at)
    assert clock.seconds["hw_thermal"] == pytest.approx(0.5 + 2.0 + 0.5)
    assert clock.seconds["power_cap"] == pytest.approx(1.0 + 0.5)
    assert clock.seconds["idle"] == 0.0
    assert set(clock.seconds) == set(REASONS)


def test_the_drivers_counter_sees_what_no_reading_did() -> None:
    clock = ThrottleClock()
    clock.add(0, {"power_cap": 5_000_000_000}, 10.0)
    clock.add(0, {"power_cap": 5_300_000_000}, 11.0)
    assert clock.seconds["power_cap"] == pytest.approx(0.3)


def test_a_jumping_counter_adds_at_most_the_elapsed_time() -> None:
    clock = ThrottleClock()
    clock.add(0, {"power_cap": 5_000_000_000}, 10.0)
    clock.add(0, {"power_cap": 900_000_000_000}, 11.0)
    assert clock.seconds["power_cap"] == pytest.approx(1.2)
    clock.add(POWER_CAP, {"power_cap": 0}, 12.0)
    assert clock.seconds["power_cap"] == pytest.approx(1.7)


def test_a_gap_counts_for_nothing() -> None:
    clock = ThrottleClock()
    clock.add(POWER_CAP, {}, 10.0)
    clock.forget_last()
    clock.add(POWER_CAP, {}, 500.0)
    assert clock.seconds["power_cap"] == 0.0
    clock.add(None, {}, 501.0)
    clock.add(POWER_CAP, {}, 502.0)
    assert clock.seconds["power_cap"] == 0.0
