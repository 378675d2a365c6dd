"""The audit log: records go to the log on stderr, at any level, and to a file if configured."""

from __future__ import annotations

import argparse
import io
import logging
import os
import stat
import sys
from logging.handlers import WatchedFileHandler
from pathlib import Path

from rankscope.cli.messages import to_stderr
from rankscope.common.audit import LOGGER


class AuditFileError(Exception):
    """The audit file cannot be written: records would be lost."""


def add_audit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--audit-log", type=Path, metavar="FILE", help="append a line of JSON for every capture asked for and ended"
    )


def open_audit_log(path: Path | None) -> None:
    """Call once, after logging is configured. Raises AuditFileError for a file that cannot be written."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    if path is None:
        return
    try:
        handler = _AuditFile(path)
    except OSError as error:
        raise AuditFileError(f"--audit-log {path}: {error.strerror or error}") from error
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)


class _AuditFile(WatchedFileHandler):
    """Reopens the file after it was moved, as logrotate does. One line is one write, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._is_told = False
        super().__init__(path, encoding="utf-8")

    def _open(self) -> io.TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.baseFilename, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(22, "not a plain file")
        return io.TextIOWrapper(io.FileIO(descriptor, "ab"), encoding="utf-8", write_through=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the directory is gone: the service must not fail
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name the standard library gave it
        """The disk is full: reported once; stderr has the records too."""
        if not self._is_told:
            self._is_told = True
            to_stderr(f"warning: {self.baseFilename}: {sys.exc_info()[1]}; audit records are missing there")
