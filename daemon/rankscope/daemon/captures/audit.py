"""The daemon's audit records: who requested a capture on this node, for what, and how it ended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from rankscope.common.audit import LOGGER, AuditRecord, audit_line
from rankscope.daemon.captures.records import DUTY_CYCLE
from rankscope.v1 import capture_service_pb2 as pb

audit_log = logging.getLogger(LOGGER)

OPERATOR = "rankscope-operator"
_OPTIONS = ("shapes", "stacks", "memory", "flops", "modules", "allow_slowdown")


class CaptureAudit:
    """`has_tls`: a TCP peer has presented an operator's certificate, or was refused."""

    def __init__(self, node: str, has_tls: bool, unix_seconds: Callable[[], float] = time.time) -> None:
        self._node = node
        self._has_tls = has_tls
        self._unix_seconds = unix_seconds

    def asked(self, capture: pb.Capture, request: pb.StartCaptureRequest) -> None:
        ranks = ",".join(str(entry.rank) for entry in capture.ranks)
        record = replace(self._of(capture.requested_by), job=capture.job, id=capture.id, reason=capture.reason)
        self._say(replace(_wanted(record, request), ranks=ranks or request.ranks))

    def refused(self, requested_by: str, request: pb.StartCaptureRequest, why: str) -> None:
        record = replace(self._of(requested_by), event="refused", job=request.job, id=request.id, reason=request.reason)
        self._say(replace(_wanted(record, request), result="Refused", message=why))

    def ended(self, capture: pb.Capture | None) -> None:
        if capture is None:
            return  # deleted at the very end
        ranks = ",".join(str(entry.rank) for entry in capture.ranks)
        delivered = sum(entry.state == pb.CAPTURE_STATE_ANALYSED for entry in capture.ranks)
        errors = dict.fromkeys(entry.error for entry in capture.ranks if entry.error)
        record = replace(
            self._of(capture.requested_by),
            event="ended",
            job=capture.job,
            id=capture.id,
            ranks=ranks,
            reason=capture.reason,
            result=pb.CaptureState.Name(capture.state).removeprefix("CAPTURE_STATE_").lower(),
            message="; ".join([f"{delivered}/{len(capture.ranks)} ranks delivered", *errors]),
        )
        self._say(record)

    def _of(self, requested_by: str) -> AuditRecord:
        record = AuditRecord("asked", "local", node=self._node)
        if requested_by == DUTY_CYCLE:
            return replace(record, via="duty cycle", user="rankscope-daemon", verified=True)
        if requested_by.startswith(("ipv4:", "ipv6:")):
            if self._has_tls:
                return replace(record, via="operator", user=OPERATOR, verified=True, address=requested_by)
            return replace(record, via="loopback", address=requested_by)
        # Only the daemon's user and root can open the socket: its mode is 0600.
        return replace(record, user=f"uid {os.geteuid()}", verified=True)

    def _say(self, record: AuditRecord) -> None:
        audit_log.info("%s", audit_line(record, self._unix_seconds()))


def _wanted(record: AuditRecord, request: pb.StartCaptureRequest) -> AuditRecord:
    length = request.WhichOneof("length")
    return replace(
        record,
        ranks=request.ranks,
        steps=request.steps if length == "steps" else None,
        seconds=request.seconds if length == "seconds" else None,
        options=tuple(name for name in _OPTIONS if getattr(request.options, name)),
    )
