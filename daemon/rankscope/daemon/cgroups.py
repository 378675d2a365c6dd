"""Control groups, version 1 and 2: how long a process was out of CPU quota, how much memory the daemon has left, and
whether the kernel killed a process for lack of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from rankscope.daemon import procfs

# Where a container runtime mounts what the container's cgroup namespace shows; the host's tree is mounted elsewhere.
OWN_ROOT: Final = Path("/sys/fs/cgroup")
MAX_FOLDERS: Final = 100_000
MAX_LEVELS: Final = 8
_V1_CPU_FOLDERS: Final = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
_V1_UNLIMITED_BYTES: Final = 1 << 60


def _memberships(text: bytes) -> Iterator[tuple[list[str], str]]:
    """Controllers and path of each line of /proc/<pid>/cgroup. Version 2 has one line, without controllers."""
    for line in text.decode("utf-8", "replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield [name for name in controllers.split(",") if name], path


@dataclass(frozen=True)
class Throttled:
    """Counters of one moment, by group: the process' own and those above it, for any of them may hold the quota."""

    seconds_by_group: Mapping[str, float] = field(default_factory=dict)

    def seconds_since(self, before: Throttled, span_seconds: float) -> float | None:
        """None when nothing can be compared. The kernel adds up over CPUs, so more than the span is the whole span."""
        deltas = [
            seconds - before.seconds_by_group[group]
            for group, seconds in self.seconds_by_group.items()
            if group in before.seconds_by_group
        ]
        if not deltas or min(deltas) < 0:
            return None
        return min(max(deltas), span_seconds)


class CpuThrottling:
    def __init__(self, proc_root: Path, cgroup_root: Path) -> None:
        self._proc = str(proc_root)
        self._root = cgroup_root
        self._own_group = OwnGroup(cgroup_root)
        # Ranks of one container share their groups: these are read once a round.
        self._round: dict[bytes, Throttled] = {}

    def begin_round(self) -> None:
        self._round.clear()

    def read(self, pid: int) -> Throttled:
        membership = procfs.read_bounded(f"{self._proc}/{pid}/cgroup")
        if membership not in self._round:
            self._round[membership] = self._read_groups(membership)
        return self._round[membership]

    def _read_groups(self, membership: bytes) -> Throttled:
        group = self._group_of(membership)
        folder = self._folder(*group) if group is not None else None
        if group is None or folder is None:
            return Throttled()
        seconds_by_group = {}
        for level in (folder, *folder.parents)[:MAX_LEVELS]:
            seconds = _read_throttled_seconds(f"{level}/cpu.stat")
            if seconds is not None:
                seconds_by_group[str(level)] = seconds
            if level == group[0]:
                break
        return Throttled(seconds_by_group)

    def _group_of(self, membership: bytes) -> tuple[Path, PurePosixPath] | None:
        """Where the hierarchy with the CPU controller is mounted, and the process' path in it."""
        unified = None
        for controllers, path in _memberships(membership):
            if "cpu" in controllers:
                for folder in _V1_CPU_FOLDERS:
                    if (self._root / folder).is_dir():
                        return self._root / folder, PurePosixPath(path)
            elif not controllers:
                unified = (self._root, PurePosixPath(path))
        return unified

    def _folder(self, hierarchy: Path, path: PurePosixPath) -> Path | None:
        if ".." in path.parts:
            return self._own_group.folder(hierarchy, path)  # outside of our cgroup namespace
        folder = hierarchy.joinpath(*(part for part in path.parts if not part.startswith("/")))
        if folder.is_dir():
            return folder
        # A container without a cgroup namespace sees the host's path, with only its own part of the tree mounted.
        own = self._group_of(procfs.read_bounded(f"{self._proc}/self/cgroup"))
        if own is not None and path.is_relative_to(own[1]):
            return hierarchy / path.relative_to(own[1])
        return None


