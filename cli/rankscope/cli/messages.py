"""Plain lines on stdout and stderr, and the log. Text of files, daemons and containers cannot control the terminal:
only this module prints."""

from __future__ import annotations

import logging
import sys

from rankscope.cli.exit_codes import Exit
from rankscope.common.text import printable


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
