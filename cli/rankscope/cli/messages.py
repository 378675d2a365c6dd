"""What commands print and how they exit: plain lines on stdout and stderr, the log, and one text and exit status for
a failure (docs/cli.md has the table). Text of files, daemons and containers cannot control the terminal: only
this module prints."""

from __future__ import annotations

import logging
import sys
from enum import IntEnum
from typing import Any

from rankscope.common.text import printable


class Exit(IntEnum):
    OK = 0
    FAILED = 1  # the command did its work, and the result is bad; or a service could not start
    USAGE = 2  # flags, configuration, or a file that cannot be read or written: the user changes the command
    UNDECIDED = 3  # the data do not decide
    UNREACHABLE = 4  # no server answers, or it went away
    REFUSED = 5  # the server declined: no permission, a limit, or the state of the run
    NOT_FOUND = 6  # the server does not know the run, the rank, the capture or the report
    INTERRUPTED = 130  # Ctrl-C


class CommandError(Exception):
    """Ends the command: `main` prints the text, which names the reason and the next step, and exits with the status."""

    status = Exit.USAGE

    def __init__(self, text: str, status: Exit | None = None) -> None:
        super().__init__(text)
        if status is not None:
            self.status = status


def cannot_read(error: OSError | ValueError) -> str:
    """Behind the name of a file."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot be read: {reason}"


def cannot_write(error: OSError, option: str) -> str:
    return f"{error.filename}: cannot be written: {error.strerror or error}; next step: name another with {option}"


_CALLS = {
    "UNAVAILABLE": Exit.UNREACHABLE,
    "DEADLINE_EXCEEDED": Exit.UNREACHABLE,
    "CANCELLED": Exit.UNREACHABLE,
    "UNAUTHENTICATED": Exit.REFUSED,
    "PERMISSION_DENIED": Exit.REFUSED,
    "RESOURCE_EXHAUSTED": Exit.REFUSED,
    "FAILED_PRECONDITION": Exit.REFUSED,
    "ALREADY_EXISTS": Exit.REFUSED,
    "ABORTED": Exit.REFUSED,
    "NOT_FOUND": Exit.NOT_FOUND,
    "INVALID_ARGUMENT": Exit.USAGE,
    "OUT_OF_RANGE": Exit.USAGE,
    "UNIMPLEMENTED": Exit.USAGE,  # another kind of server
}


def of_call(error: Any) -> Exit:
    """Of a failed gRPC call. gRPC has no types, and commands without it use this module."""
    return _CALLS.get(error.code().name, Exit.FAILED)


def to_stdout(text: str) -> None:
    """Lines on stdout: a result."""
    print("\n".join(printable(line) for line in text.split("\n")), flush=True)


def to_stderr(text: str) -> None:
    """One line on stderr: an error, a warning, what was written where."""
    print(printable(text), file=sys.stderr, flush=True)


def refuse(text: str, status: Exit = Exit.USAGE) -> int:
    """Says on stderr why the command fails, in place of its progress, and returns its exit status."""
    overwrite("")
    to_stderr(f"error: {text}")
    return status


def overwrite(text: str) -> None:
    """A line on stderr that the next one replaces; nothing if stderr is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{printable(text)}", end="", file=sys.stderr, flush=True)


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class _OneLine(logging.Formatter):
    """2026-01-31T12:00:00 warning rankscope.daemon.loop: text"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return printable(" | ".join(super().format(record).splitlines()))
