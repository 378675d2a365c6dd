"""How and when processes end that are not our children: by pidfd, without polling and without a signal to them.

A zombie shows its exit status in /proc until its parent reaps it. Linux 6.15 and newer keep the status with the pidfd;
on older ones a parent that is quicker than this process hides it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope.daemon import procfs
from rankscope.daemon.cgroups import MemoryKills, oom_kills

# Each takes a descriptor, of which a process often has 1,024.
MAX_PROCESSES = 256
# struct pidfd_info of linux/pidfd.h: 8 bytes of mask first, the wait status last.
_INFO_BYTES, _WITH_STATUS = 64, 1 << 3
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11


@dataclass(frozen=True)
class ProcessEnd:
    pid: int
    unix_seconds: float
    status: int | None  # the exit status, or minus the signal; None if it is not known
    memory: str = ""  # evidence that the kernel killed it for lack of memory


class ProcessEnds:
    """`watch` may be called again for the same processes. After `stop` it does nothing, and `ends` stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}  # pid by pidfd
        self._memory_kills: dict[int, MemoryKills] = {}
        self._machine_kills: int | None = None
        self._ends: dict[int, ProcessEnd] = {}
        self._epoll = select.epoll()
        self._stop = os.eventfd(0)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rankscope-process-ends", daemon=True)
        self._thread.start()

    @property
    def ends(self) -> Mapping[int, ProcessEnd]:
        with self._lock:
            return dict(self._ends)

    def watch(self, pids: Iterable[int]) -> None:
        with self._lock:
            if self._epoll.closed:
                return
            self._machine_kills = oom_kills()
            for pid in pids:
                if pid > 0 and pid not in self._memory_kills and len(self._memory_kills) < MAX_PROCESSES:
                    self._memory_kills[pid] = MemoryKills(pid)
                    self._open(pid)

    def _open(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            self._ends[pid] = ProcessEnd(pid, time.time(), None)
            return
        self._descriptors[descriptor] = pid
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def stop(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            for descriptor in (*self._descriptors, self._stop):
                os.close(descriptor)
            self._epoll.close()

    def _run(self) -> None:
        is_stopped = False
        while not is_stopped:
            for descriptor, events in self._epoll.poll():
                if descriptor == self._stop:
                    is_stopped = True  # after the ends that came with it
                    continue
                with self._lock:
                    self._note(descriptor, is_reaped=bool(events & select.EPOLLHUP))

    def _note(self, descriptor: int, *, is_reaped: bool) -> None:
        """Called once when the process ends, and on newer kernels once more when its parent reaps it."""
        pid = self._descriptors[descriptor]
        end = self._ends.get(pid) or ProcessEnd(pid, time.time(), _status_of_zombie(pid))
        status = end.status
        if is_reaped:
            reaped = _status_of_reaped(descriptor)
            status = status if reaped is None else reaped
            self._epoll.unregister(descriptor)
        memory = end.memory or (self._memory_shortage(pid) if status == -signal.SIGKILL else "")
        self._ends[pid] = ProcessEnd(pid, end.unix_seconds, status, memory)

    def _memory_shortage(self, pid: int) -> str:
        kills = self._memory_kills[pid]
        if kills.more():
            limit = kills.limit_bytes
            return "out of memory" + ("" if limit is None else f", beyond its cgroup's limit of {_size(limit)}")
        machine = oom_kills()
        is_short = machine is not None and self._machine_kills is not None and machine > self._machine_kills
        return "the kernel ran out of memory at that moment" if is_short else ""


def _size(size_bytes: int) -> str:
    gib = size_bytes / (1 << 30)
    return f"{gib:.3g} GiB" if gib >= 1 else f"{size_bytes / (1 << 20):.3g} MiB"


def _status_of_zombie(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = procfs.read_bounded(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return os.waitstatus_to_exitcode(int(fields[-1]))
    return None


def _status_of_reaped(descriptor: int) -> int | None:
    info = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _WITH_STATUS)
    with contextlib.suppress(OSError, ValueError):
        fcntl.ioctl(descriptor, _GET_INFO, info)
        mask, status = struct.unpack_from("=Q", info)[0], struct.unpack_from("=i", info, _INFO_BYTES - 4)[0]
        if mask & _WITH_STATUS:
            return os.waitstatus_to_exitcode(status)
    return None
