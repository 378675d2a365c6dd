"""What will not work on this machine, why, and what to do: the checks behind `rankscope doctor`, in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from rankscope.daemon import doctor_checks as checks
from rankscope.daemon import procfs
from rankscope.daemon.config import Config
from rankscope.daemon.doctor_checks import Finding, Level
from rankscope.probe import nccl_plugin, ring_layout

if TYPE_CHECKING:
    from rankscope.daemon.samples import RankProcess

RANKS_SHOWN = 64
# The longest check waits 20 s for py-spy, or for NVML.
CHECK_SECONDS = 60.0


def ranks_are_visible(config: Config) -> Iterator[Finding]:
    """What the daemon can read of each rank that runs now, and how to let it read more."""
    from rankscope.daemon.discovery.ranks import RankDiscovery  # needs numpy, which `checks` looks for

    found = RankDiscovery(Path(config.proc_root), config.node).scan()
    if not found.ranks:
        text = "no training rank runs here now"
        yield Finding("ranks", Level.OK, text, "start a job with torchrun, then run rankscope doctor again")
    for rank in found.ranks[:RANKS_SHOWN]:
        ring = has_ring(Path(config.proc_root), rank.pid)
        yield rank_finding(rank, ring, wait_measured(Path(config.proc_root), rank.pid) if ring else None)
    if len(found.ranks) > RANKS_SHOWN:
        yield Finding("ranks", Level.OK, f"and {len(found.ranks) - RANKS_SHOWN} more ranks")
    yield from taken_sockets(found.ranks, Path(config.proc_root), checks.daemon_pid(Path(config.socket)))
    for conflict in found.conflicts:
        yield Finding("ranks", Level.WARNING, conflict.text)
    for problem in found.problems:
        yield Finding("ranks", Level.WARNING, problem.text)


def taken_sockets(ranks: Iterable[RankProcess], proc_root: Path, daemon_pid: int | None) -> Iterator[Finding]:
    """Network namespaces in which another process than the daemon has libkineto's socket."""
    # Not at the top: the doctor runs on a machine without the daemon's packages.
    from rankscope.daemon.captures.kineto.socket_holder import socket_holder
    from rankscope.daemon.captures.kineto.sockets import network_namespace

    seen: set[int] = set()
    for rank in ranks:
        try:
            namespace = network_namespace(rank.pid, proc_root)
        except OSError:
            continue  # it has just ended
        if not _uses_kineto(rank) or namespace in seen or len(seen) >= RANKS_SHOWN:
            continue
        seen.add(namespace)
        holder = socket_holder(rank.pid, proc_root, daemon_pid)
        if holder is not None and (holder.pid is None or holder.pid != daemon_pid):
            text = (
                f"libkineto's socket in the network namespace of {rank} of job {rank.job!r} belongs to {holder}: "
                "trainers there take configurations from it, and the daemon captures them by the probe only"
            )
            step = "stop it, unless it is your dynolog; start the job with RANKSCOPE_PROBE=1 for captures meanwhile"
            yield Finding("kineto", Level.WARNING, text, step)


@dataclass(frozen=True)
class WaitMeasured:
    """What the time spent on others is known from, and what to do where it is not."""

    source: str
    next_step: str = ""


def rank_finding(rank: RankProcess, ring: bool | None, wait: WaitMeasured | None = None) -> Finding:
    kineto = _uses_kineto(rank)
    teardown = rank.environment.get("TEARDOWN_CUPTI", "0") not in ("", "0")
    missing = []
    if ring is None:
        missing.append("run the daemon as root or with CAP_SYS_PTRACE to read its steps")
    elif not ring:
        missing.append(
            "start it with RANKSCOPE_PROBE=1 for step times, causes and MFU; with it, the first step makes the ring"
        )
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


def _uses_kineto(rank: RankProcess) -> bool:
    return rank.environment.get("KINETO_USE_DAEMON", "0") not in ("", "0")


def has_ring(proc_root: Path, pid: int) -> bool | None:
    """None if the process does not let us look."""
    from rankscope.daemon.steps import ring_reader

    try:
        return ring_reader.find_ring(procfs.RingSearch(f"{proc_root}/{pid}"), procfs.MAX_DESCRIPTORS) is not None
    except PermissionError:
        return None
    except OSError:
        return False


