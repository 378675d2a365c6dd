"""How long a process' control groups were out of CPU quota, in cgroup v1 and v2."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from rankscope.daemon import procfs

# Where the container's runtime mounts what its namespace shows; the host's whole tree is mounted elsewhere.
OWN_ROOT: Final = Path("/sys/fs/cgroup")
FOLDERS_LIMIT: Final = 100_000
LEVELS_LIMIT: Final = 8
_V1_FOLDERS: Final = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
# What version 1 says when there is no limit.
_UNLIMITED: Final = 1 << 60


# Where other containers' control groups are, for a daemon in a cgroup namespace of its own, as Kubernetes gives it
# with cgroup version 2: the kernel tells paths from the daemon's own group on, as in `/../../pod7/app`.


class OwnGroup:
    """Our own group in the host's tree, looked for once: it is the folder with the number of our namespace's root."""

    def __init__(self, root: Path, own_root: Path = OWN_ROOT) -> None:
        self._root = root
        self._own_root = own_root
        self._found: dict[Path, tuple[str, ...] | None] = {}

    def folder(self, hierarchy: Path, path: PurePosixPath) -> Path | None:
        """Of a path that begins with `/..`; None if it cannot be told."""
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
            if looked_at > FOLDERS_LIMIT:
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
        for level in (folder, *folder.parents)[:LEVELS_LIMIT]:
            seconds = _read_throttled_seconds(f"{level}/cpu.stat")
            if seconds is not None:
                seconds_by_group[str(level)] = seconds
            if level == group[0]:
                break
        return Throttled(seconds_by_group)

    def _group_of(self, membership: bytes) -> tuple[Path, PurePosixPath] | None:
        """Where the hierarchy with the CPU controller is mounted, and the process' path in it."""
        unified = None
        for line in membership.decode("utf-8", "replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if "cpu" in controllers.split(","):
                for folder in _V1_FOLDERS:
                    if (self._root / folder).is_dir():
                        return self._root / folder, PurePosixPath(path)
            elif not controllers:
                unified = (self._root, PurePosixPath(path))
        return unified

    def _folder(self, hierarchy: Path, path: PurePosixPath) -> Path | None:
        if ".." in path.parts:
            return self._own_group.folder(hierarchy, path)  # outside of our cgroup namespace
        folder = hierarchy / path.relative_to("/") if path.is_absolute() else hierarchy / path
        if folder.is_dir():
            return folder
        # A container without a cgroup namespace sees the host's path, with only its own part of the tree mounted.
        own = self._group_of(procfs.read_bounded(f"{self._proc}/self/cgroup"))
        if own is not None and path.is_relative_to(own[1]):
            return hierarchy / path.relative_to(own[1])
        return None


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


# How much memory this process' control groups leave it: beyond that the kernel kills, and on Kubernetes it kills the
# whole container, with the daemon in it.


def memory_left_bytes(cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path | None = None) -> int | None:
    """None where nothing limits it, or nothing tells."""
    found = [_left(*files) for files in _groups(cgroup_root, membership or Path("/proc/self/cgroup"))]
    known = [left for left in found if left is not None]
    return min(known) if known else None


def _groups(root: Path, membership: Path) -> list[tuple[Path, Path, Path]]:
    """Files with the limit, the use and its parts of every group that this process is in, and of those above."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "memory.stat")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(*parts[:depth])
            groups.append((folder / names[0], folder / names[1], folder / names[2]))
    return groups


def _left(limit_file: Path, use_file: Path, parts_file: Path) -> int | None:
    try:
        limit = limit_file.read_text().strip()
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            return None
        used = int(use_file.read_text())
        parts = dict(line.split(maxsplit=1) for line in parts_file.read_text().splitlines())
        # The kernel gives up old pages of files before it kills.
        reclaimable = int(parts.get("total_inactive_file", parts.get("inactive_file", "0")))
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - max(0, used - reclaimable))
