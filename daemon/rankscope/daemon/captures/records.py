"""The records of captures: the request, what each rank did, and why it failed; and the audit lines about them.

A record is the protobuf message itself. It is changed only here under a lock, returned as a copy, and saved at every
change of state."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from rankscope.common.audit import LOGGER, AuditRecord, audit_line
from rankscope.daemon.captures.orders import Recording, surplus
from rankscope.daemon.captures.reservations import LASTING
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

MAX_REMEMBERED_CAPTURES = 256
# `requested_by` of automatic captures.
DUTY_CYCLE = "duty cycle"
FOLLOW_SECONDS = 1.0
FINAL = frozenset({pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED})
Recorded = Mapping[int, tuple[RankProcess, Recording]]
# A rank's typical step time over an interval (Unix seconds); None if its steps are not seen.
StepSecondsOf = Callable[[RankProcess, float, float], float | None]


class Records:
    """Thread-safe."""

    def __init__(
        self,
        save: Callable[[pb.Capture], None],
        known: Iterable[pb.Capture] = (),
        tenant: Callable[[str], str] = lambda capture_id: "",
    ) -> None:
        self._save = save
        self._tenant = tenant
        self._captures = OrderedDict((capture.id, capture) for capture in known)
        self._changed = threading.Condition()

    def add(self, capture: pb.Capture) -> None:
        with self._changed:
            self._captures[capture.id] = _copy(capture)
            finished = [key for key, known in self._captures.items() if known.state in FINAL]
            under_way = len(self._captures) - len(finished)
            for key in surplus(finished, self._tenant, MAX_REMEMBERED_CAPTURES - under_way):
                del self._captures[key]
            self._save(capture)
            self._changed.notify_all()

    def change(self, capture_id: str, edit: Callable[[pb.Capture], None]) -> None:
        """`edit` receives the record itself and must be quick."""
        with self._changed:
            capture = self._captures[capture_id]
            before = [capture.state, *(rank.state for rank in capture.ranks)]
            edit(capture)
            if before != [capture.state, *(rank.state for rank in capture.ranks)]:
                self._save(capture)
            self._changed.notify_all()

    def change_rank(self, capture_id: str, rank: int, edit: Callable[[pb.RankCapture], None]) -> None:
        """The capture as a whole is in the state of its least advanced rank until it is concluded."""

        def edit_both(capture: pb.Capture) -> None:
            edit(next(entry for entry in capture.ranks if entry.rank == rank))
            under_way = [entry.state for entry in capture.ranks if entry.state not in FINAL]
            if under_way and capture.state not in FINAL:
                capture.state = min(under_way)

        self.change(capture_id, edit_both)

    def get(self, capture_id: str) -> pb.Capture | None:
        with self._changed:
            capture = self._captures.get(capture_id)
            return None if capture is None else _copy(capture)

    def all(self, job: str = "") -> list[pb.Capture]:
        """Newest first."""
        with self._changed:
            return [_copy(capture) for capture in reversed(self._captures.values()) if job in ("", capture.job)]

    def finished(self, requested_by: str) -> list[tuple[str, str]]:
        """Id and job of finished captures, oldest first."""
        with self._changed:
            return [
                (capture.id, capture.job)
                for capture in self._captures.values()
                if capture.requested_by == requested_by and capture.state in FINAL
            ]

    def forget(self, capture_id: str) -> None:
        with self._changed:
            self._captures.pop(capture_id, None)
            self._changed.notify_all()

    def follow(self, capture_id: str, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[pb.Capture]:
        """The capture now and at every change, until it is final or no longer wanted."""
        seen: pb.Capture | None = None
        while is_wanted():
            with self._changed:
                capture = self._captures.get(capture_id)
                if capture is None:
                    return
                if capture == seen:
                    self._changed.wait(FOLLOW_SECONDS)
                    continue
                seen = _copy(capture)
            yield seen
            if seen.state in FINAL:
                return


def _copy(capture: pb.Capture) -> pb.Capture:
    copy = pb.Capture()
    copy.CopyFrom(capture)
    return copy


# Entering results into a record.


@dataclass(frozen=True)
class Delivered:
    """A stored recording: compressed, annotated, summarized."""

    artifact: str
    size_bytes: int
    uri: str = ""
    summary: pb.TraceSummary | None = None
    start_unix_millis: int | None = None
    steps: int | None = None
    step_seconds: float | None = None  # learned from the trace
    whole_steps: int | None = None  # in the recording; fewer than requested if it was too short
    notes: tuple[str, ...] = ()
    more_windows: tuple[pb.CaptureWindow, ...] = ()


def enter_delivery(entry: pb.RankCapture, recording: Recording, delivered: Delivered) -> None:
    entry.state = pb.CAPTURE_STATE_ANALYSED
    entry.artifact, entry.bytes, entry.uri = delivered.artifact, delivered.size_bytes, delivered.uri
    entry.notes.extend(note for note in (*recording.notes, *delivered.notes) if note not in entry.notes)
    start = delivered.start_unix_millis if delivered.start_unix_millis is not None else recording.start_unix_millis
    steps = delivered.steps if delivered.steps is not None else recording.steps
    if start is not None:
        entry.start_unix_millis = start
    if steps is not None:
        entry.steps = steps
    del entry.more_windows[:]
    entry.more_windows.extend(delivered.more_windows)
    if delivered.summary is not None:
        entry.summary.CopyFrom(delivered.summary)


def forget_first_attempt(capture: pb.Capture) -> None:
    for entry in capture.ranks:
        lasting = [note for note in entry.notes if note.startswith(LASTING)]
        del entry.notes[:]
        entry.notes.extend(lasting)


def overall_state(capture: pb.Capture) -> pb.CaptureState.ValueType:
    states = [rank.state for rank in capture.ranks]
    if pb.CAPTURE_STATE_ANALYSED in states:
        return pb.CAPTURE_STATE_ANALYSED
    return pb.CAPTURE_STATE_CANCELLED if pb.CAPTURE_STATE_CANCELLED in states else pb.CAPTURE_STATE_FAILED


def fail(capture: pb.Capture, error: str) -> None:
    capture.state = pb.CAPTURE_STATE_FAILED
    for rank in capture.ranks:
        if rank.state not in FINAL:
            rank.state, rank.error = pb.CAPTURE_STATE_FAILED, error


# Audit records: who requested a capture on this node, for what, and how it ended.

OPERATOR = "rankscope-operator"
_OPTIONS = ("shapes", "stacks", "memory", "flops", "modules", "allow_slowdown")


class CaptureAudit:
    """`has_tls`: a TCP peer has presented an operator's certificate, or was refused."""

    def __init__(self, node: str, has_tls: bool) -> None:
        self._node = node
        self._has_tls = has_tls

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
        logging.getLogger(LOGGER).info("%s", audit_line(record, time.time()))


def _wanted(record: AuditRecord, request: pb.StartCaptureRequest) -> AuditRecord:
    length = request.WhichOneof("length")
    return replace(
        record,
        ranks=request.ranks,
        steps=request.steps if length == "steps" else None,
        seconds=request.seconds if length == "seconds" else None,
        options=tuple(name for name in _OPTIONS if getattr(request.options, name)),
    )
