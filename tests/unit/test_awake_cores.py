from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tools.awake_cores import awake_cores


def yields(pid: int) -> bool:
    autogroup = Path(f"/proc/{pid}/autogroup")  # the kernel may have none
    is_last = not autogroup.exists() or autogroup.read_text().split()[-1] == "19"
    return os.sched_getscheduler(pid) == os.SCHED_IDLE and is_last


def test_every_core_has_a_yielding_loop_until_the_context_ends() -> None:
    with awake_cores() as pids:
        wait_until(lambda: all(map(yields, pids)), lambda: [os.sched_getscheduler(pid) for pid in pids])
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core} for core in os.sched_getaffinity(0)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
