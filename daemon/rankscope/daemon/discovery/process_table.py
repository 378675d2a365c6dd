"""The processes of this node and what is known of them, kept up to date with few reads of /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs
from rankscope.daemon.discovery.rank_environment import Claim, InvalidClaim, read_claim

# A process that is no candidate may still become one (exec, a ring), the less likely the older it is: it is looked at
# again after a quarter of its age, or after its whole age if it is not Python, and after this long at the latest.
LOOK_AGAIN_SECONDS: Final = 30.0
# How long a process that carries rank variables is asked in every scan whether it has loaded torch by now.
IMPORT_PATIENCE_SECONDS: Final = 120.0
# The processes of one user must not take the budget of all ranks: a look costs 0.1 to 0.2 ms. So many that are new, and
# so many that are looked at again, are looked at in one scan; ranks always are. Environments and maps that are larger
# than is usual take turns.
LOOKS_PER_SCAN: Final = 32
LOOKS_AGAIN_PER_SCAN: Final = 16
LARGE_ENVIRON_BYTES: Final = 32 << 10
LARGE_MAPS_BYTES: Final = 512 << 10
LARGE_BYTES_PER_SCAN: Final = 8 << 20


@dataclass(slots=True)
class KnownProcess:
    """What is remembered of one process between scans. An exec makes it another one. Nothing of its environment is
    kept but the claim: a node may have any number of processes."""

    pid: int
    inode: int  # of /proc/<pid>: a new one means that the pid was reused, and costs no read to see
    start_ticks: int
    exec_mark: tuple[int, int]
    parent_pid: int
    first_seen_seconds: float
    look_again_seconds: float = 0.0
    is_dead: bool = False
    is_denied: bool = False
    claim: Claim | InvalidClaim | None = None
    has_torch: bool = False
    maps_bytes: int = 0  # that were read in vain to find torch
    is_python: bool | None = None  # not looked at yet
    ring_inode: int | None = None
    ring_look_seconds: float = 0.0
    ring_search: procfs.RingSearch | None = None
    # Stays once seen: a data-loader worker that outlives its rank does not take its place.
    is_helper: bool = False

    @property
    def identity(self) -> Hashable | None:
        """Equal for a rank and its helpers; None for a process that has nothing to do with training."""
        return self.claim or self.ring_inode

    @property
    def is_candidate(self) -> bool:
        return not self.is_dead and self.identity is not None and (self.has_torch or self.ring_inode is not None)

    @property
    def launch_depth(self) -> int:
        return self.claim.launch_depth if isinstance(self.claim, Claim) else -1


class ProcessTable:
    def __init__(self, proc_root: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = str(proc_root)
        self._monotonic = monotonic
        self._own_pid = os.getpid()
        self._known: dict[int, KnownProcess] = {}
        self._large_bytes_left = 0
        self._next_new_pid = 0  # of the first new process that had to wait for the next scan

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

    def trains(self, known: KnownProcess) -> bool:
        """Whether a process that looks like a launcher has made a ring, as only a process that trains does."""
        now = self._monotonic()
        if known.ring_inode is None and now >= known.ring_look_seconds:
            known.ring_look_seconds = now + min((now - known.first_seen_seconds) / 4, LOOK_AGAIN_SECONDS)
            with suppress(OSError):
                folder = self.folder(known.pid)
                known.ring_inode = procfs.BLOCKING.call(folder, lambda: self._ring_inode(known))
        return known.ring_inode is not None

    def _ring_inode(self, known: KnownProcess) -> int | None:
        known.ring_search = known.ring_search or procfs.RingSearch(self.folder(known.pid))
        return procfs.ring_inode(known.ring_search)

    def refresh(self) -> None:
        now = self._monotonic()
        with os.scandir(self._root) as entries:
            alive = {int(name): entry.inode() for entry in entries if (name := entry.name).isdigit()}
        for pid in self._known.keys() - alive.keys():
            del self._known[pid]
        new: list[int] = []
        again: list[tuple[float, int]] = []
        due: list[int] = []
        is_first, self._large_bytes_left = not self._known, LARGE_BYTES_PER_SCAN
        for pid, inode in alive.items():
            known = self._known.get(pid)
            if known is None:
                new.append(pid)
            elif known.inode != inode or now >= known.look_again_seconds:
                if known.is_candidate:
                    due.append(pid)
                else:
                    overdue_seconds = now - known.look_again_seconds
                    again.append((overdue_seconds / (now - known.first_seen_seconds + 1.0), pid))
        again.sort(reverse=True)  # those that have waited longest for their age: the young may still become ranks
        due += [pid for _, pid in again[:LOOKS_AGAIN_PER_SCAN]]
        if len(new) > LOOKS_PER_SCAN or self._next_new_pid:
            new.sort(key=lambda pid: (pid < self._next_new_pid, pid))
        looks = len(new) if is_first else LOOKS_PER_SCAN
        self._next_new_pid = new[looks] if len(new) > looks else 0
        due += new[:looks]
        procfs.BLOCKING.each(due, self.folder, lambda pid: self._look(pid, alive[pid], now))

    def _may_read(self, large_bytes: int) -> bool:
        if self._large_bytes_left <= 0:
            return False
        self._large_bytes_left -= large_bytes
        return True

    def _look(self, pid: int, inode: int, now: float) -> None:
        try:
            self._read(pid, inode, now)
        except (*procfs.GONE, ValueError):
            self.forget(pid)  # ended meanwhile

    def _read(self, pid: int, inode: int, now: float) -> None:
        folder = self.folder(pid)
        stat = procfs.read_stat(folder)
        known = self._known.get(pid)
        if known is None or (known.start_ticks, known.exec_mark) != (stat.start_ticks, stat.exec_mark):
            self.forget(pid)  # what it was before an exec
            known = KnownProcess(pid, inode, stat.start_ticks, stat.exec_mark, stat.parent_pid, now)
            if not stat.is_kernel_thread and not stat.is_dead:  # which would answer ESRCH
                if stat.environ_bytes > LARGE_ENVIRON_BYTES and not self._may_read(stat.environ_bytes):
                    self._next_new_pid = self._next_new_pid or pid
                    return
                _read_claim(known, folder)
            self._known[pid] = known
        elif known.is_denied:
            _read_claim(known, folder)
        known.inode, known.parent_pid, known.is_dead = inode, stat.parent_pid, stat.is_dead
        if not known.is_dead and not known.is_denied and pid != self._own_pid:
            self._look_closer(known, stat.command)
        known.look_again_seconds = _look_again_seconds(known, now)

    def _look_closer(self, known: KnownProcess, command: str) -> None:
        folder = self.folder(known.pid)
        try:
            if known.claim is not None:
                is_large = known.maps_bytes >= LARGE_MAPS_BYTES
                if not known.has_torch and (not is_large or self._may_read(known.maps_bytes)):
                    limit_bytes = procfs.MAX_MAPS_BYTES if is_large else LARGE_MAPS_BYTES
                    known.has_torch, known.maps_bytes = procfs.find_torch(folder, limit_bytes)
                return
            if known.is_python is None:
                known.is_python = procfs.is_python(folder, command)
            if known.is_python and known.ring_inode is None:
                known.ring_inode = self._ring_inode(known)
        except PermissionError:
            # The environment was readable and this is not: a process that made itself undumpable in between.
            known.is_denied = True


def _read_claim(known: KnownProcess, folder: str) -> None:
    try:
        known.claim = read_claim(procfs.Environment(folder))
        known.is_denied = False
    except PermissionError:
        known.is_denied = True


def _look_again_seconds(known: KnownProcess, now: float) -> float:
    age_seconds = now - known.first_seen_seconds
    if known.is_candidate or (known.claim is not None and age_seconds < IMPORT_PATIENCE_SECONDS):
        return now
    # Spread by pid, so that what was first seen in one scan is not all looked at again in one scan.
    pause_seconds = age_seconds / 4 if known.is_python else max(1.0, age_seconds)
    return now + min(pause_seconds, LOOK_AGAIN_SECONDS) * (0.75 + known.pid % 16 / 32)
