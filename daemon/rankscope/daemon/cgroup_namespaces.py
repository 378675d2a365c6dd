"""Where other containers' control groups are, for a daemon in a cgroup namespace of its own, as Kubernetes gives it
with cgroup version 2: the kernel tells paths from the daemon's own group on, as in `/../../pod7/app`."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Final

# Where the container's runtime mounts what its namespace shows; the host's whole tree is mounted elsewhere.
OWN_ROOT: Final = Path("/sys/fs/cgroup")
FOLDERS_LIMIT: Final = 100_000


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
