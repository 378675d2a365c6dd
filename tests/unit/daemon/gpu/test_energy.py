from __future__ import annotations

import pytest

from rankscope.daemon.gpu.nvml_counters import EnergyMeter


def test_between_readings_of_the_counter_power_over_time_is_added() -> None:
    meter = EnergyMeter()
    meter.draw(100.0, 10.0)
    meter.count(5000.0)
    assert meter.total_joules() == 5000.0
    meter.draw(300.0, 11.0)
    meter.draw(300.0, 12.0)
    assert meter.total_joules() == 5000 + 200 + 300
    meter.count(5520.0)
    assert meter.total_joules() == 5520.0


def test_the_total_waits_for_the_counter_after_an_overestimate() -> None:
    meter = EnergyMeter()
    meter.count(5000.0)
    meter.draw(700.0, 0.0)
    meter.draw(700.0, 10.0)
    assert meter.total_joules() == 12_000.0
    meter.count(11_500.0)
    assert meter.total_joules() == 12_000.0
    meter.draw(400.0, 11.0)
    assert meter.total_joules() == 12_050.0  # 11 500 and the 550 J since


def test_a_counter_that_was_reset_is_followed() -> None:
    """After the driver was reloaded."""
    meter = EnergyMeter()
    meter.count(5000.0)
    assert meter.total_joules() == 5000.0
    meter.count(20.0)
    assert meter.total_joules() == 20.0


def test_opening_the_library_again_takes_nothing_back() -> None:
    """Prometheus would take it for a counter that restarted, and add all of it once more."""
    meter = EnergyMeter()
    meter.count(5000.0)
    meter.draw(700.0, 0.0)
    meter.draw(700.0, 1.0)
    assert meter.total_joules() == 5700.0
    meter.count(5600.0)
    assert meter.total_joules() == 5700.0


def test_nothing_is_added_for_a_gap_or_without_power() -> None:
    meter = EnergyMeter()
    meter.count(5000.0)
    meter.draw(700.0, 0.0)
    meter.draw(700.0, 60.0)
    meter.draw(None, 61.0)
    meter.draw(700.0, 62.0)
    assert meter.total_joules() == 5000.0
    meter.count(47_000.0)
    assert meter.total_joules() == 47_000.0


def test_without_a_counter_there_is_no_total() -> None:
    meter = EnergyMeter()
    meter.draw(700.0, 0.0)
    meter.draw(700.0, 1.0)
    meter.count(None)
    assert meter.total_joules() is None


@pytest.mark.parametrize("watts", [650.0, 700.0, 750.0])
def test_any_stretch_is_within_five_percent_of_the_counter(watts: float) -> None:
    """The H200's power reading may be off by some per cent against its counter."""
    meter, told, used = EnergyMeter(), [], 0.0
    for second in range(200):
        used += 0.0 if second == 0 else 720.0
        meter.draw(watts, float(second))
        if second % 30 == 0:
            meter.count(used)
        told.append(meter.total_joules() or 0.0)
    assert told == sorted(told)
    for start in range(134):
        assert (told[start + 66] - told[start]) / (66 * 720) == pytest.approx(1, abs=0.05)
