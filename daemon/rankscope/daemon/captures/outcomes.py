"""What becomes of a capture, as it is entered in its record."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.daemon.captures.engaging import LASTING
from rankscope.daemon.captures.orders import Recording
from rankscope.daemon.captures.records import FINAL
from rankscope.v1 import capture_service_pb2 as pb


@dataclass(frozen=True)
class Delivered:
    """A recording in the store: compressed, annotated, and what it says."""

    artifact: str
    size_bytes: int
    uri: str = ""
    summary: pb.TraceSummary | None = None
    start_unix_millis: int | None = None
    steps: int | None = None
    step_seconds: float | None = None  # learned from the trace
    whole_steps: int | None = None  # that the recording held; fewer than asked for if it was too short
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
