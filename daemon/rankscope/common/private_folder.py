"""A folder of our own, for what describes other users' programs: nobody else may read it or create it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path


class FolderError(OSError):
    """Why the folder cannot be used."""


def claim(folder: Path) -> int:
    """A descriptor that locks the folder until it is closed. The folder is made if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise FolderError(f"{folder} cannot be used: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise FolderError(f"{folder} belongs to another user (uid {status.st_uid})")
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FolderError:
        os.close(descriptor)
        raise
    except OSError as error:
        os.close(descriptor)
        reason = "in use by another process" if isinstance(error, BlockingIOError) else error.strerror
        raise FolderError(f"{folder} cannot be used: {reason}") from error
    return descriptor


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file: after a crash it has the old content or the new one. Raises OSError."""
    new = path.with_suffix(".new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600), "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
