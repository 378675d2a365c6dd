"""Taking a file out of a training container, which is not trusted: through /proc/<pid>/root, without following a link
that leads out of it, nothing but a plain file, and no more than a limit."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.orders import CaptureError

SIZE_LIMIT_BYTES: Final = 4 << 30
CHUNK_BYTES: Final = 1 << 20
_OPENAT2: Final = 437  # the same number on every architecture
# The container's root is the root of every name, also of absolute links; magic links (/proc/…/fd) are refused.
_RESOLVE_IN_ROOT: Final = 0x10
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_HOW: Final = struct.Struct("=QQQ")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class NotThereError(CaptureError):
    """The file does not exist (yet)."""


def take_file(
    pid: int, path: str, target: Path, proc_root: Path = Path("/proc"), limit_bytes: int = SIZE_LIMIT_BYTES
) -> int:
    """Copy a file that the process sees at `path`; returns its size. The copy is ours: what the process does to its
    own file afterwards changes nothing."""
    descriptor = open_in(pid, path, proc_root)
    with os.fdopen(descriptor, "rb") as source:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureError(f"{path} of pid {pid} is not a plain file; the container put something else there")
        copied = 0
        with target.open("xb") as copy:
            while chunk := source.read(CHUNK_BYTES):
                copied += len(chunk)
                # Read to the size it had when opened: a file that keeps growing must not fill our disk.
                if copied > min(limit_bytes, status.st_size):
                    raise CaptureError(
                        f"{path} of pid {pid} has more than {copied - len(chunk)} bytes and grows, or is too large"
                    )
                copy.write(chunk)
    return copied


def open_in(pid: int, path: str, proc_root: Path = Path("/proc")) -> int:
    """A descriptor of what the process sees at `path`. Opening does not block on a FIFO and does not touch a device."""
    try:
        root = os.open(proc_root / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"the file system of pid {pid} cannot be entered: {error.strerror}") from error
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
        how = _HOW.pack(flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        descriptor = int(_LIBC.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
    finally:
        os.close(root)
    if number == errno.ENOENT:
        raise NotThereError(f"{path} of pid {pid} does not exist")
    raise CaptureError(f"{path} of pid {pid} cannot be opened: {os.strerror(number)}; is it a link?")


def remove_file(pid: int, path: str, proc_root: Path = Path("/proc")) -> None:
    """Remove what was fetched, if it is still there and can be removed; a failure is the container's own loss."""
    folder, _, name = path.rpartition("/")
    try:
        descriptor = open_in(pid, folder or "/", proc_root)
    except CaptureError:
        return
    try:
        os.unlink(name, dir_fd=descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)
