"""Where a rank's time went: computation, communication, copies, idle; for the whole trace and per step. Times are as
exact as in the trace, usually nanoseconds. The total covers everything that ran on the device, including work
outside of steps."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.intervals import (
    NOTHING,
    Intervals,
    clip,
    contains,
    covered_until,
    difference,
    intersection,
    merge,
    union,
    unite,
)
from rankscope.analysis.traces.kernels import Kind, classify, host_communication, names_like
from rankscope.analysis.traces.steps import NO_STEP, Steps, find_steps, first_whole, launch_rows, step_of_rows
from rankscope.analysis.traces.summary_records import LaunchSummary
from rankscope.analysis.traces.trace import ABSENT, Category, Trace

# Operators that enqueue or describe communication, which is counted separately.
_COMMUNICATION_OPERATORS = re.compile(r"c10d::|_c10d_functional::|record_param_comms|gloo:|mpi:|ucc:")
_LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch(?!Host)|runFunction\b")  # runFunction: MTIA
# At the end of a recording the device is behind the host: the last steps lack kernels that had not run yet.
WHOLE_RATIO = 0.98


@dataclass(frozen=True)
class Parts:
    """compute + non_compute + idle = span; exposed + overlapped = communication. With communication on the device,
    non_compute = exposed_communication + exposed_memory."""

    span_ns: int  # first start to last end
    compute_ns: int  # any computation
    non_compute_ns: int  # busy, but not with computation
    idle_ns: int
    communication_ns: int
    exposed_communication_ns: int  # not covered by computation
    overlapped_communication_ns: int
    memory_ns: int  # copies
    exposed_memory_ns: int  # covered neither by computation nor by communication on the device

    @property
    def overlap_ratio(self) -> float | None:
        """The share of communication that computation covers; None if there is no communication."""
        return self.overlapped_communication_ns / self.communication_ns if self.communication_ns > 0 else None


@dataclass(frozen=True)
class StepParts(Parts):
    """A step owns what it launched. Its window on the device starts where the previous step ends and ends with the
    last work that it put on the main stream, so that there are no gaps between steps. Without a device, the window
    is the host's."""

    number: int
    start_ns: int
    end_ns: int
    host_start_ns: int
    host_end_ns: int
    # The share of launches whose kernel is in the trace. None if there are no launches.
    traced_launch_ratio: float | None
    begins_in_trace: bool  # False if the recording began inside the step
    ends_in_trace: bool  # False if the recording ended before the device finished the step

    @property
    def whole(self) -> bool:
        return self.begins_in_trace and self.ends_in_trace

    @property
    def host_ns(self) -> int:
        return self.host_end_ns - self.host_start_ns


@dataclass(frozen=True)
class Breakdown(Parts):
    start_ns: int
    end_ns: int
    on_host: bool  # no device in the trace: operators are the computation
    steps: tuple[StepParts, ...]

    @property
    def outside_steps_ns(self) -> int:
        """The part of the span before the first step and after the last: work of incomplete steps."""
        if not self.steps:
            return 0
        return max(0, self.steps[0].start_ns - self.start_ns) + max(0, self.end_ns - self.steps[-1].end_ns)


@dataclass(frozen=True)
class Occupation:
    """Sets of time, sorted and disjoint. `anything` also contains isolated events without a duration: a rank's time
    starts with its first event and ends with its last."""

    on_host: bool  # no device in the trace: operators are the computation
    anything: Intervals
    compute: Intervals
    communication: Intervals
    memory: Intervals  # copies
    exposed_memory: Intervals  # covered neither by computation nor by communication on the device


def break_down(trace: Trace) -> Breakdown | None:
    """None if the trace contains no work."""
    busy = occupy(trace)
    if not len(busy.anything[0]):
        return None
    steps = find_steps(trace)
    traced: list[float | None] = [None] * len(steps)
    windows = steps.start_ns, steps.end_ns
    if not busy.on_host:
        launches = launch_rows(trace)
        traced = traced_launch_ratios(trace, steps, launches)
        windows = _device_windows(trace, steps, launches)
    begin, finish = int(busy.anything[0][0]), int(busy.anything[1][-1])
    whole, *of_steps = _parts(busy, np.append(begin, windows[0]), np.append(finish, windows[1]))
    return Breakdown(
        **vars(whole),
        start_ns=begin,
        end_ns=finish,
        on_host=busy.on_host,
        steps=_step_parts(steps, windows, of_steps, traced),
    )


