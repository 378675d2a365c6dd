"""The current stack of ranks that have stalled: one py-spy dump each, all at the same time. Where a rank waits for its
data loader, the workers are dumped too: the line that holds it up is in one of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from rankscope.analysis.profiles.frames import Stack, is_user_code
from rankscope.analysis.profiles.phases import INPUT, names_phase, phase_of
from rankscope.daemon import procfs
from rankscope.daemon.blocking_reads import BlockedError
from rankscope.daemon.samples import Activity, Problem, RankKey, RankProcess, StallDump
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.pyspy_output import parse_dump

_LOOK_EVERY_SECONDS: Final = 0.01
# The process is not stopped, so py-spy fails if a thread moves on while its frames are read.
_ATTEMPTS: Final = 5
_WORKERS_PER_RANK: Final = 8
_MAX_WORKERS: Final = 64


@dataclass(frozen=True)
class Dumps:
    by_rank: Mapping[RankKey, StallDump | Problem]
    cpu_seconds: float


def dump_stacks(
    py_spy: Path, ranks: Sequence[RankProcess], killed: pyspy.KilledChildren, proc_root: Path, timeout_seconds: float
) -> Dumps:
    """Takes no longer than the timeout, whatever the processes do."""
    deadline_seconds = time.monotonic() + timeout_seconds
    stacks, cpu_seconds = _dump_all(py_spy, ranks, killed, proc_root, deadline_seconds)
    workers_of: dict[RankKey, list[RankProcess]] = {}
    for rank in ranks:
        stack = stacks[rank.key]
        has_time = time.monotonic() < deadline_seconds
        if has_time and not isinstance(stack, Problem) and _inside_loader(stack) == ():
            workers_of[rank.key] = _workers(rank, proc_root)
    workers = [worker for of_rank in workers_of.values() for worker in of_rank][:_MAX_WORKERS]
    inside, more_cpu_seconds = _dump_all(py_spy, workers, killed, proc_root, deadline_seconds)
    by_rank: dict[RankKey, StallDump | Problem] = {}
    for rank in ranks:
        stack, own_workers = stacks[rank.key], workers_of.get(rank.key, [])
        if isinstance(stack, Problem):
            by_rank[rank.key] = stack
            continue
        found = (inside[worker.key] for worker in own_workers if worker.key in inside)
        at_work = (_inside_loader(worker) for worker in found if not isinstance(worker, Problem))
        stack = (*next(filter(None, at_work), ()), *stack)
        activity = _activity([f"{proc_root}/{process.pid}" for process in (rank, *own_workers)])
        by_rank[rank.key] = StallDump(phase_of(stack), stack, activity)
    return Dumps(by_rank, cpu_seconds + more_cpu_seconds)


def _dump_all(
    py_spy: Path, ranks: Sequence[RankProcess], killed: pyspy.KilledChildren, proc_root: Path, deadline_seconds: float
) -> tuple[dict[RankKey, Stack | Problem], float]:
    """The stacks, and the CPU seconds that they took."""
    by_rank: dict[RankKey, Stack | Problem] = {}
    running: dict[RankKey, tuple[RankProcess, pyspy.Child]] = {}
    attempts: Counter[RankKey] = Counter()
    cpu_seconds = 0.0

    def start(rank: RankProcess) -> None:
        attempts[rank.key] += 1
        objection = killed.objection(rank) or pyspy.objection(rank, f"{proc_root}/{rank.pid}")
        if objection is not None:
            by_rank[rank.key] = objection
            return
        try:
            child = pyspy.Child(pyspy.dump_command(py_spy, rank.pid), keeps_stdout=True)
        except OSError as error:
            by_rank[rank.key] = Problem("stacks", "unstartable", f"{rank}: py-spy could not be started: {error}")
        else:
            running[rank.key] = (rank, child)

    try:
        for rank in ranks:
            start(rank)
        while running:
            # Before the last look: this thread may have been late itself.
            is_late = time.monotonic() >= deadline_seconds
            for key, (rank, child) in list(running.items()):
                ended = child.poll()
                if ended is not None:
                    del running[key]
                    cpu_seconds += ended.cpu_seconds
                    found = by_rank[key] = _read(child, rank, proc_root, ended)
                    is_retried = isinstance(found, Problem) and found.kind == "unreadable"
                    if is_retried and attempts[key] < _ATTEMPTS and time.monotonic() < deadline_seconds:
                        start(rank)
            if running and is_late:
                break
            time.sleep(_LOOK_EVERY_SECONDS if running else 0)
    finally:
        for key, (rank, child) in running.items():
            killed.kill(child, rank)
            by_rank[key] = pyspy.explain_failure(rank, None, "", _is_alive(proc_root, rank))
    return by_rank, cpu_seconds


def _inside_loader(stack: Stack) -> Stack | None:
    """The program's own code that a data loader calls, with what it calls; empty if the loader waits. None for a stack
    outside of data loaders."""
    loader = next((depth for depth, frame in enumerate(stack) if names_phase(frame, INPUT)), None)
    if loader is None:
        return None
    return stack[:loader] if any(is_user_code(frame) for frame in stack[:loader]) else ()


def _workers(rank: RankProcess, proc_root: Path) -> list[RankProcess]:
    """The rank's child processes, each as if it were the rank."""
    found = []
    folder = f"{proc_root}/{rank.pid}"
    with suppress(BlockedError):
        for pid in procfs.BLOCKING.call(folder, partial(procfs.child_pids, folder, _WORKERS_PER_RANK)):
            with suppress(OSError, ValueError):  # it ended, or cannot be read now
                found.append(procfs.BLOCKING.call(f"{proc_root}/{pid}", partial(_as_rank, rank, pid, proc_root)))
    return found


def _as_rank(rank: RankProcess, pid: int, proc_root: Path) -> RankProcess:
    folder = f"{proc_root}/{pid}"
    start_ticks, pids = procfs.read_stat(folder).start_ticks, procfs.read_status(folder).namespace_pids
    return replace(rank, pid=pid, start_ticks=start_ticks, namespace_pids=pids or (pid,))


def _activity(folders: Sequence[str]) -> Activity | None:
    """None where the first of the processes cannot be read."""
    ticks = moved_bytes = 0
    for folder in folders:
        try:
            stat = procfs.BLOCKING.call(folder, partial(procfs.read_stat, folder))
            moved_bytes += procfs.BLOCKING.call(folder, partial(procfs.moved_bytes, folder))
        except (OSError, ValueError):
            if folder == folders[0]:
                return None
            continue
        ticks += stat.user_ticks + stat.system_ticks
    return Activity(time.monotonic(), ticks / procfs.CLOCK_TICKS_PER_SECOND, moved_bytes)


def _read(child: pyspy.Child, rank: RankProcess, proc_root: Path, ended: pyspy.Ended) -> Stack | Problem:
    if ended.status != 0:
        return pyspy.explain_failure(rank, ended, child.log, _is_alive(proc_root, rank))
    try:
        pids = frozenset((rank.pid, *rank.namespace_pids))
        stack = parse_dump(child.output, pids, lambda: pyspy.engine_threads(f"{proc_root}/{rank.pid}"))
    except (ValueError, RecursionError) as error:
        return Problem("stacks", "unreadable", f"{rank}: py-spy's dump could not be parsed: {error}")
    if not stack:
        return Problem("stacks", "unreadable", f"{rank}: its training thread has no frames")
    return stack


def _is_alive(proc_root: Path, rank: RankProcess) -> bool:
    return procfs.is_alive(f"{proc_root}/{rank.pid}", rank.start_ticks)
