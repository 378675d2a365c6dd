"""What a capture tells of a rank's steps, put into the window that closes after it. Pure.

One capture goes into one window. Were it repeated until the next one, a single bad step would look like a fault that
lasts, for the rules count windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.daemon.assembling import plausible, statistics_of
from rankscope.daemon.samples import Column
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, CauseSeconds, RankWindow


@dataclass(frozen=True)
class CaptureBreakdown:
    """One value for each step that was recorded, in seconds."""

    step: Column
    wait: Column  # communication that nothing hides, waiting for others included: what the probe calls so
    communication: Column

    @property
    def own(self) -> Column:
        return np.maximum(self.step - self.wait, 0.0)


def breakdown_of(entry: pb.RankCapture) -> CaptureBreakdown | None:
    """None where the rank did not deliver whole steps. The figures come from a trace that a container wrote."""
    if entry.state != pb.CAPTURE_STATE_ANALYSED:
        return None
    summary = entry.summary
    columns = [
        plausible(np.array(values, dtype=np.float64))
        for values in (
            summary.each_step_seconds,
            summary.each_exposed_communication_seconds,
            summary.each_communication_seconds,
        )
    ]
    step, wait, communication = columns
    if not len(step) or len({len(column) for column in columns}) != 1 or np.isnan(columns).any() or not step.all():
        return None
    return CaptureBreakdown(step, np.minimum(wait, step), communication)


def fill(window: RankWindow, breakdown: CaptureBreakdown) -> None:
    """Only where no probe counts the steps: its figures are of all steps, and undisturbed."""
    if window.HasField("steps"):
        return
    window.steps = len(breakdown.step)
    for name, column, message in (
        ("step", breakdown.step, window.step),
        ("self", breakdown.own, window.self),
        ("wait", breakdown.wait, window.wait),
    ):
        statistics = statistics_of(column)
        if statistics is not None:
            message.CopyFrom(statistics)
            window.sources[name] = SOURCE_CAPTURE
    window.causes.CopyFrom(
        CauseSeconds(
            self=float(breakdown.own.sum()),
            wait=float(breakdown.wait.sum()),
            communication=float(breakdown.communication.sum()),
        )
    )
    window.sources["steps"] = window.sources["causes"] = SOURCE_CAPTURE
