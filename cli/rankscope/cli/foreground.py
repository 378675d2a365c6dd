"""Runs a service in the foreground until SIGTERM or SIGINT, with one-line logs on stderr."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Protocol

from rankscope.cli.audit_log import AuditFileError, open_audit_log
from rankscope.daemon.loop import Addresses
from rankscope.daemon.problem_log import OneLine
from rankscope.daemon.server.sockets import ListenError


class Service(Protocol):
    @property
    def addresses(self) -> Addresses: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


def run_until_signalled(name: str, service: Service, log_level: str, audit_log: Path | None = None) -> int:
    """The exit code: 1 if an address is in use or audit records cannot be kept, with the reason on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=log_level.upper(), handlers=[handler])
    try:
        open_audit_log(audit_log)
    except AuditFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        service.start()
    except ListenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"rankscope {name}: {service.addresses}", file=sys.stderr, flush=True)
    stopping.wait()
    service.stop()
    return 0
