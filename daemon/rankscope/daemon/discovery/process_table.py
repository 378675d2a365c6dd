"""The processes of this node and what is known of them, kept up to date with few reads of /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs
from rankscope.daemon.discovery.rank_environment import Claim, InvalidClaim, read_claim, select

# A process that is no candidate may still become one (exec, a ring), the less likely the older it is: it is looked at
# again after a quarter of its age, or after its whole age if it is not Python, and after this long at the latest.
LOOK_AGAIN_SECONDS: Final = 30.0
# Of those, in one scan: the processes of one user must not take the budget of all ranks.
LOOKS_AGAIN_PER_SCAN: Final = 32
# How long a process that carries rank variables is asked in every scan whether it has loaded torch by now.
IMPORT_PATIENCE_SECONDS: Final = 120.0


@dataclass
class KnownProcess:
    """What is remembered of one process between scans. An exec makes it another one."""

    pid: int
    inode: int  # of /proc/<pid>: a new one means that the pid was reused, and costs no read to see
    start_ticks: int
    exec_mark: tuple[int, int]
    parent_pid: int
    first_seen_seconds: float
    look_again_seconds: float = 0.0
    is_dead: bool = False
    is_denied: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    claim: Claim | InvalidClaim | None = None
    has_torch: bool = False
    is_python: bool | None = None  # not looked at yet
    ring_inode: int | None = None
    # Stays once seen: a data-loader worker that outlives its rank does not take its place.
    is_helper: bool = False

    @property
    def identity(self) -> Hashable | None:
        """Equal for a rank and its helpers; None for a process that has nothing to do with training."""
        return self.claim or self.ring_inode

    @property
    def is_candidate(self) -> bool:
        return not self.is_dead and self.identity is not None and (self.has_torch or self.ring_inode is not None)


class ProcessTable:
    def __init__(self, proc_root: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = str(proc_root)
        self._monotonic = monotonic
        self._own_pid = os.getpid()
        self._known: dict[int, KnownProcess] = {}

    def folder(self, pid: int) -> str:
        return f"{self._root}/{pid}"

    def __iter__(self) -> Iterator[KnownProcess]:
        return iter(self._known.values())

    def bearers(self) -> list[KnownProcess]:
        """The living processes that carry an identity: ranks, their launchers and their helpers."""
        return [
            known
            for known in self._known.values()
            if (known.claim is not None or known.ring_inode is not None) and not known.is_dead
        ]

    def forget(self, pid: int) -> None:
        self._known.pop(pid, None)

    def parent_of(self, pid: int) -> int | None:
        known = self._known.get(pid)
        return None if known is None else known.parent_pid

    def refresh(self) -> None:
        now = self._monotonic()
        with os.scandir(self._root) as entries:
            alive = {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}
        for pid in self._known.keys() - alive.keys():
            del self._known[pid]
        postponed = self._postponed(now)
        for pid, inode in alive.items():
            known = self._known.get(pid)
            if known is not None and known.inode == inode and (now < known.look_again_seconds or pid in postponed):
                continue
            try:
                self._look(pid, inode, now)
            except (*procfs.GONE, ValueError):
                self.forget(pid)  # ended meanwhile

    def _postponed(self, now: float) -> set[int]:
        """Processes that are due but have to wait. Python comes first, and then what has waited longest."""
        due = [
            (not known.is_python, known.look_again_seconds, pid)
            for pid, known in self._known.items()
            if known.look_again_seconds <= now and known.claim is None and not known.is_candidate
        ]
        return {pid for *_, pid in sorted(due)[LOOKS_AGAIN_PER_SCAN:]}

    def _look(self, pid: int, inode: int, now: float) -> None:
        folder = self.folder(pid)
        stat = procfs.read_stat(folder)
        known = self._known.get(pid)
        if known is None or (known.start_ticks, known.exec_mark) != (stat.start_ticks, stat.exec_mark):
            known = KnownProcess(pid, inode, stat.start_ticks, stat.exec_mark, stat.parent_pid, now)
            if not stat.is_kernel_thread and not stat.is_dead:  # which would answer ESRCH
                _read_environment(known, folder)
            self._known[pid] = known
        elif known.is_denied:
            _read_environment(known, folder)
        known.inode, known.parent_pid, known.is_dead = inode, stat.parent_pid, stat.is_dead
        if not known.is_dead and not known.is_denied and pid != self._own_pid:
            _look_closer(known, folder, stat.command)
        known.look_again_seconds = _look_again_seconds(known, now)


def _read_environment(known: KnownProcess, folder: str) -> None:
    try:
        known.environment = select(procfs.read_environment(folder))
        known.is_denied = False
    except PermissionError:
        known.is_denied = True
    known.claim = read_claim(known.environment)


def _look_closer(known: KnownProcess, folder: str, command: str) -> None:
    try:
        if known.claim is not None:
            known.has_torch = known.has_torch or procfs.has_loaded_torch(folder)
            return
        if known.is_python is None:
            known.is_python = procfs.is_python(folder, command)
        if known.is_python and known.ring_inode is None:
            known.ring_inode = procfs.ring_inode(folder)
    except PermissionError:
        # The environment was readable and this is not: a process that made itself undumpable in between.
        known.is_denied = True


def _look_again_seconds(known: KnownProcess, now: float) -> float:
    age_seconds = now - known.first_seen_seconds
    if known.is_candidate or (known.claim is not None and age_seconds < IMPORT_PATIENCE_SECONDS):
        return now
    # Spread by pid, so that what was first seen in one scan is not all looked at again in one scan.
    pause_seconds = age_seconds / 4 if known.is_python else max(1.0, age_seconds)
    return now + min(pause_seconds, LOOK_AGAIN_SECONDS) * (0.75 + known.pid % 16 / 32)
