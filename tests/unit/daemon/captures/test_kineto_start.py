"""Keeping a start away from the moments at which libkineto would lose it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.daemon.captures.kineto.config import SAFE_SECONDS, Pasts, common_start, safe_start, slack_seconds

SECONDS = st.integers(0, 10_000_000).map(lambda millis: 1_700_000_000 + millis / 1000)


@given(start=SECONDS, look=SECONDS)
def test_a_safe_start_leaves_slack_and_is_hardly_earlier(start: float, look: float) -> None:
    safe = safe_start(start, look)
    assert slack_seconds(safe, look) >= SAFE_SECONDS - 1e-6
    assert start - SAFE_SECONDS - 0.02 <= safe <= start


def test_a_start_just_after_a_look_moves_before_it() -> None:
    assert safe_start(100.9, 7.0) == 100.9
    assert safe_start(100.05, 7.0) == pytest.approx(99.99)


@given(earliest=SECONDS, looks=st.lists(SECONDS, max_size=8))
def test_a_common_start_is_soon_and_no_worse_than_earliest(earliest: float, looks: list[float]) -> None:
    start = common_start(earliest, looks)
    assert earliest <= start <= earliest + 0.61
    worst = min((slack_seconds(start, look) for look in looks), default=1.0)
    before = min((slack_seconds(earliest, look) for look in looks), default=1.0)
    assert worst >= min(before, 0.35) - 1e-6


def test_a_common_start_avoids_the_looks_of_all() -> None:
    looks = [0.0, 0.1, 0.3]
    start = common_start(100.05, looks)
    assert start == pytest.approx(100.65)  # 0.35 s after the last of them
    assert all(slack_seconds(start, look) >= SAFE_SECONDS for look in looks)


def test_looks_follow_the_first_configuration_and_recording_ends() -> None:
    pasts, process = Pasts(), (7, 100)
    assert pasts.look(process, 50.25) == 50.25, "its thread begins now"
    pasts.handed(process, 50.25, end=60.5)
    assert (pasts.look(process, 55.0), pasts.busy_until(process)) == (50.25, 60.5)
    pasts.recorded(process, 60.5)
    assert (pasts.look(process, 70.0), pasts.busy_until(process)) == (60.5, 0.0)
    pasts.refused(process)
    assert pasts.look(process, 70.0) is None
    assert pasts.look((7, 101), 70.0) == 70.0, "another process with that pid"


def test_what_is_known_of_processes_is_bounded() -> None:
    pasts = Pasts()
    for pid in range(5000):
        pasts.handed((pid, 1), 0.0, end=1.0)
    assert pasts.busy_until((0, 1)) == 0.0
    assert pasts.busy_until((4999, 1)) == 1.0
