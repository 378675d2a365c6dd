"""Runs a service in the foreground until SIGTERM or SIGINT, with one-line logs on stderr."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Protocol

from rankscope.cli.audit_log import AuditFileError, open_audit_log
from rankscope.cli.messages import log_to_stderr, to_stderr
from rankscope.daemon.loop import Addresses
from rankscope.daemon.server.sockets import ListenError


class Service(Protocol):
    @property
    def addresses(self) -> Addresses: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run_until_signalled(name: str, service: Service, log_level: str, audit_log: Path | None = None) -> int:
    """The exit code: 1 if an address is in use or audit records cannot be kept, with the reason on stderr."""
    log_to_stderr(log_level)
    try:
        open_audit_log(audit_log)
    except AuditFileError as error:
        to_stderr(f"error: {error}")
        return 1
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        service.start()
    except ListenError as error:
        to_stderr(f"error: {error}")
        return 1
    to_stderr(f"rankscope {name}: {service.addresses}")
    stopping.wait()
    service.stop()
    return 0
