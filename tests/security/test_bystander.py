"""The harness itself: a daemon that does not work fails it, and without an attack it passes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.security.bystander import Bystander


def test_a_daemon_that_is_stopped_fails_the_check(bystander: Bystander) -> None:
    try:
        with pytest.raises(AssertionError, match="windows were lost"), bystander.under_attack() as watch:
            os.kill(bystander.process.pid, signal.SIGSTOP)
            watch.observe(6.0)
    finally:
        os.kill(bystander.process.pid, signal.SIGCONT)


def test_without_an_attack_the_job_is_watched_within_all_limits(bystander: Bystander) -> None:
    with bystander.under_attack() as watch:
        watch.observe()
