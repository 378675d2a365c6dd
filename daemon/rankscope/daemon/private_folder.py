"""A folder for what py-spy writes: for this user's eyes only, gone with the daemon, or swept by the next one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "rankscope-stacks-"


class PrivateFolder:
    """Stacks tell about other users' programs, so nobody else may read here.

    Raises OSError when nothing is writable."""

    def __init__(self) -> None:
        self.path, self._descriptor = _make()
        _sweep(self.path.parent)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _make() -> tuple[Path, int]:
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
    # Held as long as the daemon lives, however it dies and in whichever pid namespace: the mark of a folder in use.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    if path.exists():
        return path, descriptor
    os.close(descriptor)
    return _make()  # another daemon swept it before it was marked


def _sweep(parent: Path) -> None:
    """Remove what daemons left behind that were killed."""
    for folder in parent.glob(PREFIX + "*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use
        finally:
            os.close(descriptor)
