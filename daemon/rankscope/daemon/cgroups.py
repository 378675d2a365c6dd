"""How long a process' control groups were out of CPU quota, in cgroup v1 and v2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from rankscope.daemon import procfs
from rankscope.daemon.cgroup_namespaces import OwnGroup

LEVELS_LIMIT: Final = 8
_V1_FOLDERS: Final = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


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