class OwnGroup:
    """The daemon's own group in the host's tree, for a daemon in a cgroup namespace of its own, as Kubernetes gives it
    with version 2: the kernel shows other groups relative to it, as in `/../../pod7/app`. Found once, by the inode of
    the namespace's root."""

    def __init__(self, root: Path, own_root: Path = OWN_ROOT) -> None:
        self._root = root
        self._own_root = own_root
        self._found: dict[Path, tuple[str, ...] | None] = {}

    def folder(self, hierarchy: Path, path: PurePosixPath) -> Path | None:
        """Of a path that begins with `/..`; None if it is not found."""
        parts = path.parts[1:] if path.is_absolute() else path.parts
        up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
        rest = parts[up:]
        own = self._own_parts(hierarchy)
        if own is None or up > len(own) or ".." in rest:
            return None
        folder = hierarchy.joinpath(*own[: len(own) - up], *rest)
        return folder if folder.is_dir() else None

    def _own_parts(self, hierarchy: Path) -> tuple[str, ...] | None:
        if hierarchy not in self._found:
            self._found[hierarchy] = self._search(hierarchy)
        return self._found[hierarchy]

    def _search(self, hierarchy: Path) -> tuple[str, ...] | None:
        try:
            own = (self._own_root / hierarchy.relative_to(self._root)).stat()
            if (own.st_dev, own.st_ino) == _identity(hierarchy):
                return ()
        except OSError:
            return None
        looked_at = 0
        for parent, names, _ in os.walk(hierarchy):
            looked_at += len(names)
            if looked_at > MAX_FOLDERS:
                return None
            for name in names:
                folder = Path(parent, name)
                try:
                    if _identity(folder) == (own.st_dev, own.st_ino):
                        return folder.relative_to(hierarchy).parts
                except OSError:
                    continue  # gone in between
        return None


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _read_throttled_seconds(path: str) -> float | None:
    try:
        text = procfs.read_bounded(path)
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        count = procfs.whole_number(value)
        if count is not None:
            if name == b"throttled_usec":
                return count / 1e6
            if name == b"throttled_time":
                return count / 1e9
    return None


@dataclass(frozen=True)
class _MemoryFiles:
    limit: str
    used: str
    events: str  # has a line `oom_kill N`


_V1_MEMORY: Final = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
_V2_MEMORY: Final = _MemoryFiles("memory.max", "memory.current", "memory.events")


def _memory_groups(cgroup_root: Path, membership: Path) -> Iterator[tuple[Path, _MemoryFiles]]:
    """The groups that may limit the memory of a process, from its own upwards. Raises OSError."""
    for controllers, path in _memberships(procfs.read_bounded(str(membership))):
        if controllers and "memory" not in controllers:
            continue
        base, files = (cgroup_root / "memory", _V1_MEMORY) if controllers else (cgroup_root, _V2_MEMORY)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), files


def memory_left_bytes(cgroup_root: Path = OWN_ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the groups of this process leave it; None without a limit. Beyond it the kernel kills, and on Kubernetes it
    kills the whole container, with the daemon in it."""
    try:
        groups = [*_memory_groups(cgroup_root, membership)]
    except OSError:
        return None
    left_bytes = [_left_bytes(folder, files) for folder, files in groups]
    return min((left for left in left_bytes if left is not None), default=None)


def _limit_bytes(folder: Path, files: _MemoryFiles) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() and int(limit) < _V1_UNLIMITED_BYTES else None


def _left_bytes(folder: Path, files: _MemoryFiles) -> int | None:
    limit = _limit_bytes(folder, files)
    if limit is None:
        return None
    try:
        used = int((folder / files.used).read_text())
        parts = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
        # The kernel drops old pages of files before it kills.
        reclaimable = int(parts.get("total_inactive_file", parts.get("inactive_file", "0")))
    except (OSError, ValueError):
        return None
    return max(0, limit - max(0, used - reclaimable))


class MemoryKills:
    """How often the kernel killed a process for lack of memory, in the groups of one process. The process may end: its
    groups are known by then."""

    def __init__(self, pid: int, proc_root: Path = Path("/proc"), cgroup_root: Path = OWN_ROOT) -> None:
        try:
            groups = [*_memory_groups(cgroup_root, proc_root / str(pid) / "cgroup")]
        except OSError:
            groups = []
        limits = ((f"{folder}/{files.events}", _limit_bytes(folder, files)) for folder, files in groups)
        counted = ((path, limit, oom_kills(path)) for path, limit in limits)
        self._groups = [(path, limit, count) for path, limit, count in counted if count is not None]

    def more(self) -> bool:
        """Whether the kernel killed in one of the groups since."""
        return self._risen() is not None

    @property
    def limit_bytes(self) -> int | None:
        """The limit of the group in which the kernel killed since."""
        risen = self._risen()
        return None if risen is None else risen[1]

    def _risen(self) -> tuple[str, int | None, int] | None:
        risen = [group for group in self._groups if (oom_kills(group[0]) or 0) > group[2]]
        # Groups above count it too. The innermost that has a limit is the one that ran out.
        return next((group for group in risen if group[1] is not None), risen[0] if risen else None)


def oom_kills(path: str = "/proc/vmstat") -> int | None:
    """The counter in a file of a group; without one, that of the whole machine. None if it cannot be read."""
    try:
        lines = procfs.read_bounded(path).splitlines()
    except OSError:
        return None
    return next((procfs.whole_number(line[9:]) for line in lines if line.startswith(b"oom_kill ")), None)
