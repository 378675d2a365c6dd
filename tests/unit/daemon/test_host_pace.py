"""The pace of a rank's host, from its steps on the host and on the device: recorded on an H200 (four ranks, rank 2
sleeps in the second half of the slow runs), and of a model of CUDA's queue."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rankscope.daemon.samples import Column
from rankscope.daemon.steps.host_pace import MAX_STEPS, HostSteps
from tests.shared_data import H200

SAMPLED_EVERY = 16
QUEUE = 1024
OTHERS = (0, 1, 3)


def pace(host: Column, device: Column, ahead: Column) -> Mapping[str, float]:
    sampled = np.where(np.arange(len(host)) % SAMPLED_EVERY == 3, ahead, np.nan)
    found = HostSteps().followed_by(host, device, sampled, np.ones(len(host))).pace()
    assert found
    return found


def recorded(name: str, rank: int) -> Mapping[str, float]:
    with np.load(H200 / f"host_steps_{name}.npz") as steps:
        host, device = steps["host_us"][rank] * 1e-6, steps["device_us"][rank] * 1e-6
        waiting = steps["ahead_steps"][rank]
    ahead = [device[max(0, number - count + 1) : number + 1].sum() for number, count in enumerate(waiting.tolist())]
    return pace(host, device, np.array(ahead))


def modelled(
    launches: int, own: float, period: float = 0.06, steps: int = 150, synchronised_every: int = 0
) -> Mapping[str, float]:
    """A rank whose peers make it wait for a collective at the end of each step. A launch waits while the queue is
    full."""
    random = np.random.default_rng(0)
    ends = np.zeros(QUEUE)
    host = device = collective = 0.0
    borders = []
    for step in range(steps):
        between = own / launches * (1 + 0.05 * random.standard_normal())
        for place in range(launches):
            slot = (step * launches + place) % QUEUE
            host = max(host + between, ends[slot])
            device = max(device, host) + 0.002 / launches
            if place == launches - 1:
                collective = max(collective + period, device)
                device = collective
            ends[slot] = device
        if synchronised_every and step % synchronised_every == 0:
            host = max(host, device)
        borders.append((host, device))
    hosts, devices = np.array(borders).T
    return pace(np.diff(hosts), np.diff(devices), (devices - hosts)[1:])


@pytest.mark.parametrize("name", ["ddp_slow_host", "ddp_slow_host_3ms"])
def test_waiting_hosts_show_their_own_pace(name: str) -> None:
    """Without the fault, a step takes 4.2 ms."""
    for rank in OTHERS:
        found = recorded(name, rank)
        assert 0.0025 < found["host_quick_seconds"] < 0.0045
        assert found["host_gained_steps"] >= 3


def test_a_slow_host_is_slow_in_its_quickest_steps() -> None:
    found = recorded("ddp_slow_host_3ms", 2)
    assert found["host_quick_seconds"] > 0.006
    assert found["host_gained_steps"] < 3


def test_hosts_that_drift_apart_have_one_pace() -> None:
    found = [recorded("local_sgd", rank)["host_quick_seconds"] for rank in range(4)]
    assert max(found) < 1.2 * min(found)


@pytest.mark.parametrize(("launches", "own"), [(60, 0.004), (120, 0.055), (250, 0.03), (600, 0.004), (1100, 0.03)])
def test_a_full_queue_is_never_taken_for_a_slow_host(
    launches: int, own: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.daemon.steps.host_pace.MAX_STEPS", 100)  # without the first steps
    for synchronised_every in (0, 50):
        found = modelled(launches, own, synchronised_every=synchronised_every)
        assert found["host_gained_steps"] < 3 or found["host_quick_seconds"] == pytest.approx(own, rel=0.2)


def test_a_queue_that_fills_again_shows_the_pace() -> None:
    found = modelled(120, 0.004, synchronised_every=50)
    assert found["host_gained_steps"] >= 3
    assert found["host_quick_seconds"] == pytest.approx(0.004, rel=0.2)


def test_host_that_synchronises_every_step_gains_nothing() -> None:
    assert modelled(120, 0.004, synchronised_every=1)["host_gained_steps"] <= 1


def test_a_slower_device_is_no_gain_of_the_host() -> None:
    """It is as many steps ahead as before, which take longer."""
    device = np.repeat([0.03, 0.06], 100)
    host, ahead = np.append(np.full(5, 0.03), device)[:200], np.convolve(device, np.ones(5))[:200]
    assert pace(host, device, ahead)["host_gained_steps"] <= 1


def test_few_steps_or_steps_of_a_cpu_have_no_pace() -> None:
    def found(host: float, count: int, ahead: float = 0.1) -> Mapping[str, float]:
        columns = (np.full(count, value) for value in (host, 0.06, ahead, 1.0))
        return HostSteps().followed_by(*columns).pace()

    assert not found(0.004, 31)
    assert not found(float("nan"), 100)
    assert not found(0.004, 100, ahead=float("nan"))
    assert found(0.004, 100)


def test_only_the_last_steps_count() -> None:
    first, later = (np.full(MAX_STEPS, value) for value in (0.004, 0.06))
    ones = np.ones(MAX_STEPS)
    steps = HostSteps().followed_by(first, later, later, ones).followed_by(later, later, later, ones)
    found = steps.pace()
    assert found["host_quick_seconds"] == 0.06
