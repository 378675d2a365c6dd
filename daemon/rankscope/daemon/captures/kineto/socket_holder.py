"""Which process holds libkineto's daemon socket in a network namespace. Any process there may bind the name first, and
trainers then take configurations from it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from rankscope.common.text import printable
from rankscope.daemon import procfs

MAX_TABLE_BYTES: Final = 4 << 20
MAX_PROCESSES: Final = 16_384
MAX_DESCRIPTORS: Final = 1024  # of one process
MAX_LINKS: Final = 16_384  # of all
SEARCH_SECONDS: Final = 5.0
_SEARCHING: Final = threading.Lock()  # one at a time, or blocked ones would pile up
# As the kernel shows libkineto's abstract name in /proc/<pid>/net/unix: NULs become @.
SHOWN_NAME: Final = b"@dynolog@"


@dataclass(frozen=True)
class Holder:
    pid: int | None  # None if it is not found among the processes that can be read
    uid: int | None = None
    command: str = ""

    def __str__(self) -> str:
        return "a process that is not found" if self.pid is None else f"pid {self.pid} ({self.command}, uid {self.uid})"


def socket_holder(pid: int | None, proc_root: Path = Path("/proc"), likely_pid: int | None = None) -> Holder | None:
    """None if nobody holds the name in the network namespace of a process, by default the daemon's own. The likely
    holder is looked at first."""
    process = proc_root / ("self" if pid is None else str(pid))
    try:
        table = procfs.read_bounded(f"{process}/net/unix", MAX_TABLE_BYTES)
    except OSError:
        return None
    rows = (line.split(None, 7) for line in table.splitlines())
    inode = next((row[6].decode() for row in rows if len(row) == 8 and row[7] == SHOWN_NAME), None)
    if inode is None:
        return None
    found: list[Holder] = []
    if _SEARCHING.acquire(blocking=False):
        search = threading.Thread(target=_search, args=(inode, process, proc_root, likely_pid, found), daemon=True)
        search.start()
        search.join(SEARCH_SECONDS)
    return found[0] if found else Holder(None)


def _search(inode: str, neighbour: Path, proc_root: Path, likely_pid: int | None, found: list[Holder]) -> None:
    """In a thread: listing the descriptors of a process that is blocked in an exec may block."""
    try:
        links = islice(_descriptors(neighbour, proc_root, likely_pid), MAX_LINKS)
        holder = next((holder for holder, link in links if link == f"socket:[{inode}]"), None)
        if holder is not None:
            command = procfs.read_bounded(f"{proc_root}/{holder}/comm").decode(errors="replace").strip()
            found.append(Holder(holder, procfs.real_uid(f"{proc_root}/{holder}"), printable(command, 32)))
    except OSError:
        pass  # it has just ended
    finally:
        _SEARCHING.release()


def _descriptors(neighbour: Path, proc_root: Path, likely_pid: int | None) -> Iterator[tuple[int, str]]:
    """Of the processes in the namespace first: a process outside is a daemon that has entered it."""
    if likely_pid is not None:
        yield from _descriptors_of(likely_pid, proc_root)
    namespace = procfs.namespace_inode(str(neighbour), "net")
    pids = [int(entry.name) for entry in islice(os.scandir(proc_root), MAX_PROCESSES) if entry.name.isdigit()]
    for pid in sorted(pids, key=lambda pid: procfs.namespace_inode(f"{proc_root}/{pid}", "net") != namespace):
        yield from _descriptors_of(pid, proc_root)


def _descriptors_of(pid: int, proc_root: Path) -> Iterator[tuple[int, str]]:
    with suppress(OSError):  # it has ended, or may not be read
        for link in islice(os.scandir(f"{proc_root}/{pid}/fd"), MAX_DESCRIPTORS):
            with suppress(OSError):
                yield pid, str(Path(link.path).readlink())
