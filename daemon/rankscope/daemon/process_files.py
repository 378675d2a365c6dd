"""Opens files of untrusted containers: through /proc/<pid>/root, without following links that lead out of it, and only
what the process' own user may read."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path
from typing import Final

from rankscope.daemon import procfs

_OPENAT2: Final = 437  # the same on all architectures that torch supports
# Every name is resolved below the container's root, including absolute links; magic links (/proc/…/fd) are refused.
_RESOLVE_NO_XDEV: Final = 0x01
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_BENEATH: Final = 0x08
_RESOLVE_IN_ROOT: Final = 0x10
_HOW: Final = struct.Struct("=QQQ")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class FileError(Exception):
    """The file is not read. The message says why."""


class NoFileError(FileError):
    """The file does not exist (yet)."""


def read_source(pid: int, path: str, proc_root: Path, limit_bytes: int) -> bytes:
    """Return the beginning of a source file that the process sees at `path` and may read."""
    what = f"{path} of pid {pid}"
    place = locate(pid, path, proc_root)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{what} is not a plain file")
        check_owner(what, status, procfs.real_uid(f"{proc_root}/{pid}"))
        source = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(place)
    try:
        return os.read(source, limit_bytes)
    finally:
        os.close(source)


def check_owner(what: str, status: os.stat_result, uid: int | None) -> None:
    """The daemon reads files of all users; a container gets nothing from it that its own user may not read. By the
    real uid: a set-user-id program changes the others. The owner of /proc/<pid> is root's for a process that is not
    dumpable, which is the process' own choice."""
    if status.st_uid == uid or status.st_mode & stat.S_IROTH:
        return
    raise FileError(
        f"{what} belongs to uid {status.st_uid} and the process runs as uid {uid}, which may not read it: it was put "
        "there and is not this process' own; not read"
    )


def locate_file(pid: int, path: str, proc_root: Path) -> int:
    """An O_PATH descriptor of a file in its own directory. A file mounted there is refused, because mounting a file
    needs no permission to read it."""
    folder, _, name = path.rpartition("/")
    place = locate(pid, folder or "/", proc_root, os.O_DIRECTORY)
    try:
        descriptor, number = _openat2(place, name, os.O_NOFOLLOW, _RESOLVE_BENEATH | _RESOLVE_NO_XDEV)
    finally:
        os.close(place)
    if number == errno.EXDEV:
        raise FileError(f"another file is mounted at {path} of pid {pid}; not read: the process did not write it")
    return _checked(descriptor, number, pid, path)


def locate(pid: int, path: str, proc_root: Path, flags: int = 0) -> int:
    """An O_PATH descriptor of what the process sees at `path`: nothing is opened."""
    try:
        root = os.open(proc_root / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"the file system of pid {pid} cannot be entered: {error.strerror}") from error
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
        raise NoFileError(f"{path} of pid {pid} does not exist")
    if number == errno.ENOSYS:
        raise FileError("this kernel has no openat2(); files are not taken from containers without it (Linux 5.6)")
    raise FileError(f"{path} of pid {pid} cannot be reached: {os.strerror(number)}; is a link or a file in its way?")
