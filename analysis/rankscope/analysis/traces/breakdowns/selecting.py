"""Which events on the device count, and their times in whole microseconds: as Holistic Trace Analysis (HTA 0.5) does
it, so that totals agree with it to the microsecond."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import ABSENT, Trace
from rankscope.analysis.traces.kernels import Kinds, hta_kinds

_STEP_WORD = "ProfilerStep"
# HTA holds these for device events although they name no stream.
_STREAMLESS = ("Event Sync", "Context Sync")


@dataclass(frozen=True)
class DeviceWork:
    """Rows that count, with times in nanoseconds. A kernel shorter than a microsecond may end before it starts: HTA
    rounds inwards, and its totals hold these negative lengths."""

    row: Ints
    start_ns: Ints
    end_ns: Ints
    kind: Kinds  # as HTA tells them
    rounded: bool  # whether the trace is finer than a microsecond
    without_last_step: bool  # whether the last ProfilerStep's work was left out


def device_work(trace: Trace) -> DeviceWork:
    """With several ProfilerSteps, only what was launched before the last of them: work of the last one may be missing
    from the trace, and is no fair part of a mean."""
    work = all_device_work(trace)
    before = _before_last_step(trace)
    # Where nothing is left HTA gives no result, and everything says more than nothing.
    if before is None or not (kept := before[work.row]).any():
        return work
    return DeviceWork(work.row[kept], work.start_ns[kept], work.end_ns[kept], work.kind[kept], work.rounded, True)


def all_device_work(trace: Trace) -> DeviceWork:
    """The last step's too."""
    row = np.flatnonzero(trace.stream != ABSENT)
    start, end = rounded_times(trace, row)
    return DeviceWork(row, start, end, hta_kinds(trace)[row], is_finer_than_microseconds(trace), False)


def exact(trace: Trace, work: DeviceWork) -> DeviceWork:
    """The same work with its times as they are."""
    return replace(work, start_ns=trace.start_ns[work.row], end_ns=trace.end_ns[work.row], rounded=False)


def is_finer_than_microseconds(trace: Trace) -> bool:
    return bool((trace.start_ns % 1000).any())


def rounded_times(trace: Trace, row: Ints) -> tuple[Ints, Ints]:
    """Start and end in ns. Of a trace finer than a microsecond, starts are rounded up and ends down."""
    start, duration = trace.start_ns[row], trace.duration_ns[row]
    if not is_finer_than_microseconds(trace):
        return start, start + duration
    # HTA adds start and duration as floats, and an end that should be whole may come out a hair below it. Whole and
    # fraction are added apart because nanoseconds since 1970 do not fit a float.
    start_us = start // 1000 + (start % 1000) / 1000
    end_us = start_us + (duration // 1000 + (duration % 1000) / 1000)
    return np.ceil(start_us).astype(np.int64) * 1000, np.floor(end_us).astype(np.int64) * 1000


def _before_last_step(trace: Trace) -> Bools | None:
    """Rows launched before the last ProfilerStep began; None where there are not two of them."""
    named = np.fromiter((_STEP_WORD in name for name in trace.names), dtype=bool, count=len(trace.names))
    is_step = named[trace.name]
    if len(np.unique(trace.name[is_step])) < 2:
        return None
    streamless = np.fromiter((name in _STREAMLESS for name in trace.names), dtype=bool, count=len(trace.names))
    is_device = ((trace.stream >= 0) & (trace.correlation >= 0)) | streamless[trace.name]
    start, _ = rounded_times(trace, np.arange(len(trace)))
    if not (is_step & ~is_device).any():
        return np.zeros(len(trace), dtype=bool)
    before = ~is_device & (start < start[is_step & ~is_device].max())
    kept: Bools = before | (is_device & np.isin(trace.correlation, trace.correlation[before]))
    return kept
