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


def lacks_wait(window: RankWindow) -> bool:
    """Whether a probe counts the steps and cannot tell what they waited for: collectives of compiled code, of C++ or of
    CUDA graphs. A single window may lack it by chance, as waiting is sampled."""
    return window.HasField("steps") and not (window.HasField("wait") or window.groups)


def fill(window: RankWindow, breakdown: CaptureBreakdown) -> None:
    """Only where no probe measures steps and waiting: its figures are of all steps, and undisturbed."""
    if window.HasField("steps") and not lacks_wait(window):
        return
    window.steps = len(breakdown.step)
    _add_statistics(window, step=breakdown.step, self=breakdown.own, wait=breakdown.wait)
    window.causes.CopyFrom(
        CauseSeconds(
            self=float(breakdown.own.sum()),
            wait=float(breakdown.wait.sum()),
            communication=float(breakdown.communication.sum()),
        )
    )
    window.sources["steps"] = window.sources["causes"] = SOURCE_CAPTURE


def fill_gauges(window: RankWindow, breakdown: CaptureBreakdown) -> None:
    """The same for a window that is only shown, where steps that a probe counts are newer than the capture."""
    if lacks_wait(window):
        _add_statistics(window, self=breakdown.own, wait=breakdown.wait)
    else:
        fill(window, breakdown)


def _add_statistics(window: RankWindow, **columns: Column) -> None:
    for name, column in columns.items():
        statistics = statistics_of(column)
        if statistics is not None:
            getattr(window, name).CopyFrom(statistics)
            window.sources[name] = SOURCE_CAPTURE
    window.wait_source = "capture"
