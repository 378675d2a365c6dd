"""The processes of this node and what is known of them, kept up to date with few reads of /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs
from rankscope.daemon.discovery.rank_environment import Claim, InvalidClaim, expects_probe, group_claim, read_claim
from rankscope.daemon.steps import ring_reader

# A process that is no candidate may still become one (exec, torch, a ring at a number that the probe does not prefer),
# the less likely the older it is: it is looked at again after a quarter of its age, or after its whole age if it is not
# Python, and after this long at the latest.
LOOK_AGAIN_SECONDS: Final = 30.0
# How long a process that carries rank variables is asked in every scan whether it has loaded torch by now.
IMPORT_PATIENCE_SECONDS: Final = 120.0
# The processes of one user must not take the budget of all ranks: a look costs 0.1 to 0.2 ms. So many that are new, and
# so many that are looked at again, are looked at in one scan; ranks always are. Environments and maps that are larger
# than is usual take turns.
LOOKS_PER_SCAN: Final = 32
LOOKS_AGAIN_PER_SCAN: Final = 16
# In every scan, so many processes without rank variables are asked for a ring at the numbers that the probe prefers. It
# costs 5 to 10 microseconds each. Python processes come first.
RING_LOOKS_PER_SCAN: Final = 128
LARGE_ENVIRON_BYTES: Final = 32 << 10
LARGE_MAPS_BYTES: Final = 512 << 10
LARGE_BYTES_PER_SCAN: Final = 8 << 20
# A process with many descriptors and no ring is searched less and less often.
MAX_LOOKS_LEFT_OUT: Final = 8
# A process without rank variables and probe trains alone if it has torch and has used so much CPU time without a pause.
# A loop on a GPU launches kernels or waits actively. Importing torch takes between the two amounts of CPU time.
MIN_BUSY_CPU_SECONDS: Final = 10.0
MIN_IMPORT_CPU_SECONDS: Final = 0.5
MIN_BUSY_RATIO: Final = 0.3
MAX_COMMAND_LINE_BYTES: Final = 4096
# In the command lines of processes that multiprocessing starts (workers, and ranks that only a probe knows), and of
# workers that compile for torch.
_HELPER_MARKS: Final = (b"--multiprocessing-fork", b"from multiprocessing.", b"/torch/_inductor/")


@dataclass(slots=True)
class KnownProcess:
    """What is remembered of one process between scans. An exec makes it another one. Nothing of its environment is
    kept but the claim: a node may have any number of processes."""

    pid: int
    inode: int  # of /proc/<pid>: a new one means that the pid was reused, and costs no read to see
    start_ticks: int
    exec_mark: tuple[int, int] | str
    parent_pid: int
    first_seen_seconds: float
    look_again_seconds: float = 0.0
    is_dead: bool = False
    is_denied: bool = False
    claim: Claim | InvalidClaim | None = None
    has_torch: bool = False
    looked_seconds: float = 0.0
    cpu_ticks: int = 0
    busy_cpu_seconds: float = 0.0
    is_fork: bool = False  # of a process that is known, without an exec
    may_train: bool | None = None  # by its command line and environment; None if not read yet
    maps_bytes: int = 0  # that were read in vain to find torch
    is_python: bool | None = None  # not looked at yet
    ring_inode: int | None = None
    ring_search: procfs.RingSearch | None = None
    has_group: bool = False  # the probe has told of its default process group, and `claim` agrees with that
    # Stays once seen: a data-loader worker that outlives its rank does not take its place.
    is_helper: bool = False

    @property
    def identity(self) -> Hashable | None:
        """Equal for a rank and its helpers; None for a process that has nothing to do with training."""
        return self.claim or self.ring_inode or (self.pid if self.is_computing else None)

    @property
    def is_computing(self) -> bool:
        """Trains, by its CPU time alone."""
        return self.claim is None and self.ring_inode is None and self.may_train is True

    @property
    def is_candidate(self) -> bool:
        return not self.is_dead and self.identity is not None and (self.has_torch or self.ring_inode is not None)

    @property
    def launch_depth(self) -> int:
        if isinstance(self.claim, Claim):
            return self.claim.launch_depth
        return -1 if self.ring_inode is None else 0


class ProcessTable:
    def __init__(self, proc_root: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = str(proc_root)
        self._monotonic = monotonic
        self._own_pid = os.getpid()
        self._known: dict[int, KnownProcess] = {}
        self._large_bytes_left = 0
        self._next_new_pid = 0  # of the first new process that had to wait for the next scan
        self._next_ring_pid = 0  # of the first process whose ring had to wait

    def folder(self, pid: int) -> str:
        return f"{self._root}/{pid}"

    def __iter__(self) -> Iterator[KnownProcess]:
        return iter(self._known.values())

    def bearers(self) -> list[KnownProcess]:
        """The living processes that carry an identity: ranks, their launchers and their helpers."""
        return [
            known
            for known in self._known.values()
            if (known.claim is not None or known.ring_inode is not None or known.may_train) and not known.is_dead
        ]

    def forget(self, pid: int) -> None:
        self._known.pop(pid, None)

    def parent_of(self, pid: int) -> int | None:
        known = self._known.get(pid)
        return None if known is None else known.parent_pid

    def _find_ring(self, known: KnownProcess) -> None:
        """Only a process that trains has one. What its probe says of its default process group replaces what its
        environment claims: a script may set its rank itself (mp.spawn)."""
        folder = self.folder(known.pid)
        known.ring_search = known.ring_search or procfs.RingSearch(folder, MAX_LOOKS_LEFT_OUT)
        # A rank by its environment needs no ring to be one, and the steps collector searches for it.
        ring = ring_reader.find_ring(known.ring_search, procfs.DESCRIPTORS_PER_LOOK if known.claim is None else 0)
        if ring is None:
            return
        known.ring_inode = ring.inode
        facts, claim = ring.facts, known.claim
        is_claimed = isinstance(claim, Claim) and (claim.rank, claim.world_size) == (facts.rank, facts.world_size)
        known.has_group = facts.store is not None
        if known.has_group and not is_claimed:
            known.claim, known.is_helper = group_claim(facts, procfs.Environment(folder)), False

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
        with_ring = self._look_for_rings()
        procfs.BLOCKING.each(with_ring, self.folder, lambda pid: self._look(pid, alive[pid], now))

    def _look_for_rings(self) -> list[int]:
        """The processes without rank variables that have a ring by now."""
        waiting = sorted(
            (not known.is_python, known.pid < self._next_ring_pid, known.pid)
            for known in self._known.values()
            if known.claim is None and known.ring_inode is None and not known.is_dead and not known.is_denied
        )
        pids = [pid for _, _, pid in waiting]
        self._next_ring_pid = pids[RING_LOOKS_PER_SCAN] if len(pids) > RING_LOOKS_PER_SCAN else 0
        found: list[int] = []

        def look(pid: int) -> None:
            known = self._known[pid]
            if procfs.may_have_ring(self.folder(pid), known.is_python is True):
                known.is_python = True
                found.append(pid)

        procfs.BLOCKING.each(pids[:RING_LOOKS_PER_SCAN], self.folder, look)
        return found

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
        self._account(known, stat, now)
        if not known.is_dead and not known.is_denied and pid != self._own_pid:
            self._look_closer(known, stat.command)
        known.look_again_seconds = _look_again_seconds(known, now)

    def _account(self, known: KnownProcess, stat: procfs.ProcessStat, now: float) -> None:
        parent, ticks = self._known.get(stat.parent_pid), stat.user_ticks + stat.system_ticks
        known.is_fork = known.is_fork or (parent is not None and parent.exec_mark == known.exec_mark)
        if known.looked_seconds and known.has_torch and not known.is_fork:
            used_seconds = (ticks - known.cpu_ticks) / procfs.CLOCK_TICKS_PER_SECOND
            is_busy = used_seconds >= MIN_BUSY_RATIO * (now - known.looked_seconds)
            known.busy_cpu_seconds = known.busy_cpu_seconds + used_seconds if is_busy else 0.0
        known.looked_seconds, known.cpu_ticks = now, ticks

    def _look_closer(self, known: KnownProcess, command: str) -> None:
        folder = self.folder(known.pid)
        try:
            if known.claim is None and known.is_python is None:
                known.is_python = procfs.is_python(folder, command)
            has_worked = known.cpu_ticks >= MIN_IMPORT_CPU_SECONDS * procfs.CLOCK_TICKS_PER_SECOND
            if not known.has_torch and (known.claim is not None or (known.is_python and has_worked)):
                is_large = known.maps_bytes >= LARGE_MAPS_BYTES
                if not is_large or self._may_read(known.maps_bytes):
                    limit_bytes = procfs.MAX_MAPS_BYTES if is_large else LARGE_MAPS_BYTES
                    known.has_torch, known.maps_bytes = procfs.find_torch(folder, limit_bytes)
            if not known.has_group and (known.has_torch or known.is_python):
                self._find_ring(known)
            if known.may_train is None and known.busy_cpu_seconds >= MIN_BUSY_CPU_SECONDS:
                known.may_train = may_train(folder)
        except PermissionError:
            # The environment was readable and this is not: a process that made itself undumpable in between.
            known.is_denied = True


def may_train(folder: str) -> bool:
    """False for a helper of torch or of Python, or where the probe decides."""
    line = procfs.read_bounded(f"{folder}/cmdline", MAX_COMMAND_LINE_BYTES)
    return not any(mark in line for mark in _HELPER_MARKS) and not expects_probe(procfs.Environment(folder))


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
    if known.has_torch and known.claim is None and known.may_train is None and not known.is_fork:
        return now  # it may be training
    # Spread by pid, so that what was first seen in one scan is not all looked at again in one scan.
    pause_seconds = age_seconds / 4 if known.is_python else max(1.0, age_seconds)
    return now + min(pause_seconds, LOOK_AGAIN_SECONDS) * (0.75 + known.pid % 16 / 32)
