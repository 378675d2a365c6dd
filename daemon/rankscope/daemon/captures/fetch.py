"""Copies a file out of an untrusted training container: through /proc/<pid>/root, without following links that lead
out of it, regular files only, up to a size limit."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import struct
from pathlib import Path
from typing import BinaryIO, Final

from rankscope.daemon.captures.orders import CaptureError

SIZE_LIMIT_BYTES: Final = 4 << 30
CHUNK_BYTES: Final = 1 << 20
_OPENAT2: Final = 437  # the same on all architectures that torch supports
# Every name is resolved below the container's root, including absolute links; magic links (/proc/…/fd) are refused.
_RESOLVE_IN_ROOT: Final = 0x10
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_HOW: Final = struct.Struct("=QQQ")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class NotThereError(CaptureError):
    """The file does not exist (yet)."""


def take_file(
    pid: int, path: str, target: Path, proc_root: Path = Path("/proc"), limit_bytes: int = SIZE_LIMIT_BYTES
) -> int:
    """Copy a text file that the process sees at `path`; returns its size. Later changes to the process' own file do
    not affect the copy."""
    what = f"{path} of pid {pid}"
    place = _locate(pid, path, proc_root, os.O_NOFOLLOW)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureError(f"{what} is not a plain file; the container put something else there")
        if status.st_nlink > 1:
            raise CaptureError(f"{what} has other names as well; it may be a file that is not the process' to give")
        free_bytes = shutil.disk_usage(target.parent).free
        if status.st_size > min(limit_bytes, free_bytes // 2):
            raise CaptureError(
                f"{what} has {status.st_size} bytes; {limit_bytes} at most are taken, and half of what is free in "
                f"{target.parent} ({free_bytes}); record less"
            )
        # Opened only now: opening a device or a FIFO can have effects or block.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        source = os.fdopen(os.open(f"/proc/self/fd/{place}", flags), "rb", buffering=0)
    finally:
        os.close(place)
    with source, target.open("xb") as copy:
        try:
            _copy(source, copy, status.st_size, what)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    return status.st_size


def _copy(source: BinaryIO, copy: BinaryIO, size_bytes: int, what: str) -> None:
    """Copy exactly the size it had: a growing file must not fill the disk."""
    copied = 0
    while chunk := source.read(CHUNK_BYTES):
        copied += len(chunk)
        if copied > size_bytes:
            break
        # Holes read as zeros: a huge sparse file would take real space here.
        if b"\0" in chunk:
            raise CaptureError(f"{what} is no text; libkineto did not write it, or its disk was full")
        copy.write(chunk)
    if copied != size_bytes:
        raise CaptureError(f"{what} had {size_bytes} bytes and changed while it was read; it is not kept")


def remove_file(pid: int, path: str, proc_root: Path = Path("/proc")) -> bool:
    """Remove a file that was written for us, if it exists and can be removed."""
    folder, _, name = path.rpartition("/")
    try:
        place = _locate(pid, folder or "/", proc_root, os.O_DIRECTORY)
    except CaptureError:
        return False
    try:
        os.unlink(name, dir_fd=place)
    except OSError:
        return False
    finally:
        os.close(place)
    return True


def _locate(pid: int, path: str, proc_root: Path, flags: int) -> int:
    """An O_PATH descriptor of what the process sees at `path`: nothing is opened."""
    try:
        root = os.open(proc_root / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"the file system of pid {pid} cannot be entered: {error.strerror}") from error
    try:
        how = _HOW.pack(os.O_PATH | os.O_CLOEXEC | flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        descriptor = int(_LIBC.syscall(_OPENAT2, root, os.fsencode(path), how, len(how)))
        number = ctypes.get_errno()
    finally:
        os.close(root)
    if descriptor >= 0:
        return descriptor
    if number == errno.ENOENT:
        raise NotThereError(f"{path} of pid {pid} does not exist")
    if number == errno.ENOSYS:
        raise CaptureError("this kernel has no openat2(); files are not taken from containers without it (Linux 5.6)")
    raise CaptureError(f"{path} of pid {pid} cannot be reached: {os.strerror(number)}; is a link or a file in its way?")
