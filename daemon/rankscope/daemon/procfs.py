"""Reading /proc of processes that may vanish, refuse or lie at any moment. Every read is bounded."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from rankscope.daemon.blocking_reads import BlockedError, BlockingReads
from rankscope.probe import nccl_layout, ring_layout

# What any read of /proc/<pid> raises when the process ended in between (ENOENT before the open, ESRCH after it).
GONE: Final = (FileNotFoundError, ProcessLookupError)

CLOCK_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
MAX_ENVIRON_BYTES: Final = 256 * 1024
MAX_VALUE_BYTES: Final = 8192
MAX_MAPS_BYTES: Final = 16 * 1024 * 1024
MAX_SMALL_FILE_BYTES: Final = 16 * 1024
MAX_DESCRIPTORS: Final = 16_384
DESCRIPTORS_PER_LOOK: Final = 512
PASSES_PER_PAUSE: Final = 8
MAX_THREADS: Final = 4096
RING_LINKS: Final = (f"/memfd:{ring_layout.RING_NAME} (deleted)", f"/memfd:{ring_layout.RING_NAME}")
NCCL_LINKS: Final = (f"/memfd:{nccl_layout.MEMORY_NAME} (deleted)", f"/memfd:{nccl_layout.MEMORY_NAME}")
READ_WRITE: Final = stat.S_IRUSR | stat.S_IWUSR

_NS_GET_PARENT: Final = 0xB702
_NS_GET_OWNER_UID: Final = 0xB704
_PF_KTHREAD: Final = 0x00200000
_DIGITS: Final = 20
_CHUNK_BYTES: Final = 64 * 1024
_TORCH_MAPPINGS: Final = (b"/libtorch", b"/torch/_C.")
_POD_UID: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-f])"
)


@dataclass(frozen=True)
class ProcessStat:
    """One line of /proc/<pid>/stat. `exec_mark` changes with every exec, which pid and start time survive. Where the
    kernel hides addresses (gVisor), it is the command, which most execs change."""

    command: str
    state: str
    is_kernel_thread: bool
    parent_pid: int
    user_ticks: int
    system_ticks: int
    threads: int
    start_ticks: int
    resident_pages: int
    exec_mark: tuple[int, int] | str
    environ_bytes: int

    @property
    def is_dead(self) -> bool:
        return self.state in "ZXx"

    @property
    def is_stopped(self) -> bool:
        return self.state in "Tt"


@dataclass(frozen=True)
class Status:
    uid: int  # the real one
    namespace_pids: tuple[int, ...]
    voluntary_switches: int | None
    involuntary_switches: int | None


def read_bounded(path: str, limit_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, limit_bytes)
        # A file of /proc may hand over one page at a time.
        while data and len(data) < limit_bytes and (more := os.read(descriptor, limit_bytes - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def parse_stat(line: bytes) -> ProcessStat:
    """Raises ValueError when the line is not one of /proc/<pid>/stat."""
    # The command is the process' own choice and may hold spaces and brackets: the last bracket ends it.
    opening, closing = line.find(b"("), line.rfind(b")")
    fields = line[closing + 1 :].split()
    if opening < 0 or closing < opening or len(fields) < 26:
        raise ValueError(f"not a line of /proc/<pid>/stat: {line[:80]!r}")
    command = line[opening + 1 : closing].decode("utf-8", "replace")
    start_code, start_stack = _count(fields[23]), _count(fields[25])
    return ProcessStat(
        command=command,
        state=fields[0].decode("ascii", "replace"),
        is_kernel_thread=bool(_count(fields[6]) & _PF_KTHREAD),
        parent_pid=_count(fields[1]),
        user_ticks=_count(fields[11]),
        system_ticks=_count(fields[12]),
        threads=_count(fields[17]),
        start_ticks=_count(fields[19]),
        resident_pages=_count(fields[21]),
        exec_mark=(start_code, start_stack) if start_stack else command,
        environ_bytes=int(fields[48]) - int(fields[47]) if len(fields) > 48 else 0,
    )


def whole_number(text: bytes) -> int | None:
    """None for what no kernel writes: what plays the kernel in a sandbox might, and no message would hold it."""
    if not text.isdigit() or len(text) > _DIGITS:
        return None
    number = int(text)
    return number if number < 1 << 64 else None


def _count(text: bytes) -> int:
    """None of the fields that are read here is ever negative."""
    if text.isdigit() and len(text) < _DIGITS:  # most of what a scan does
        return int(text)
    number = whole_number(text)
    if number is None:
        raise ValueError(f"not a number of /proc/<pid>/stat: {text[:40]!r}")
    return number


def read_stat(process: str) -> ProcessStat:
    line = read_bounded(process + "/stat")
    if not line:
        raise ProcessLookupError(process)
    return parse_stat(line)


def is_alive(process: str, start_ticks: int) -> bool:
    """Whether the process that started then still runs; its pid may be another's by now."""
    try:
        stat = BLOCKING.call(process, lambda: read_stat(process))
    except BlockedError:
        return True
    except (OSError, ValueError):
        return False
    return stat.start_ticks == start_ticks and not stat.is_dead