def measure_launches(trace: Trace) -> LaunchSummary | None:
    """None if no launch can be linked to a kernel."""
    launch = launch_rows(trace)
    work = np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET) & (launch != ABSENT))
    if len(work) == 0:
        return None
    calls = np.unique(launch[work])
    call_ns = trace.duration_ns[calls]
    median_ns = float(np.median(call_ns))
    delay = trace.start_ns[work] - trace.start_ns[launch[work]]
    short = trace.of(Category.KERNEL)[work] & (trace.duration_ns[work] < trace.duration_ns[launch[work]])
    return LaunchSummary(
        count=len(calls),
        kernel_count=len(work),
        call_median_us=int(median_ns) / 1000,
        call_total_us=int(call_ns.sum()) / 1000,
        delay_median_us=int(np.median(delay)) / 1000,
        unqueued_ratio=float(np.mean(delay <= 2 * int(median_ns))),
        queue_median=int(np.median(_queue_depths(trace, work, launch[work]))),
        short_kernel_count=int(short.sum()),
    )


def occupy(trace: Trace) -> Occupation:
    return _occupy_device(trace) if len(device_rows(trace)) else occupy_host(trace)


def device_rows(trace: Trace) -> Ints:
    """Everything that ran on a device."""
    return np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _occupy_device(trace: Trace) -> Occupation:
    """`gloo:…` on the host is communication only if the device has no communication kernels: next to NCCL it carries
    barriers and small objects, and can at most explain idle time."""
    rows = device_rows(trace)
    start, end, kind = trace.start_ns[rows], trace.end_ns[rows], classify(trace)[rows]

    def times(wanted: Kind) -> Intervals:
        which = kind == wanted
        return union(start[which], end[which])

    anything = merge(start, end)
    compute, on_device, memory = times(Kind.COMPUTE), times(Kind.COMMUNICATION), times(Kind.MEMORY)
    communication = on_device
    if not (kind == Kind.COMMUNICATION).any():
        transfers = np.flatnonzero(host_communication(trace))
        on_host = union(trace.start_ns[transfers], trace.end_ns[transfers])
        communication = clip(on_host, int(anything[0][0]), int(anything[1][-1]))
    exposed = difference(difference(memory, compute), on_device)
    return Occupation(False, anything, compute, communication, memory, exposed)


def occupy_host(trace: Trace) -> Occupation:
    """Operators are the computation, except those that communicate or run inside a transfer on its thread."""
    transfers = np.flatnonzero(host_communication(trace))
    communication = union(trace.start_ns[transfers], trace.end_ns[transfers])
    operators = trace.of(Category.CPU_OP) & ~names_like(trace, _COMMUNICATION_OPERATORS)[trace.name]
    rows = np.flatnonzero(operators & ~_within_transfers(trace, transfers))
    compute = union(trace.start_ns[rows], trace.end_ns[rows])
    anything = unite(compute, communication)
    return Occupation(True, anything, compute, communication, NOTHING, NOTHING)


def _within_transfers(trace: Trace, transfers: Ints) -> Bools:
    within = np.zeros(len(trace), dtype=bool)
    threads, count = number_groups(trace.thread)
    is_transfer = np.zeros(len(trace), dtype=bool)
    is_transfer[transfers] = True
    ends = trace.end_ns
    for rows in rows_of_groups(threads, count):
        own = rows[is_transfer[rows]]
        if len(own):
            within[rows] = contains(union(trace.start_ns[own], ends[own]), trace.start_ns[rows])
    return within


def traced_launch_ratios(trace: Trace, steps: Steps, launch: Ints) -> list[float | None]:
    """Per step, the share of launches whose kernel is in the trace; None if nothing was launched."""
    calls = np.union1d(_launch_calls(trace), launch[launch != ABSENT])
    position = steps.at(trace.start_ns[calls])
    traced = np.isin(calls, launch)
    counts = np.bincount(position[position != NO_STEP], minlength=len(steps))
    found = np.bincount(position[traced & (position != NO_STEP)], minlength=len(steps))
    return [float(some / every) if every else None for some, every in zip(found, counts, strict=True)]


