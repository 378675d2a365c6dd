"""What the daemon says about itself: its version, and what it uses."""

from __future__ import annotations

import os
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def process_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def package_version() -> str:
    try:
        return version("rankscope")
    except PackageNotFoundError:
        return "unknown"


def resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