def read_status(process: str) -> Status:
    found: dict[bytes, bytes] = {}
    for line in read_bounded(process + "/status").splitlines():
        name, _, value = line.partition(b":")
        found.setdefault(name, value)

    def number(name: bytes) -> int | None:
        return whole_number(found.get(name, b"").strip())

    uids = found.get(b"Uid", b"").split()
    return Status(
        uid=(whole_number(uids[0]) if uids else None) or 0,
        namespace_pids=tuple(
            pid for text in found.get(b"NSpid", b"").split() if (pid := whole_number(text)) is not None
        ),
        voluntary_switches=number(b"voluntary_ctxt_switches"),
        involuntary_switches=number(b"nonvoluntary_ctxt_switches"),
    )


def real_uid(process: str) -> int | None:
    """The user who started the process, in the daemon's user namespace; None if it has just ended."""
    with suppress(OSError):
        for line in read_bounded(process + "/status").splitlines():
            if line.startswith(b"Uid:"):
                return whole_number(line.split()[1])
    return None


def monotonic_offset_ns(process: str) -> int:
    """By how much the monotonic clock of the process' time namespace is ahead of the machine's; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        for line in read_bounded(process + "/timens_offsets").splitlines():
            name, seconds, nanos = line.split()
            if name in (b"monotonic", b"1"):
                offset = int(seconds[:_DIGITS]) * 1_000_000_000 + int(nanos[:_DIGITS])
                return offset if abs(offset) < 1 << 62 else 0
    return 0


def moved_bytes(process: str) -> int:
    """What it has read and written so far, also to a cache or a pipe. Raises OSError where that cannot be read."""
    total = 0
    for line in read_bounded(process + "/io").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"):
            total += whole_number(value.strip()) or 0
    return total


def child_pids(process: str, limit: int) -> list[int]:
    """Of its main thread, which starts a data loader's workers."""
    with suppress(OSError):  # it ended, or a kernel without CONFIG_PROC_CHILDREN
        pid = process.rpartition("/")[2]
        found = (whole_number(text) for text in read_bounded(f"{process}/task/{pid}/children").split()[:limit])
        return [child for child in found if child]
    return []


def thread_ids(process: str, name_prefix: bytes) -> frozenset[int]:
    """Ids, in all their namespaces, of the threads whose names begin so."""
    found: set[int] = set()
    with suppress(OSError):  # it ended in between
        for thread in islice(os.scandir(process + "/task"), MAX_THREADS):
            if read_bounded(thread.path + "/comm").startswith(name_prefix):
                found.update(read_status(thread.path).namespace_pids)
    return frozenset(found)


class Environment:
    """The variables that a process was started with. They are searched for, since a process may have any number."""

    def __init__(self, process: str) -> None:
        data = read_bounded(process + "/environ", MAX_ENVIRON_BYTES)
        if len(data) >= MAX_ENVIRON_BYTES:
            data = data[: data.rfind(b"\0")]  # cut in the middle
        self._data = b"\0" + data + b"\0"

    def get(self, name: str) -> str | None:
        """The first of that name, as with getenv, up to a bound."""
        start = self._data.find(f"\0{name}=".encode())
        if start < 0:
            return None
        start += len(name) + 2
        end = min(self._data.index(b"\0", start), start + MAX_VALUE_BYTES)
        return self._data[start:end].decode("utf-8", "replace")


def find_torch(process: str, limit_bytes: int = MAX_MAPS_BYTES) -> tuple[bool, int]:
    """Whether the process has loaded torch, and how many bytes were read to see it."""
    return find_mapping(process, _TORCH_MAPPINGS, limit_bytes)


