"""Notes that servers of this user leave of their addresses, so that commands find them without `--connect`.

A note is a file in a folder that only this user may write to. Its server holds a lock on it: a note without a lock
is of a process that has ended, and is removed. What is in a note decides who receives requests, so nothing is read
from a folder or a file of another user."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.cli.contexts import EndpointError
from rankscope.common.http_server import is_loopback
from rankscope.common.text import one_line
from rankscope.daemon.config import default_socket

MAX_NOTES = 64
MAX_NOTE_BYTES = 8192
MAX_COMMAND_CHARACTERS = 120
_SUFFIX = ".json"
_LOCAL_PORT = re.compile(r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):\d{1,5}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerNote:
    target: str
    command: str  # printable, bounded


def notes_folder() -> Path:
    return Path(default_socket()).parent / "servers"


@contextlib.contextmanager
def announced(targets: Sequence[str], command: str) -> Iterator[None]:
    """Leave a note of the first target, if there is one, until the end of the context. A note that cannot be left is no
    reason to fail."""
    path, descriptor = _leave(targets[0], command) if targets else (None, None)
    try:
        yield
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        if descriptor is not None:
            os.close(descriptor)


def running_servers() -> list[ServerNote]:
    """The servers of this user that run now, oldest first. Raises EndpointError for a folder of another user."""
    folder = notes_folder()
    for each in (folder.parent, folder):
        check_owner(each)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)[:MAX_NOTES]
    except OSError:
        return []
    return [note for path in paths if (note := _read(path)) is not None]


def check_owner(directory: Path) -> None:
    """Anybody can make the directory in /tmp, and would then get requests that are meant for this user's daemon."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise EndpointError(f"{directory}: {error.strerror}; name the daemon with --connect") from error
    is_open = stat.S_IMODE(status.st_mode) & 0o022
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_open:
        raise EndpointError(
            f"{directory} is not trusted: it must be a directory of user {os.geteuid()} that only this user can write "
            "to. Remove it and restart your daemon, or name a daemon with --connect unix:PATH"
        )


def _leave(target: str, command: str) -> tuple[Path | None, int | None]:
    descriptor: int | None = None
    try:
        folder = notes_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in (folder.parent, folder):
            check_owner(each)
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        new = path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # Before it has its name: a reader removes a note without a lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note = {"target": target, "command": one_line(command, MAX_COMMAND_CHARACTERS)}
        os.write(descriptor, json.dumps(note).encode())
        new.rename(path)
    except (OSError, EndpointError) as error:
        log.debug("no note of %s: %s", target, error)
        return None, descriptor
    return path, descriptor


def _read(path: Path) -> ServerNote | None:
    """None if the note is of a process that has ended, of another user, or not a note."""
    try:
        # O_NONBLOCK: otherwise, opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _note(file.read(MAX_NOTE_BYTES + 1))
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _note(content: bytes) -> ServerNote | None:
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError):
        return None
    target, command = (entry.get(key) for key in ("target", "command")) if isinstance(entry, dict) else (None, None)
    if not isinstance(target, str) or not isinstance(command, str) or not _is_local(target):
        return None
    return ServerNote(target, one_line(command, MAX_COMMAND_CHARACTERS))


def _is_local(target: str) -> bool:
    if target.startswith("unix:/"):
        return target.isprintable()
    match = _LOCAL_PORT.fullmatch(target)
    return match is not None and is_loopback(match[1].strip("[]"))
