"""Ranks whose files are on a FUSE mount that does not answer. What touches one of them waits, and cannot be killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.security.bystander import Bystander
from tests.security.dead_mount import rank_with_dead_mount
from tests.security.metrics_reading import value
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse here")


def test_an_unkillable_py_spy_is_left_behind_and_reported(bystander: Bystander, tmp_path: Path) -> None:
    with bystander.under_attack() as watch, rank_with_dead_mount("library", tmp_path / "rank", bystander):
        wait_until(lambda: value(bystander, "rankscope_daemon_stuck_samplers") == 1, lambda: bystander.log)
        watch.observe()
        assert value(bystander, "rankscope_daemon_stuck_samplers") == 1  # its rank is not tried again
        assert value(bystander, "rankscope_rank_problem", source="stacks", kind="stuck") == 1
    # The mount is gone, and with it what waited for it.
    wait_until(lambda: value(bystander, "rankscope_daemon_stuck_samplers") == 0, lambda: bystander.log)


def test_the_attributes_of_a_ring_named_descriptor_are_not_read(bystander: Bystander, tmp_path: Path) -> None:
    with bystander.under_attack() as watch, rank_with_dead_mount("ring", tmp_path / "rank", bystander, is_rank=False):
        watch.observe()


def test_a_process_with_an_unreadable_environment_is_reported_and_skipped(bystander: Bystander, tmp_path: Path) -> None:
    with bystander.under_attack() as watch, rank_with_dead_mount("exec", tmp_path / "rank", bystander):
        wait_until(lambda: "block those who read them" in bystander.log, lambda: bystander.log)
        watch.observe()