def find_mapping(process: str, names: Sequence[bytes], limit_bytes: int = MAX_MAPS_BYTES) -> tuple[bool, int]:
    """Return whether the process maps a file with one of these parts of its path, and how many bytes were read."""
    descriptor = os.open(process + "/maps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        tail = b""
        read_bytes = 0
        while read_bytes < limit_bytes and (chunk := os.read(descriptor, _CHUNK_BYTES)):
            read_bytes += len(chunk)
            text = tail + chunk
            if any(name in text for name in names):
                return True, read_bytes
            tail = chunk[-16:]
        return False, read_bytes
    finally:
        os.close(descriptor)


def is_python(process: str, command: str) -> bool:
    if command.startswith(("python", "pt_")):
        return True
    try:
        # A script with a shebang, or a process that renamed itself.
        return Path(process, "exe").readlink().name.startswith("python")
    except OSError:
        return False


class DescriptorSearch:
    """Finds a descriptor of a process, looks at a bounded number of descriptors at a time, and remembers where it was.
    A process may have a million descriptors, and listing them costs as much as looking at each."""

    def __init__(self, process: str, is_wanted: Callable[[str], bool], mode: int, longest_pause: int = 0) -> None:
        """`is_wanted` tells by what a link shows, `mode` how the process has opened it (S_IRUSR, S_IWUSR or both).
        `longest_pause`: how many looks are left out of a process with many descriptors, the more the longer the search
        was in vain."""
        self.process = process
        self._is_wanted = is_wanted
        self._mode = mode
        self._longest_pause = longest_pause
        self._next = 0  # the descriptor to go on with
        self._is_found = False  # there
        self._passes = 0  # in vain, over all descriptors
        self._pause = 0  # looks to leave out

    def look(self, descriptors: int = DESCRIPTORS_PER_LOOK) -> str | None:
        """The path of its link; None if it was not found yet. Raises OSError if the process may not be read."""
        if self._pause > 0:
            self._pause -= 1
            return None
        if self._is_found and self._is_at(self._next):
            return self._link(self._next)
        if self._is_found:
            self._next, self._is_found = 0, False
        # Most places of a table are empty: a list of the others costs less than a look at each.
        if self._next == 0 and len(listed := self._listed(descriptors + 1)) <= descriptors:
            return self._first_of(listed)
        last = min(MAX_DESCRIPTORS, self._table_size())
        if (found := self._first_of(range(self._next, min(self._next + descriptors, last)))) is not None:
            return found
        self._next += descriptors
        if self._next >= last:
            self._next = 0
            self._passes += 1
            self._pause = min(self._passes // PASSES_PER_PAUSE, self._longest_pause)
        return None

    def _first_of(self, numbers: Sequence[int]) -> str | None:
        for number in numbers:
            if self._is_at(number):
                self._next, self._is_found, self._passes = number, True, 0
                return self._link(number)
        return None

    def _listed(self, limit: int) -> Sequence[int]:
        with os.scandir(f"{self.process}/fd") as entries:
            return [int(entry.name) for entry in islice(entries, limit)]

    def _link(self, number: int) -> str:
        return f"{self.process}/fd/{number}"

    def _is_at(self, number: int) -> bool:
        try:
            target = os.readlink(self._link(number))  # noqa: PTH115 - a Path costs more than the call
            return self._is_wanted(target) and os.lstat(self._link(number)).st_mode & READ_WRITE == self._mode
        except FileNotFoundError:
            return False

    def _table_size(self) -> int:
        match = re.search(rb"^FDSize:\s*(\d{1,9})$", read_bounded(self.process + "/status"), re.MULTILINE)
        return int(match.group(1)) if match else 0


class RingSearch(DescriptorSearch):
    """Finds the descriptor of a process' ring, first at the numbers that the probe prefers. Another daemon has a ring
    open for an instant as well, but to read only or to write only."""

    def __init__(self, process: str, longest_pause: int = 0) -> None:
        super().__init__(process, RING_LINKS.__contains__, READ_WRITE, longest_pause)

    def look(self, descriptors: int = DESCRIPTORS_PER_LOOK) -> str | None:
        """With no `descriptors`, only where the ring was, or should be."""
        link = self.look_at_preferred()
        return super().look(descriptors) if link is None and (descriptors or self._is_found) else link

    def look_at_preferred(self) -> str | None:
        """A few system calls, whatever the process has open."""
        return next((self._link(number) for number in ring_layout.DESCRIPTORS if self._is_at(number)), None)


def nccl_search(process: str, longest_pause: int) -> DescriptorSearch:
    """Finds the memory of NCCL's plugin where no ring tells its descriptor."""
    return DescriptorSearch(process, NCCL_LINKS.__contains__, READ_WRITE, longest_pause)


def may_have_ring(process: str, is_python: bool) -> bool:
    """By the first number that the probe prefers, for many processes: a program with Python inside has few descriptors
    when it begins."""
    for number in ring_layout.DESCRIPTORS if is_python else ring_layout.DESCRIPTORS[:1]:
        try:
            if os.readlink(f"{process}/fd/{number}") in RING_LINKS:  # noqa: PTH115 - a Path costs more than the call
                return True
        except OSError:  # no such descriptor, as nearly always
            continue
    return False


def open_own_file(link: str, process: str) -> int | None:
    """A descriptor to read a file that a process writes, by its link in /proc: no path is resolved. None for what is no
    regular file, or which neither the user of the process nor everybody may read."""
    handle = os.open(link, os.O_PATH | os.O_CLOEXEC)  # opens nothing: the opening of a device or a FIFO has effects
    try:
        status = os.fstat(handle)
        is_own = status.st_uid == real_uid(process) or status.st_mode & stat.S_IROTH
        if not stat.S_ISREG(status.st_mode) or not is_own:
            return None
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(handle)


def memfd_handle(link: str) -> int:
    """A descriptor (O_PATH) of a memfd, by its link in /proc of another process. The name proves nothing, and the file
    may be exchanged before it is opened: for a device, whose opening has effects, or for a file on a FUSE mount, whose
    owner can block the open, and even a stat. So: a handle that opens nothing, and a check that it is on the
    file system of memfds, which asks no other file system. Raises NotMemfdError."""
    handle = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        if _mount_id(handle) != _memfd_mount_id():
            raise NotMemfdError(f"{link} is named like a ring but is not a memfd; not touched")
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise NotMemfdError(f"{link} is named like a ring but is not a regular file; not touched")
    except BaseException:
        os.close(handle)
        raise
    return handle


class NotMemfdError(OSError):
    pass


def _mount_id(fd: int) -> bytes | None:
    found = re.search(rb"^mnt_id:\s*(\d+)$", read_bounded(f"/proc/self/fdinfo/{fd}"), re.MULTILINE)
    return found.group(1) if found else None


@functools.cache
def _memfd_mount_id() -> bytes | None:
    """All memfds are on one mount of the kernel's own."""
    own = os.memfd_create("rankscope-reference", os.MFD_CLOEXEC)
    try:
        return _mount_id(own)
    finally:
        os.close(own)


def namespace_inode(process: str, kind: str) -> int:
    """0 where it cannot be read."""
    try:
        link = str(Path(process, "ns", kind).readlink())
    except OSError:
        return 0
    number = link.partition("[")[2].rstrip("]")
    return int(number) if number.isdecimal() else 0


def user_namespace_owner(process: str) -> int | None:
    """The user who made the user namespace of a process, or the outermost one that it is in; None if that is ours or
    cannot be read. Inside of it, that user may have thousands of uids."""
    uid = None
    try:
        descriptor = os.open(f"{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        while True:
            parent = fcntl.ioctl(descriptor, _NS_GET_PARENT)
            uid = int.from_bytes(fcntl.ioctl(descriptor, _NS_GET_OWNER_UID, bytes(4)), sys.byteorder)
            os.close(descriptor)
            descriptor = parent
    except OSError:
        return uid  # ours has no parent that we can see
    finally:
        os.close(descriptor)


def pod_uid(process: str) -> str | None:
    """The Kubernetes pod of a process, from its cgroup path (both cgroup drivers' spelling)."""
    match = _POD_UID.search(read_bounded(process + "/cgroup").decode("utf-8", "replace"))
    return match.group(1).replace("_", "-") if match else None


def _owner(process: str) -> str:
    try:
        return pod_uid(process) or str(Path(process).stat().st_uid)
    except OSError:
        return ""


BLOCKING: Final = BlockingReads(_owner)
