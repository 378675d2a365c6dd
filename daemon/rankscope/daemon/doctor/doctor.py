"""What will not work on this machine, why, and what to do: the checks behind `rankscope doctor`, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rankscope.common.text import one_line
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.doctor import checks as examining
from rankscope.daemon.doctor import checks as examining_tls
from rankscope.daemon.doctor.checks import Finding, Level
from rankscope.daemon.gpu.collector import has_profile
from rankscope.daemon.gpu.dcgm import DcgmError, fetch, parse_readings
from rankscope.daemon.gpu.nvml import NvmlSource
from rankscope.daemon.gpu.readings import GpuSnapshot, GpuSource, GpuState, SourceState
from rankscope.daemon.samples import RankProcess
from rankscope.probe import ring_layout

# Whether GPU counters can be had, and if not, why.

OPENING_SECONDS = 20.0
# Two readings make the first profile.
PROFILE_SECONDS = 3.0
DRIVER_FOLDER = Path("/proc/driver/nvidia")


def gpus_are_readable(
    config: Config, source: Callable[[], GpuSource] = lambda: NvmlSource(0.5), driver_folder: Path = DRIVER_FOLDER
) -> Iterator[Finding]:
    if not config.gpu:
        yield Finding("gpu", Level.OK, "GPU counters are turned off (gpu = false)")
        return
    reading = source()
    reading.start()
    try:
        snapshot = _wait(reading, lambda seen: seen.state is not SourceState.STARTING, OPENING_SECONDS)
        if snapshot.state is SourceState.OK:
            snapshot = _wait(reading, lambda seen: any(map(has_profile, seen.gpus)), PROFILE_SECONDS)
    finally:
        reading.close()
    yield _driver_finding(snapshot, driver_folder)


def dcgm_answers(config: Config) -> Iterator[Finding]:
    if config.dcgm_url == NONE:
        return
    try:
        gpus = parse_readings(fetch(config.dcgm_url))
    except DcgmError as error:
        yield Finding("dcgm", Level.PROBLEM, str(error), "start dcgm-exporter on this node, or correct --dcgm-url")
        return
    if not gpus:
        step = "let it export DCGM_FI_* fields with UUID labels"
        yield Finding("dcgm", Level.PROBLEM, f"{config.dcgm_url}: no GPU in it", step)
    elif not any(map(has_profile, gpus)):
        text = f"{config.dcgm_url}: {len(gpus)} GPUs, but no profiling figures"
        yield Finding("dcgm", Level.WARNING, text, "add DCGM_FI_PROF_* fields to its counters")
    else:
        yield Finding("dcgm", Level.OK, f"{config.dcgm_url}: {len(gpus)} GPUs with profiling figures")


def _wait(source: GpuSource, enough: Callable[[GpuSnapshot], bool], seconds: float) -> GpuSnapshot:
    give_up_at = time.monotonic() + seconds
    while not enough(snapshot := source.latest()) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return snapshot


def _driver_finding(snapshot: GpuSnapshot, driver_folder: Path) -> Finding:
    lost = [gpu for gpu in snapshot.gpus if gpu.state is not GpuState.OK]
    if snapshot.state is SourceState.OK and lost:
        text = f"{len(lost)} of {len(snapshot.gpus)} GPUs do not answer: {lost[0].uuid} is {lost[0].state.value}"
        return Finding("gpu", Level.PROBLEM, text, "look for XID errors in dmesg; reset or drain the node")
    if snapshot.state is SourceState.OK:
        names = ", ".join(sorted({gpu.name for gpu in snapshot.gpus}))
        text = f"{len(snapshot.gpus)} × {names}, driver {snapshot.driver_version or 'unknown'}"
        if any(map(has_profile, snapshot.gpus)):
            return Finding("gpu", Level.OK, f"{text}, with GPM")
        step = "pass --dcgm-url for profiling figures, if dcgm-exporter runs here"
        return Finding("gpu", Level.WARNING, f"{text}, without GPM: no tensor and SM activity", step)
    if snapshot.state is SourceState.NO_DRIVER and not driver_folder.exists():
        return Finding("gpu", Level.OK, "no NVIDIA driver on this machine: no GPU counters")
    if snapshot.state is SourceState.NO_GPU:
        return Finding("gpu", Level.OK, "the NVIDIA driver has no GPU: no GPU counters")
    state = "does not answer" if snapshot.state is SourceState.STARTING else snapshot.state.value
    text = f"NVML: {state}: {one_line(snapshot.reason, 300)}"
    step = "see that nvidia-smi works where the daemon runs; a container needs the NVIDIA runtime"
    return Finding("gpu", Level.WARNING, text, step)


# What each rank that runs now gives the daemon to read, and how it would give more.

RANKS_SHOWN = 64


def ranks_are_visible(config: Config) -> Iterator[Finding]:
    from rankscope.daemon.discovery.ranks import RankDiscovery

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
    from rankscope.daemon.steps import ring_reader as rings  # needs numpy, which the doctor looks for

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
    from rankscope.daemon.windows.window import SOURCES_OF_WAIT

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


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


Check = Callable[[Config], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    examining.platform_is_known,
    examining.python_is_new_enough,
    examining.packages_are_installed,
    examining.may_read_memory,
    examining.may_read_other_users,
    examining.py_spy_samples,
    examining.memfd_can_be_sealed,
    examining.cgroups_are_readable,
    examining.scheduler_counts_delays,
    examining.torch_has_kineto,
    gpus_are_readable,
    dcgm_answers,
    examining.addresses_are_free,
    examining_tls.certificates_are_good,
    ranks_are_visible,
)


def examine(config: Config, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """All findings, each as soon as it is known. A check that breaks is a finding too."""
    for check in checks:
        try:
            yield from check(config)
        except Exception as error:  # noqa: BLE001 - a doctor who faints helps nobody
            name = getattr(check, "__name__", "check").replace("_", " ")
            text = f"{name}: could not be checked: {type(error).__name__}: {error}"
            yield Finding("doctor", Level.WARNING, text, "report this with the output of rankscope doctor --json")