def wait_measured(proc_root: Path, pid: int) -> WaitMeasured | None:
    """From the process' ring; None where that cannot be read."""
    from rankscope.daemon.steps import ring_reader
    from rankscope.daemon.windows.window import INSPECTOR

    try:
        with ring_reader.opened(proc_root, pid) as descriptor:
            if descriptor is None:
                return None
            header = ring_reader.read_header(descriptor)
            if header.disabled:
                return WaitMeasured("not measured, the probe has disabled itself", "see its reason on the job's stderr")
            if not header.records:
                return WaitMeasured("no step yet")
            newest, _ = ring_reader.read_records(descriptor, header.records, header.records)
            table = ring_reader.read_groups(descriptor)
            facts = ring_reader.parse_facts(ring_reader.read_facts_text(descriptor) or b"{}")
    except (ring_reader.RingError, OSError):
        return None
    kinds = set() if table is None else {int(row["kind"]) for row in table if row["samples"]}
    if facts.nccl_reason == nccl_plugin.OTHER and _is_inspected(f"{proc_root}/{pid}", header.owner_pid):
        return WaitMeasured(f"{INSPECTOR}'s file ({nccl_plugin.OTHER})")
    found = _source_of_wait(int(newest["flags"][0]) if len(newest) else 0, kinds)
    return replace(found, source=f"{found.source} ({facts.nccl_reason})") if facts.nccl_reason else found


def _is_inspected(process: str, own_pid: int) -> bool:
    from rankscope.daemon.steps.nccl_inspector import InspectorLog

    try:
        return procfs.BLOCKING.call(process, InspectorLog(process, own_pid).look)
    except OSError:
        return False


def _source_of_wait(flags: int, kinds: Set[int]) -> WaitMeasured:
    from rankscope.daemon.windows.window import SOURCES_OF_WAIT

    if flags & ring_layout.FLAG_NCCL:
        return WaitMeasured(SOURCES_OF_WAIT[ring_layout.GROUP_NCCL])
    if flags & ring_layout.FLAG_BLIND:
        if ring_layout.GROUP_RECORDER in kinds:
            return WaitMeasured(SOURCES_OF_WAIT[ring_layout.GROUP_RECORDER])
        text = "not measured, collectives are issued by compiled code, C++ or a CUDA graph"
        step = "run the daemon with --duty-cycle-steps 10, or start the job with TORCH_NCCL_ENABLE_TIMING=1"
        return WaitMeasured(text, step)
    if not flags & ring_layout.FLAG_DEVICE:
        sources = ["ddp timers"] * bool(flags & ring_layout.FLAG_DDP)
        return WaitMeasured(" + ".join(sources + ["blocking calls"] * bool(kinds or not sources)))
    sources = [name for kind, name in SOURCES_OF_WAIT.items() if kind in kinds]
    return WaitMeasured(" + ".join(dict.fromkeys(sources)) or "no collective seen")


Check = Callable[[Config], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    checks.platform_is_known,
    checks.python_is_new_enough,
    checks.packages_are_installed,
    checks.may_read_memory,
    checks.may_read_other_users,
    checks.py_spy_samples,
    checks.memfd_can_be_sealed,
    checks.cgroups_are_readable,
    checks.scheduler_counts_delays,
    checks.torch_has_kineto,
    checks.gpus_are_readable,
    checks.dcgm_answers,
    checks.network_is_visible,
    checks.addresses_are_free,
    checks.certificates_are_good,
    checks.profiles_can_be_kept,
    ranks_are_visible,
)


def examine(
    config: Config, chosen: Sequence[Check] = CHECKS, check_seconds: float = CHECK_SECONDS
) -> Iterator[Finding]:
    """All findings, each as soon as it is known. A check that breaks is a finding too, and so is one that does not
    end: reading /proc of a process on a dead file system can block without end."""
    for check in chosen:
        found: SimpleQueue[Finding | None] = SimpleQueue()
        threading.Thread(target=_run, args=(check, config, found), daemon=True).start()
        give_up_at = time.monotonic() + check_seconds
        try:
            while (finding := found.get(timeout=max(0.0, give_up_at - time.monotonic()))) is not None:
                yield finding
        except Empty:
            text = f"{_name(check)}: does not end; a process that it looks at is blocked"
            yield Finding("doctor", Level.WARNING, text, "look for processes in state D: ps -eo pid,stat,wchan,comm")


def _run(check: Check, config: Config, found: SimpleQueue[Finding | None]) -> None:
    try:
        for finding in check(config):
            found.put(finding)
    except Exception as error:  # noqa: BLE001 - a broken check is reported; the others still run
        text = f"{_name(check)}: could not be checked: {type(error).__name__}: {error}"
        found.put(Finding("doctor", Level.WARNING, text, "report this with the output of rankscope doctor --json"))
    finally:
        found.put(None)


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check").replace("_", " ")
