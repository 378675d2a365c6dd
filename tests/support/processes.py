"""What the kernel says of a process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of the process alone."""
    return sum(map(int, stat_fields(pid)[11:13])) / _TICKS_PER_SECOND


def family_cpu_seconds(pid: int) -> float:
    """Of a process and its descendants, those included that have ended and been waited for."""
    try:
        own = sum(map(int, stat_fields(pid)[11:15])) / _TICKS_PER_SECOND
        return own + sum(map(family_cpu_seconds, children(pid)))
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def children(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def state(pid: int) -> str:
    return stat_fields(pid)[0]


def is_gone(pid: int) -> bool:
    """A zombie counts: it runs nothing and waits for the process that adopted it."""
    try:
        return state(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stat_fields(pid: int) -> list[str]:
    """The fields of its `stat` after the name, which may hold spaces and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
