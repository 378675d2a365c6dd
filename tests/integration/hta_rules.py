"""The rules of Holistic Trace Analysis (HTA 0.5) on our columns: whole microseconds, rounded inwards so that a short
kernel may end before it starts; without what was launched in the last of several ProfilerSteps; everything with a
stream is work, and what is not NCCL, a copy, a set or a `…Sync` is computation (a `Stream Wait Event` too).

Our own figures follow none of this. With these rules they must be HTA's, so that whatever differs without them is due
to the rules and not to how we read a trace."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.intervals import Intervals, gaps, intersection, merge, total
from rankscope.analysis.traces.trace import ABSENT, Trace

_STEP = re.compile(r".*ProfilerStep", re.DOTALL)
# Held for device events although they name no stream.
_STREAMLESS = re.compile(r"(Event|Context) Sync$")
_COMMUNICATION = re.compile(r"nccl.*Kernel")
_NOT_COMPUTE = re.compile(r"nccl.*Kernel|.*Memcpy|Memset|dma|.*Sync")


@dataclass(frozen=True)
class HtaBreakdown:
    span_us: float
    compute_us: float
    non_compute_us: float
    idle_us: float
    overlap_percent: float | None  # of communication, hidden under computation


def hta_breakdown(trace: Trace) -> HtaBreakdown:
    rounded = _rounded_times(trace)
    found = _break_down(trace, *rounded)
    if max(found.idle_us, found.compute_us) > found.span_us or found.non_compute_us < 0:
        # Too little but kernels shorter than a microsecond: HTA refuses its own result.
        return _break_down(trace, trace.start_ns, trace.end_ns)
    return found


def _break_down(trace: Trace, start: Ints, end: Ints) -> HtaBreakdown:
    row = np.flatnonzero(trace.stream != ABSENT)
    before = _before_last_step(trace)
    # Where nothing is left HTA gives no result.
    if before is not None and before[row].any():
        row = row[before[row]]

    def times(which: Bools) -> Intervals:
        return merge(start[row[which]], end[row[which]])

    anything = times(np.ones(len(row), dtype=bool))
    communication, compute = times(_named(trace, _COMMUNICATION)[row]), times(~_named(trace, _NOT_COMPUTE)[row])
    span, idle = int(anything[1][-1] - anything[0][0]), total(*gaps(anything))
    communicating = total(*communication)
    overlapped = total(*intersection(communication, compute))
    return HtaBreakdown(
        span_us=span / 1000,
        compute_us=total(*compute) / 1000,
        non_compute_us=(span - total(*compute) - idle) / 1000,
        idle_us=idle / 1000,
        overlap_percent=100 * overlapped / communicating if communicating > 0 else None,
    )


def profiler_steps(trace: Trace) -> int:
    return len(np.unique(trace.name[_named(trace, _STEP)]))


def is_finer_than_microseconds(trace: Trace) -> bool:
    return bool((trace.start_ns % 1000).any())


def _rounded_times(trace: Trace) -> tuple[Ints, Ints]:
    """Start and end in ns. Of a trace finer than a microsecond, starts are rounded up and ends down."""
    if not is_finer_than_microseconds(trace):
        return trace.start_ns, trace.end_ns
    # HTA adds start and duration as floats, and an end that should be whole may come out a hair below it. Whole and
    # fraction are added apart because nanoseconds since 1970 do not fit a float.
    start_us = trace.start_ns // 1000 + (trace.start_ns % 1000) / 1000
    end_us = start_us + (trace.duration_ns // 1000 + (trace.duration_ns % 1000) / 1000)
    return np.ceil(start_us).astype(np.int64) * 1000, np.floor(end_us).astype(np.int64) * 1000


def _before_last_step(trace: Trace) -> Bools | None:
    """Rows launched before the last ProfilerStep began; None where there are not two of them."""
    if profiler_steps(trace) < 2:
        return None
    is_step = _named(trace, _STEP)
    is_device = ((trace.stream >= 0) & (trace.correlation >= 0)) | _named(trace, _STREAMLESS)
    if not (is_step & ~is_device).any():
        return np.zeros(len(trace), dtype=bool)
    start, _ = _rounded_times(trace)
    before = ~is_device & (start < start[is_step & ~is_device].max())
    kept: Bools = before | (is_device & np.isin(trace.correlation, trace.correlation[before]))
    return kept


def _named(trace: Trace, pattern: re.Pattern[str]) -> Bools:
    return np.array([pattern.match(name) is not None for name in trace.names], dtype=bool)[trace.name]
