"""What a conductor of captures needs from others: where recordings go, and how long steps take."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rankscope.daemon.captures.orders import CaptureError, Recording
from rankscope.daemon.captures.outcomes import Delivered
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

Recorded = Mapping[int, tuple[RankProcess, Recording]]


class Archive(Protocol):
    """Where recordings and records go. Any method may raise CaptureError."""

    def workspace(self, capture_id: str) -> Path: ...

    def deliver(
        self, capture: pb.Capture, recorded: Recorded, steps: int | None, cancelled: threading.Event
    ) -> Iterator[tuple[int, Delivered | CaptureError]]:
        """All ranks at once: their traces are cut at the same step."""
        ...

    def join(self, capture: pb.Capture) -> pb.JoinSummary | None: ...

    def clean(self, capture_id: str) -> None: ...

    def save(self, capture: pb.Capture) -> None: ...

    def load(self) -> Sequence[pb.Capture]: ...


class StepSecondsOf(Protocol):
    """A rank's typical step time over a stretch of the recent past; None where its steps are not seen."""

    def __call__(self, rank: RankProcess, start_unix_seconds: float, end_unix_seconds: float) -> float | None: ...
