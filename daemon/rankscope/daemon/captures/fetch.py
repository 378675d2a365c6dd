"""Copies a file out of an untrusted training container: through /proc/<pid>/root, without following links that lead
out of it; regular files of the process' own user only, up to a size limit and within the quota."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path
from typing import BinaryIO, Final

from rankscope.daemon import procfs
from rankscope.daemon.captures.orders import CaptureError, Reserve

MAX_SIZE_BYTES: Final = 4 << 30
CHUNK_BYTES: Final = 1 << 20
HOLE: Final = bytes(4096)
# A recording, and beside it the artifact that is made of it, or its windows.
ROOM_FACTOR: Final = 2
_OPENAT2: Final = 437  # the same on all architectures that torch supports
# Every name is resolved below the container's root, including absolute links; magic links (/proc/…/fd) are refused.
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE_IN_ROOT: Final = 0x10
_HOW: Final = struct.Struct("=QQQ")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class NotThereError(CaptureError):
    """The file does not exist (yet)."""


def take_file(
    pid: int,
    path: str,
    target: Path,
    reserve: Reserve,
    proc_root: Path = Path("/proc"),
    limit_bytes: int = MAX_SIZE_BYTES,
) -> os.stat_result:
    """Copy a text file that the process sees at `path` and that the process wrote; returns its status. Later changes to
    the process' own file do not affect the copy."""
    what = f"{path} of pid {pid}"
    place = _locate_file(pid, path, proc_root)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureError(f"{what} is not a plain file; the container put something else there")
        if status.st_nlink > 1:
            raise CaptureError(f"{what} has other names as well; it may be a file that is not the process' to give")
        _check_owner(what, status, procfs.real_uid(f"{proc_root}/{pid}"))
        if status.st_size > limit_bytes:
            raise CaptureError(f"{what} has {status.st_size} bytes; {limit_bytes} at most are taken; record less")
        # Opened only now: opening a device or a FIFO can have effects or block.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        source = os.fdopen(os.open(f"/proc/self/fd/{place}", flags), "rb", buffering=0)
    finally:
        os.close(place)
    with source:
        copy_file(source, target, status.st_size, what, reserve)
    return status


def _check_owner(what: str, status: os.stat_result, uid: int | None) -> None:
    """The daemon reads files of all users; a container gets nothing from it that its own user may not read. By the
    real uid: a set-user-id program changes the others. The owner of /proc/<pid> is root's for a process that is not
    dumpable, which is the process' own choice."""
    if status.st_uid == uid or status.st_mode & stat.S_IROTH:
        return
    raise CaptureError(
        f"{what} belongs to uid {status.st_uid} and the process runs as uid {uid}, which may not read it: it was put "
        "there and is not a trace of this process; not read"
    )


def copy_file(source: BinaryIO, target: Path, size_bytes: int, what: str, reserve: Reserve) -> None:
    """Copy exactly the size it had, if there is room: a growing file must not fill the disk. Leaves nothing behind
    on an error."""
    reserve(target, size_bytes * ROOM_FACTOR)
    with target.open("xb") as copy:
        try:
            _copy(source, copy, size_bytes, what)
        except OSError as error:
            target.unlink(missing_ok=True)
            raise CaptureError(f"{what} cannot be copied to {target.parent}: {error.strerror}") from error
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _copy(source: BinaryIO, copy: BinaryIO, size_bytes: int, what: str) -> None:
    copied = 0
    while chunk := source.read(CHUNK_BYTES):
        copied += len(chunk)
        if copied > size_bytes:
            break
        # Holes read as zeros: a huge sparse file would take real space here.
        if HOLE in chunk:
            raise CaptureError(f"{what} is no text; no profiler wrote it, or its disk was full")
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


def _locate_file(pid: int, path: str, proc_root: Path) -> int:
    """An O_PATH descriptor of a file in its own directory. A file mounted there is refused, because mounting a file
    needs no permission to read it."""
    folder, _, name = path.rpartition("/")
    place = _locate(pid, folder or "/", proc_root, os.O_DIRECTORY)
    try:
        descriptor, number = _openat2(place, name, os.O_NOFOLLOW, _RESOLVE_BENEATH | _RESOLVE_NO_XDEV)
    finally:
        os.close(place)
    if number == errno.EXDEV:
        raise CaptureError(f"another file is mounted at {path} of pid {pid}; not read: the process did not write it")
    return _checked(descriptor, number, pid, path)


def _locate(pid: int, path: str, proc_root: Path, flags: int) -> int:
    """An O_PATH descriptor of what the process sees at `path`: nothing is opened."""
    try:
        root = os.open(proc_root / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"the file system of pid {pid} cannot be entered: {error.strerror}") from error
    try:
        descriptor, number = _openat2(root, path, flags, _RESOLVE_IN_ROOT)
    finally:
        os.close(root)
    return _checked(descriptor, number, pid, path)


def _openat2(folder: int, path: str, flags: int, resolve: int) -> tuple[int, int]:
    how = _HOW.pack(os.O_PATH | os.O_CLOEXEC | flags, 0, resolve | _RESOLVE_NO_MAGICLINKS)
    descriptor = int(_LIBC.syscall(_OPENAT2, folder, os.fsencode(path), how, len(how)))
    return descriptor, 0 if descriptor >= 0 else ctypes.get_errno()


def _checked(descriptor: int, number: int, pid: int, path: str) -> int:
    if number == 0:
        return descriptor
    if number == errno.ENOENT:
        raise NotThereError(f"{path} of pid {pid} does not exist")
    if number == errno.ENOSYS:
        raise CaptureError("this kernel has no openat2(); files are not taken from containers without it (Linux 5.6)")
    raise CaptureError(f"{path} of pid {pid} cannot be reached: {os.strerror(number)}; is a link or a file in its way?")
