"""What each rank that runs now gives the daemon to read, and how it would give more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankscope.daemon.config import Config
from rankscope.daemon.examining import Finding, Level
from rankscope.daemon.samples import RankProcess

RANKS_SHOWN = 64


def ranks_are_visible(config: Config) -> Iterator[Finding]:
    from rankscope.daemon.discovery import RankDiscovery

    found = RankDiscovery(Path(config.proc_root), config.node).scan()
    if not found.ranks:
        text = "no training rank runs here now"
        yield Finding("ranks", Level.OK, text, "start a job with torchrun, then run rankscope doctor again")
    for rank in found.ranks[:RANKS_SHOWN]:
        yield rank_finding(rank, has_ring(Path(config.proc_root), rank.pid))
    if len(found.ranks) > RANKS_SHOWN:
        yield Finding("ranks", Level.OK, f"and {len(found.ranks) - RANKS_SHOWN} more ranks")
    for conflict in found.conflicts:
        yield Finding("ranks", Level.WARNING, conflict.text)
    for problem in found.problems:
        yield Finding("ranks", Level.WARNING, problem.text)


def rank_finding(rank: RankProcess, ring: bool | None) -> Finding:
    kineto = rank.environment.get("KINETO_USE_DAEMON", "0") not in ("", "0")
    teardown = rank.environment.get("TEARDOWN_CUPTI", "0") not in ("", "0")
    missing = []
    if ring is None:
        missing.append("run the daemon as root or with CAP_SYS_PTRACE to read its steps")
    elif not ring:
        missing.append("start it with RANKSCOPE_PROBE=1 for step times, causes and MFU")
    if kineto and not teardown:
        missing.append("start it with TEARDOWN_CUPTI=1 as well, or a capture leaves CUDA training slower")
    parts = (
        {True: "probe ring", False: "no probe ring", None: "probe ring unreadable"}[ring],
        *(["KINETO_USE_DAEMON"] if kineto else []),
        *(["TEARDOWN_CUPTI"] if teardown else []),
    )
    text = f"rank {rank.rank} of {rank.world_size}, job {rank.job!r}, pid {rank.pid}: {', '.join(parts)}"
    return Finding("ranks", Level.WARNING if missing else Level.OK, text, "; ".join(missing))


def has_ring(proc_root: Path, pid: int) -> bool | None:
    """None if the process does not let us look."""
    try:
        entries = list((proc_root / str(pid) / "fd").iterdir())
    except PermissionError:
        return None
    except OSError:
        return False
    return any(_target(entry).startswith("/memfd:rankscope") for entry in entries)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
