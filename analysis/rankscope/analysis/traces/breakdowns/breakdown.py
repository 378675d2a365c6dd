"""Where a rank's time went: computing, communicating, copying, idle; for the whole trace and for each step. Times are
exact to what the trace holds, nanoseconds as a rule. The whole is everything that ran on the device, whether or not it
belongs to a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints, number_groups
from rankscope.analysis.traces.breakdowns.launches import traced_launch_ratios
from rankscope.analysis.traces.breakdowns.occupation import Occupation, device_rows, occupy
from rankscope.analysis.traces.columns import ABSENT, Trace
from rankscope.analysis.traces.intervals import Intervals, covered_until, intersection
from rankscope.analysis.traces.kernels import Kind, classify
from rankscope.analysis.traces.steps import Steps, find_steps, first_whole, launch_rows, step_of_rows

# Where a recording ends the device is behind the host: the last steps lack kernels that had not run yet.
WHOLE_RATIO = 0.98


@dataclass(frozen=True)
class Parts:
    """compute + non_compute + idle = span; exposed + overlapped = communication. With communication on the device,
    non_compute = exposed_communication + exposed_memory."""

    span_ns: int  # first start to last end
    compute_ns: int  # any computation
    non_compute_ns: int  # something, but no computation
    idle_ns: int
    communication_ns: int
    exposed_communication_ns: int  # not covered by computation
    overlapped_communication_ns: int
    memory_ns: int  # copies
    exposed_memory_ns: int  # covered neither by computation nor by communication on the device

    @property
    def overlap_ratio(self) -> float | None:
        """Share of communication that computation covers; None where there is no communication."""
        return self.overlapped_communication_ns / self.communication_ns if self.communication_ns > 0 else None


@dataclass(frozen=True)
class StepParts(Parts):
    """A step owns what it launched: its window on the device reaches from the end of the step before to the end of the
    last thing it put on the main stream, so that the windows of neighbours leave nothing out between them. Without a
    device, the window is the host's."""

    number: int
    start_ns: int
    end_ns: int
    host_start_ns: int
    host_end_ns: int
    idle_in_host_window_ns: int  # nothing ran while the host was in this step, whoever's work it was
    # Share of the step's launches whose kernel is in the trace. None where no launch is in the trace.
    traced_launch_ratio: float | None
    begins_in_trace: bool  # False where the recording began in the middle of it
    ends_in_trace: bool  # False where the recording ended before the device had run all of it

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
    on_host: bool  # a trace without device: operators are the computation
    steps: tuple[StepParts, ...]

    @property
    def outside_steps_ns(self) -> int:
        """Of the span, before the first step and after the last: work of a step that the recording cut."""
        if not self.steps:
            return 0
        return max(0, self.steps[0].start_ns - self.start_ns) + max(0, self.end_ns - self.steps[-1].end_ns)


def break_down(trace: Trace) -> Breakdown | None:
    """None where the trace holds no work at all."""
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
        steps=_step_parts(busy, steps, windows, of_steps, traced),
    )


def _parts(busy: Occupation, start: Ints, end: Ints) -> list[Parts]:
    """Of each window."""

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
    busy: Occupation, steps: Steps, windows: Intervals, of_steps: list[Parts], traced: list[float | None]
) -> tuple[StepParts, ...]:
    host_busy = covered_until(busy.anything, steps.end_ns) - covered_until(busy.anything, steps.start_ns)
    host_idle = steps.end_ns - steps.start_ns - host_busy
    first, ended = first_whole(steps), _ended(traced)
    return tuple(
        StepParts(
            **vars(parts),
            number=int(steps.number[position]),
            start_ns=int(windows[0][position]),
            end_ns=int(windows[1][position]),
            host_start_ns=int(steps.start_ns[position]),
            host_end_ns=int(steps.end_ns[position]),
            idle_in_host_window_ns=int(host_idle[position]),
            traced_launch_ratio=traced[position],
            begins_in_trace=position >= first,
            ends_in_trace=ended[position],
        )
        for position, parts in enumerate(of_steps)
    )


def _ended(traced: list[float | None]) -> list[bool]:
    """Of each step, whether its work is in the trace. Only the last ones can lack some."""
    # Against the best: some launches never show a kernel, in every step.
    enough = WHOLE_RATIO * max((ratio for ratio in traced if ratio is not None), default=0.0)
    count = len(traced)
    while count and (ratio := traced[count - 1]) is not None and ratio < enough:
        count -= 1
    return [position < count for position in range(len(traced))]


def _device_windows(trace: Trace, steps: Steps, launches: Ints) -> tuple[Ints, Ints]:
    """Start and end of each step on the device. One stream runs in order, so on the busiest the steps do not mix; what
    other streams do meanwhile (a gather that reaches into the next step) counts where it runs."""
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
