"""Runs a service in the foreground until SIGTERM or SIGINT, with one-line logs on stderr and an audit log."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Protocol

from rankscope.cli.messages import CommandError, Exit, cannot_write, log_to_stderr, refuse, to_stderr
from rankscope.cli.options import add_options
from rankscope.cli.server_notes import announced
from rankscope.common.audit import LOGGER
from rankscope.daemon.config import LOG_LEVELS
from rankscope.daemon.server.sockets import ListenError


class Service(Protocol):
    @property
    def addresses(self) -> object:
        """Printed once it serves."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run_until_signalled(
    name: str,
    service: Service,
    log_level: str,
    audit_log: Path | None = None,
    failures: tuple[type[Exception], ...] = (ListenError,),
    targets: Callable[[], Sequence[str]] = tuple,
) -> int:
    """The exit code: 1 if `start` raises one of `failures`, as when an address is in use, with the reason on stderr.
    Commands of this user find the service at the first of `targets`, which are known once it serves.
    Raises CommandError if audit records cannot be kept."""
    log_to_stderr(log_level)
    open_audit_log(audit_log)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        service.start()
    except failures as error:
        return refuse(str(error), Exit.FAILED)
    with announced(targets(), f"rankscope {name}"):
        to_stderr(f"rankscope {name}: {service.addresses}")
        stopping.wait()
    service.stop()
    return 0


# Flags of the operator and of the correlator.


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--listen", default="127.0.0.1:9466", metavar="HOST:PORT", help="/metrics, /healthz, /readyz")
    add_options(parser, "--mfu-target")
    parser.add_argument(
        "--alerts-token", type=Path, metavar="FILE", help="take captures when Alertmanager asks with this token"
    )
    parser.add_argument(
        "--alerts-listen", default="127.0.0.1:9467", metavar="HOST:PORT", help="where it asks (default: %(default)s)"
    )
    parser.add_argument(
        "--audit-log",
        type=Path,
        metavar="FILE",
        help="append a line of JSON for each capture, when it is requested and when it ends",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="least severe log line to print")


def add_tls_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tls-certificate", type=Path, metavar="FILE", help="ours, for daemons; with the next two")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    group.add_argument("--tls-authority", type=Path, metavar="FILE", help="who signed the certificates of the others")


def tls_files(arguments: argparse.Namespace) -> tuple[Path, Path, Path] | None:
    files = (arguments.tls_certificate, arguments.tls_key, arguments.tls_authority)
    if any(files) and not all(files):
        raise ValueError("--tls-certificate, --tls-key and --tls-authority belong together")
    return files if all(files) else None


def host_port(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise ValueError(f"{flag} {text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


# The audit log: records go to the log on stderr, at any level, and to a file if configured.


def open_audit_log(path: Path | None) -> None:
    """Call once, after logging is configured. Raises CommandError for a file that cannot be written."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    if path is None:
        return
    try:
        handler = _AuditFile(path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise CommandError(cannot_write(error, "--audit-log")) from error
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

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - overrides logging.Handler
        """The disk is full: reported once; stderr has the records too."""
        if not self._is_told:
            self._is_told = True
            to_stderr(f"warning: {self.baseFilename}: {sys.exc_info()[1]}; audit records are missing there")
