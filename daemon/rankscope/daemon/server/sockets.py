"""Taking the addresses the daemon listens on, so that a second daemon fails clearly and the first one lives."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from rankscope.daemon.config import default_socket

# sun_path is 108 bytes with its NUL.
SOCKET_PATH_BYTES = 107


class ListenError(Exception):
    """An address cannot be used: names it, the reason and the next step."""


def _close_to_others(directory: Path) -> None:
    """Ours in /tmp may have been prepared by someone else; one that a pod mounts is ours and open to all."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ListenError(
            f"{directory} must be a directory of user {os.geteuid()} that nobody else can enter (mode 0700); "
            "correct or remove it, or pass another --socket"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        directory.chmod(0o700)


class SocketLock:
    """Holds the right to a Unix socket path for as long as this process lives.

    gRPC unlinks whatever socket it finds at its path, a living daemon's too, so the lock is what protects that one. The
    kernel drops the lock with its owner: a socket found while the lock is free belongs to nobody."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._check_length()
        self._prepare_directory()
        self._lock_path = path.with_name(path.name + ".lock")
        self._descriptor = self._take()
        # A link is nobody's socket, wherever it leads.
        if path.is_socket() and not path.is_symlink():
            path.unlink()
        elif path.is_symlink() or path.exists():
            self.release()
            raise ListenError(f"{path} exists and is not a socket; remove it or pass another --socket")

    def release(self) -> None:
        """Remove the socket, then give up the lock. The lock's file stays: unlinking it would let two hold it."""
        if self._descriptor is None:
            return
        if self.path.is_socket() and not self.path.is_symlink():
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None

    def _check_length(self) -> None:
        if len(os.fsencode(self.path)) > SOCKET_PATH_BYTES:
            limit = f"a Unix socket's path has at most {SOCKET_PATH_BYTES} bytes"
            raise ListenError(f"{self.path}: {limit}; pass a shorter --socket")

    def _prepare_directory(self) -> None:
        directory = self.path.parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A directory that the user chose is the user's affair.
            if str(self.path) == default_socket():
                _close_to_others(directory)
        except OSError as error:
            raise ListenError(f"{directory} cannot be made: {error.strerror}; pass another --socket") from error

    def _take(self) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self._lock_path, flags, 0o600)
        except OSError as error:
            reason = f"{self._lock_path} cannot be opened: {error.strerror}"
            raise ListenError(f"{reason}; pass another --socket") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ListenError(f"{self._lock_path} cannot be locked: {error.strerror}") from error
            raise ListenError(
                f"{self.path} is in use by another rankscope daemon (pid {owner or 'unknown'}); "
                "stop it or pass another --socket"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return descriptor


def in_use(port: int, flag: str) -> ListenError:
    return ListenError(
        f"port {port} is in use, perhaps by another rankscope daemon; stop it or pass {flag} 127.0.0.1:0"
    )
