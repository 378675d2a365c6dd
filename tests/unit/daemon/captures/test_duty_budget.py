from __future__ import annotations

import pytest

from rankscope.daemon.captures.duty_cycle import DutySettings, cost_seconds, stride

SETTINGS = DutySettings(steps=2, period_seconds=600, budget_ratio=0.005)  # 3 s a period


def test_a_capture_costs_what_its_events_take_to_record() -> None:
    few, many = cost_seconds(1_000, 0.5), cost_seconds(100_000, 0.5)
    assert few == pytest.approx(0.1, abs=0.01)
    assert many == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize(("cost", "periods"), [(0.0, 1), (3.0, 1), (3.1, 2), (6.1, 4), (100.0, 64), (1e12, 1 << 20)])
def test_costly_captures_are_taken_every_power_of_two_periods(cost: float, periods: int) -> None:
    assert stride(cost, SETTINGS) == periods
