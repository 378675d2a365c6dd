"""A /proc in which a daemon sees the processes that a test admits, and no others of the machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


class ProcView:
    """A folder of links into the real one. What is not a process is there from the beginning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for entry in PROC.iterdir():
            if not entry.name.isdigit():
                (folder / entry.name).symlink_to(entry)

    def admit(self, pids: Iterable[int]) -> None:
        for pid in pids:
            (self.folder / str(pid)).symlink_to(PROC / str(pid))
