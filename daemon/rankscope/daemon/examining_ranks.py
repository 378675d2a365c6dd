"""What each rank that runs now gives the daemon to read, and how it would give more."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from rankscope.daemon.config import Config
from rankscope.daemon.examining import Finding, Level
from rankscope.daemon.samples import RankProcess
from rankscope.probe import layout

RANKS_SHOWN = 64


def ranks_are_visible(config: Config) -> Iterator[Finding]:
    from rankscope.daemon.discovery import RankDiscovery

    found = RankDiscovery(Path(config.proc_root), config.node).scan()
    if not found.ranks:
        text = "no training rank runs here now"
        yield Finding("ranks", Level.OK, text, "start a job with torchrun, then run rankscope doctor again")
    for rank in found.ranks[:RANKS_SHOWN]:
        ring = has_ring(Path(config.proc_root), rank.pid)
        yield rank_finding(rank, ring, wait_measured(Path(config.proc_root), rank.pid) if ring else None)
    if len(found.ranks) > RANKS_SHOWN:
        yield Finding("ranks", Level.OK, f"and {len(found.ranks) - RANKS_SHOWN} more ranks")
    for conflict in found.conflicts:
        yield Finding("ranks", Level.WARNING, conflict.text)
    for problem in found.problems:
        yield Finding("ranks", Level.WARNING, problem.text)


@dataclass(frozen=True)
class WaitMeasured:
    """What the time spent on others is known from, and what to do where it is not."""

    source: str
    next_step: str = ""


def rank_finding(rank: RankProcess, ring: bool | None, wait: WaitMeasured | None = None) -> Finding:
    kineto = rank.environment.get("KINETO_USE_DAEMON", "0") not in ("", "0")
    teardown = rank.environment.get("TEARDOWN_CUPTI", "0") not in ("", "0")
    missing = []
    if ring is None:
        missing.append("run the daemon as root or with CAP_SYS_PTRACE to read its steps")
    elif not ring:
        missing.append("start it with RANKSCOPE_PROBE=1 for step times, causes and MFU")
    if wait is not None and wait.next_step:
        missing.append(wait.next_step)
    if kineto and not teardown:
        missing.append("start it with TEARDOWN_CUPTI=1 as well, or a capture leaves CUDA training slower")
    parts = (
        {True: "probe ring", False: "no probe ring", None: "probe ring unreadable"}[ring],
        *([] if wait is None else [f"wait: {wait.source}"]),
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


def wait_measured(proc_root: Path, pid: int) -> WaitMeasured | None:
    """As the process' ring says; None where that cannot be read."""
    from rankscope.daemon import rings  # needs numpy, which the doctor looks for

    try:
        with rings.opened(proc_root, pid) as descriptor:
            if descriptor is None:
                return None
            header = rings.read_header(descriptor)
            if header.disabled:
                return WaitMeasured("not measured, the probe has disabled itself", "see its reason on the job's stderr")
            if not header.records:
                return WaitMeasured("no step yet")
            newest, _ = rings.read_records(descriptor, header.records, header.records)
            table = rings.read_groups(descriptor)
    except (rings.RingError, OSError):
        return None
    kinds = set() if table is None else {int(row["kind"]) for row in table if row["samples"]}
    return _source_of_wait(int(newest["flags"][0]) if len(newest) else 0, kinds)


def _source_of_wait(flags: int, kinds: Set[int]) -> WaitMeasured:
    from rankscope.daemon.assembling import SOURCES_OF_WAIT

    if flags & layout.FLAG_BLIND:
        if layout.GROUP_RECORDER in kinds:
            return WaitMeasured(SOURCES_OF_WAIT[layout.GROUP_RECORDER])
        text = "not measured, collectives are issued by compiled code, C++ or a CUDA graph"
        step = "run the daemon with --duty-cycle-steps 10, or start the job with TORCH_NCCL_ENABLE_TIMING=1"
        return WaitMeasured(text, step)
    if not flags & layout.FLAG_DEVICE:
        sources = ["ddp timers"] * bool(flags & layout.FLAG_DDP)
        return WaitMeasured(" + ".join(sources + ["blocking calls"] * bool(kinds or not sources)))
    sources = [name for kind, name in SOURCES_OF_WAIT.items() if kind in kinds]
    return WaitMeasured(" + ".join(dict.fromkeys(sources)) or "no collective seen")


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
