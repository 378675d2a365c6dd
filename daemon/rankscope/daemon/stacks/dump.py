"""The current stack of ranks that have stalled: one py-spy dump each, all at the same time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs
from rankscope.daemon.samples import Problem, RankKey, RankProcess, StallDump
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.phases import phase_of
from rankscope.daemon.stacks.pyspy_output import parse_dump

_LOOK_EVERY_SECONDS: Final = 0.01
# The process is not stopped, so py-spy fails if a thread moves on while its frames are read.
_ATTEMPTS: Final = 5


@dataclass(frozen=True)
class Dumps:
    by_rank: Mapping[RankKey, StallDump | Problem]
    cpu_seconds: float


def dump_stacks(
    py_spy: Path, ranks: Sequence[RankProcess], killed: pyspy.KilledChildren, proc_root: Path, timeout_seconds: float
) -> Dumps:
    """Takes no longer than the timeout, whatever the processes do."""
    deadline_seconds = time.monotonic() + timeout_seconds
    by_rank: dict[RankKey, StallDump | Problem] = {}
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
            for key, (rank, child) in list(running.items()):
                ended = child.poll()
                if ended is not None:
                    del running[key]
                    cpu_seconds += ended.cpu_seconds
                    found = by_rank[key] = _read(child, rank, proc_root, ended)
                    is_retried = isinstance(found, Problem) and found.kind == "unreadable"
                    if is_retried and attempts[key] < _ATTEMPTS and time.monotonic() < deadline_seconds:
                        start(rank)
            if running and time.monotonic() >= deadline_seconds:
                break
            time.sleep(_LOOK_EVERY_SECONDS if running else 0)
    finally:
        for key, (rank, child) in running.items():
            killed.kill(child, rank)
            by_rank[key] = pyspy.explain_failure(rank, None, "", _is_alive(proc_root, rank))
    return Dumps(by_rank, cpu_seconds)


def _read(child: pyspy.Child, rank: RankProcess, proc_root: Path, ended: pyspy.Ended) -> StallDump | Problem:
    if ended.status != 0:
        return pyspy.explain_failure(rank, ended, child.log, _is_alive(proc_root, rank))
    try:
        pids = frozenset((rank.pid, *rank.namespace_pids))
        stack = parse_dump(child.output, pids, lambda: pyspy.engine_threads(f"{proc_root}/{rank.pid}"))
    except (ValueError, RecursionError) as error:
        return Problem("stacks", "unreadable", f"{rank}: py-spy's dump could not be parsed: {error}")
    if not stack:
        return Problem("stacks", "unreadable", f"{rank}: its training thread has no frames")
    return StallDump(phase_of(stack), stack)


def _is_alive(proc_root: Path, rank: RankProcess) -> bool:
    return procfs.is_alive(f"{proc_root}/{rank.pid}", rank.start_ticks)
