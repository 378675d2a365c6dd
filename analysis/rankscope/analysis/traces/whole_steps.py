"""Which steps of a trace are whole, and where the same run of them lies in the traces of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.breakdowns.breakdown import Breakdown
from rankscope.analysis.traces.columns import Trace
from rankscope.analysis.traces.steps import Steps, first_whole


@dataclass(frozen=True)
class WholeSteps:
    """On the host, in time from the trace's base; neighbours."""

    base_ns: int
    start_ns: Ints
    end_ns: Ints
    lasted_ns: Ints  # by the device's work where there is a device, else by the host

    def __len__(self) -> int:
        return len(self.start_ns)

    def run(self, first: int, count: int) -> WholeSteps:
        part = slice(first, first + count)
        return WholeSteps(self.base_ns, self.start_ns[part], self.end_ns[part], self.lasted_ns[part])

    @property
    def unix_ns(self) -> Ints:
        return self.start_ns + self.base_ns

    @property
    def seconds(self) -> float | None:
        """Of the typical one."""
        return float(np.median(self.lasted_ns)) / 1e9 if len(self) else None


def find_whole_steps(trace: Trace, steps: Steps, breakdown: Breakdown | None) -> WholeSteps:
    """Whole on the host, and with all of their work on the device."""
    first, last = first_whole(steps), len(steps)
    lasted = steps.end_ns - steps.start_ns
    if breakdown is not None and not breakdown.on_host:
        lasted = np.array([step.span_ns for step in breakdown.steps], dtype=np.int64)
        last = first + sum(step.whole for step in breakdown.steps)
    part = slice(first, last)
    return WholeSteps(trace.base_ns, steps.start_ns[part], steps.end_ns[part], lasted[part])


def common_run(steps_of: Mapping[int, WholeSteps], count: int) -> dict[int, int] | None:
    """For each rank the position of the first of `count` steps that begin at the same boundary on all ranks, as early
    as possible; None if there is no such run. Ranks in step pass a boundary at about the same time: of the runs of
    another rank the one that is nearest in time is the same."""
    if not steps_of or any(len(steps) < count for steps in steps_of.values()):
        return None
    reference = max(steps_of.values(), key=lambda steps: int(steps.unix_ns[0]))
    for position in range(len(reference) - count + 1):
        moments = reference.unix_ns[position : position + count]
        nearest = {rank: _nearest_run(steps, moments) for rank, steps in steps_of.items()}
        if all(place is not None for place in nearest.values()):
            return {rank: place for rank, place in nearest.items() if place is not None}
    return None


def _nearest_run(steps: WholeSteps, moments: Ints) -> int | None:
    """None where a run that was not recorded would be nearer."""
    starts = np.lib.stride_tricks.sliding_window_view(steps.unix_ns, len(moments))
    distances = np.abs(starts - moments).mean(axis=1)
    best = int(distances.argmin())
    if best in (0, len(distances) - 1) and distances[best] > np.median(steps.end_ns - steps.start_ns) / 2:
        return None
    return best
