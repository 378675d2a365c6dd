"""The pace of a rank's host, from steps as they were timed on the host and on the device."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.daemon.steps.host_pace import MAX_STEPS, HostSteps

OWN, STEP = 0.004, 0.064


def after(host: list[float], device: list[float]) -> HostSteps:
    return HostSteps().followed_by(np.array(host), np.array(device), np.ones(len(host)))


def test_quick_steps_show_the_pace_behind_a_full_queue() -> None:
    """Of every twenty steps, one finds room in the queue."""
    host = ([OWN] + [STEP + (STEP - OWN) / 19] * 19) * 10
    pace = after(host, [STEP] * 200).pace()
    assert pace is not None
    assert pace.quick_seconds == pytest.approx(OWN)
    assert pace.gained_steps >= 0.9


def test_host_that_synchronises_every_step_gains_nothing() -> None:
    device = [STEP * (1 + 0.3 * (number % 3)) for number in range(100)]
    pace = after(device, device).pace()
    assert pace is not None
    assert pace.gained_steps == pytest.approx(0.0)


def test_host_that_fills_an_empty_queue_gains_steps() -> None:
    pace = after([STEP] * 50 + [OWN] * 8 + [STEP] * 50, [STEP] * 108).pace()
    assert pace is not None
    assert pace.gained_steps == pytest.approx(8 * (STEP - OWN) / STEP)


def test_few_steps_or_steps_of_a_cpu_have_no_pace() -> None:
    assert after([OWN] * 31, [STEP] * 31).pace() is None
    assert after([float("nan")] * 100, [STEP] * 100).pace() is None
    assert after([0.0] * 100, [0.0] * 100).pace() is None


def test_only_the_last_steps_count() -> None:
    steps = after([OWN] * MAX_STEPS, [STEP] * MAX_STEPS)
    later = steps.followed_by(np.full(MAX_STEPS, STEP), np.full(MAX_STEPS, STEP), np.ones(MAX_STEPS)).pace()
    assert later is not None
    assert later.quick_seconds == STEP
    assert later.gained_steps == 0.0


def test_a_record_of_several_steps_counts_as_many() -> None:
    one = HostSteps().followed_by(np.full(40, OWN), np.full(40, STEP), np.full(40, 2.0)).pace()
    assert one is not None
    assert one.gained_steps == pytest.approx(2 * 39 * (STEP - OWN) / STEP)
