"""How much memory this process' control groups leave it: beyond that the kernel kills, and on Kubernetes it kills the
whole container, with the daemon in it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# What version 1 says when there is no limit.
_UNLIMITED: Final = 1 << 60


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
