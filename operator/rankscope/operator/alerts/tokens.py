"""The secret that Alertmanager shows: a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

SHORTEST_CHARACTERS = 16
LONGEST_BYTES = 4096


class TokenError(Exception):
    """A token that cannot be used: names the file, the reason and the next step."""


def read_token(path: Path) -> bytes:
    """The token in a file of ours (or of root's) that nobody else can read."""
    try:
        # Links are followed: a mounted Kubernetes secret is one.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        reason = f"token file {path}: {error.strerror}"
        raise TokenError(f"{reason}; next: (umask 077; openssl rand -hex 32 > {path})") from error
    try:
        _check_owner(path, os.fstat(descriptor))
        token = os.read(descriptor, LONGEST_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if len(token) < SHORTEST_CHARACTERS or len(token) > LONGEST_BYTES or not token.isascii() or b" " in token:
        raise TokenError(
            f"token file {path} must hold one word of {SHORTEST_CHARACTERS} to {LONGEST_BYTES} ASCII characters; "
            f"next: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TokenError(f"token file {path} is not a regular file; name another one")
    if status.st_uid not in (0, os.geteuid()):
        raise TokenError(f"token file {path} belongs to user {status.st_uid}; next: chown {os.geteuid()} {path}")
    # A mounted Kubernetes secret is root's, and a pod of another user reads it by its group: there is no other way.
    closed_to = 0o037 if status.st_uid == 0 and os.geteuid() != 0 and status.st_gid in _own_groups() else 0o077
    if stat.S_IMODE(status.st_mode) & closed_to:
        raise TokenError(f"token file {path} can be read or written by others; next: chmod 600 {path}")


def _own_groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def make_token(path: Path) -> bytes:
    """A new token in a new file. Raises FileExistsError: a token that somebody prepared is not ours."""
    token = secrets.token_hex(32).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token
