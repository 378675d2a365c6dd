"""What tests of the demo's job ask the kernel about its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def cpu_share(pid: int, seconds: float) -> float:
    """Cores that the process used over that long."""
    start, before = time.monotonic(), cpu_seconds(pid)
    wait_for(lambda: time.monotonic() > start + seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - start)


def cpu_seconds(pid: int) -> float:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state(pid: int) -> str:
    return stat_fields(pid)[0]


def stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def wait_for(condition: Callable[[], bool], timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """A zombie counts: it runs nothing and waits for the process that adopted it."""
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
