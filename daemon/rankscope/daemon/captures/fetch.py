"""Copies a file out of an untrusted training container: through /proc/<pid>/root, without following links that lead
out of it; regular files of the process' own user only, up to a size limit and within the quota."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from rankscope.daemon import procfs
from rankscope.daemon.captures.orders import CaptureError, Reserve
from rankscope.daemon.process_files import FileError, NoFileError, check_owner, locate, locate_file

MAX_SIZE_BYTES: Final = 4 << 30
CHUNK_BYTES: Final = 1 << 20
HOLE: Final = bytes(4096)
# A recording, and beside it the artifact that is made of it, or its windows.
ROOM_FACTOR: Final = 2


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
    try:
        place = locate_file(pid, path, proc_root)
    except NoFileError as error:
        raise NotThereError(str(error)) from error
    except FileError as error:
        raise CaptureError(str(error)) from error
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureError(f"{what} is not a plain file; the container put something else there")
        if status.st_nlink > 1:
            raise CaptureError(f"{what} has other names as well; it may be a file that is not the process' to give")
        try:
            check_owner(what, status, procfs.real_uid(f"{proc_root}/{pid}"))
        except FileError as error:
            raise CaptureError(str(error)) from error
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
        place = locate(pid, folder or "/", proc_root, os.O_DIRECTORY)
    except FileError:
        return False
    try:
        os.unlink(name, dir_fd=place)
    except OSError:
        return False
    finally:
        os.close(place)
    return True
