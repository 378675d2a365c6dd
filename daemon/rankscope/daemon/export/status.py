"""What the daemon knows about itself, and the snapshot that a scrape shows."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.service import CaptureStatus
from rankscope.daemon.collector import CollectorStatus
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.windows.totals import RankReport

FULL: Final = "full"  # metrics_detail


@dataclass(frozen=True)
class DaemonStatus:
    version: str
    node: str
    collectors: Mapping[str, CollectorStatus] = field(default_factory=dict)
    own_cpu_seconds: float = 0.0
    sampling_cpu_seconds: float = 0.0
    scrape_cpu_seconds: float = 0.0
    stuck_samplers: int = 0
    resident_bytes: int | None = None
    budget_used_ratio: float | None = None
    stack_rate_hertz: float = 0.0
    stack_recorded_ratio: float | None = None
    ranks: int = 0
    ranks_cut: Mapping[str, int] = field(default_factory=dict)
    rank_conflicts: int = 0
    discovery_problems: int = 0
    windows_total: int = 0
    windows_skipped_total: int = 0
    watch_readers: int = 0
    watch_dropped_total: int = 0
    captures: CaptureStatus | None = None
    gpu: GpuStatus | None = None
    metrics_detail: str = FULL


@dataclass(frozen=True)
class Snapshot:
    """What one scrape shows. Replaced as a whole at each tick, so that a scrape never sees half a window."""

    daemon: DaemonStatus
    ranks: tuple[RankReport, ...] = ()


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