def _launch_calls(trace: Trace) -> Ints:
    """Calls that launch kernels, by their name, whether or not the kernels are in the trace."""
    return np.flatnonzero(trace.of(Category.RUNTIME, Category.DRIVER) & names_like(trace, _LAUNCH)[trace.name])


def _queue_depths(trace: Trace, work: Ints, launch: Ints) -> Ints:
    """Per launch, how many device events were launched and not finished, including itself."""
    launched = np.sort(trace.start_ns[launch])
    ended = np.sort(trace.end_ns[work])
    moments = trace.start_ns[launch]
    return np.searchsorted(launched, moments, "right") - np.searchsorted(ended, moments, "right")


def _parts(busy: Occupation, start: Ints, end: Ints) -> list[Parts]:
    """One per window."""

    def within(spans: Intervals) -> Ints:
        return covered_until(spans, end) - covered_until(spans, start)

    anything, compute, communication = within(busy.anything), within(busy.compute), within(busy.communication)
    overlapped = within(intersection(busy.communication, busy.compute))
    columns = (
        end - start,
        compute,
        anything - compute,
        end - start - anything,
        communication,
        communication - overlapped,
        overlapped,
        within(busy.memory),
        within(busy.exposed_memory),
    )
    return [Parts(*row) for row in np.column_stack(columns).tolist()]


def _step_parts(
    steps: Steps, windows: Intervals, of_steps: list[Parts], traced: list[float | None]
) -> tuple[StepParts, ...]:
    first, ended = first_whole(steps), ended_in_trace(traced)
    return tuple(
        StepParts(
            **vars(parts),
            number=int(steps.number[position]),
            start_ns=int(windows[0][position]),
            end_ns=int(windows[1][position]),
            host_start_ns=int(steps.start_ns[position]),
            host_end_ns=int(steps.end_ns[position]),
            traced_launch_ratio=traced[position],
            begins_in_trace=position >= first,
            ends_in_trace=ended[position],
        )
        for position, parts in enumerate(of_steps)
    )


def ended_in_trace(traced: list[float | None]) -> list[bool]:
    """Per step, whether all of its work is in the trace. Only the last steps can lack some."""
    # Relative to the best step: some launches have no kernel in any step.
    enough = WHOLE_RATIO * max((ratio for ratio in traced if ratio is not None), default=0.0)
    count = len(traced)
    while count and (ratio := traced[count - 1]) is not None and ratio < enough:
        count -= 1
    return [position < count for position in range(len(traced))]


def _device_windows(trace: Trace, steps: Steps, launches: Ints) -> tuple[Ints, Ints]:
    """Start and end of each step on the device. A stream runs in order, so steps do not mix on the busiest stream.
    Work of other streams (a gather that reaches into the next step) counts where it runs."""
    rows = device_rows(trace)
    row_end = trace.end_ns[rows]
    position = step_of_rows(trace, steps, launches)[rows]
    streams, count = number_groups(trace.device[rows], trace.stream[rows])
    computing = np.where(classify(trace)[rows] == Kind.COMPUTE, trace.duration_ns[rows], 0)
    main = streams == np.argmax(np.bincount(streams, weights=computing, minlength=max(count, 1)))
    end = np.full(len(steps), np.iinfo(np.int64).min)
    for which in (main, position == len(steps) - 1):
        owned = which & (position != ABSENT)
        np.maximum.at(end, position[owned], row_end[owned])
    begin = int(trace.start_ns[rows][position >= 0].min(initial=int(trace.start_ns[rows].max())))
    end = np.maximum.accumulate(np.maximum(end, begin))
    return np.concatenate(([begin], end[:-1]))[: len(steps)], end


def whole_steps(trace: Trace, steps: Steps, launches: Ints) -> Ints:
    """Positions of the steps that were recorded as a whole; of all if none was."""
    ended = ended_in_trace(traced_launch_ratios(trace, steps, launches)) if len(steps) else []
    whole = [position for position in range(first_whole(steps), len(steps)) if ended[position]]
    return np.array(whole or range(len(steps)), dtype=np.int64)
