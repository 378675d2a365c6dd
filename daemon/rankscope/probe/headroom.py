"""How much memory there is left, for the container or the machine, whichever has less."""

from __future__ import annotations

import os
from typing import Dict, Optional

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def memory_left_bytes() -> Optional[int]:
    """None where nothing can be said."""
    known = [left for left in (_left_in_cgroup("/sys/fs/cgroup"), _left_in_machine()) if left is not None]
    return min(known) if known else None


def _left_in_machine() -> Optional[int]:
    found = _fields("/proc/meminfo").get("MemAvailable:")
    return None if found is None else found * 1024


def _left_in_cgroup(folder: str) -> Optional[int]:
    """As a container sees its own, in both versions of control groups. Files that can be dropped are not counted."""
    for limit, usage, stat, dropped in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        limit_bytes, used_bytes = _number(os.path.join(folder, limit)), _number(os.path.join(folder, usage))
        if limit_bytes is not None and used_bytes is not None:
            return limit_bytes - used_bytes + _fields(os.path.join(folder, stat)).get(dropped, 0)
    return None


def _number(path: str) -> Optional[int]:
    try:
        with open(path, "rb") as file:
            text = file.read(64).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _fields(path: str) -> Dict[str, int]:
    try:
        with open(path, "rb") as file:
            lines = [line.split() for line in file.read(1 << 16).decode("ascii", "replace").splitlines()]
    except OSError:
        return {}
    return {parts[0]: int(parts[1]) for parts in lines if len(parts) >= 2 and parts[1].isdigit()}
