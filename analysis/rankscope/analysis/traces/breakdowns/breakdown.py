"""Where a rank's time went: computing, communicating, copying, idle; for the whole trace and for each step.

`span`, `compute`, `non_compute` and `idle` of the whole follow Holistic Trace Analysis (HTA) to the microsecond: whole
microseconds, without the last of several ProfilerSteps, a `Stream Wait Event` as computation (see selecting.py). Only
communication goes beyond HTA, which knows no kernels but NCCL's and nothing of gloo (see occupying.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints, number_groups
from rankscope.analysis.traces.breakdowns.launches import traced_launch_ratios
from rankscope.analysis.traces.breakdowns.occupying import Occupation, occupy_device, occupy_host
from rankscope.analysis.traces.breakdowns.selecting import DeviceWork, all_device_work, device_work, exact
from rankscope.analysis.traces.columns import ABSENT, Trace
from rankscope.analysis.traces.intervals import Intervals, covered_until, gaps, intersection, total
from rankscope.analysis.traces.kernels import Kind
from rankscope.analysis.traces.steps import Steps, find_steps, launch_rows, step_of_rows


@dataclass(frozen=True)
class Parts:
    """compute + non_compute + idle = span; exposed + overlapped = communication."""

    span_ns: int  # first start to last end
    compute_ns: int  # any computation
    non_compute_ns: int  # something, but no computation
    idle_ns: int
    communication_ns: int
    exposed_communication_ns: int  # not covered by computation
    overlapped_communication_ns: int
    memory_ns: int  # copies and sets

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
    # Share of the step's launches whose kernel is in the trace: where it ends, the device is behind the host, and a
    # step may lack some of its work or all. None where no launch is in the trace.
    traced_launch_ratio: float | None

    @property
    def host_ns(self) -> int:
        return self.host_end_ns - self.host_start_ns


@dataclass(frozen=True)
class Breakdown(Parts):
    start_ns: int
    end_ns: int
    on_host: bool  # a trace without device: operators are the computation
    without_last_step: bool  # the last ProfilerStep is in `steps` but not in the totals, as in HTA
    steps: tuple[StepParts, ...]


def break_down(trace: Trace) -> Breakdown | None:
    """None where the trace holds no work at all."""
    steps = find_steps(trace)
    work = device_work(trace)
    if len(work.row):
        whole = occupy_device(trace, work)
        if not _is_plausible(_whole_parts(whole)):
            # Too little but kernels shorter than a microsecond: HTA fails, and there is no reason to round.
            work = exact(trace, work)
            whole = occupy_device(trace, work)
        every = all_device_work(trace) if work.without_last_step else work
        busy = occupy_device(trace, every) if work.without_last_step else whole
        launches = launch_rows(trace)
        windows = _device_windows(trace, steps, every, launches)
        parts = _step_parts(busy, steps, *windows, traced_launch_ratios(trace, steps, launches))
    else:
        whole = occupy_host(trace)
        if not len(whole.anything[0]):
            return None
        parts = _step_parts(whole, steps, steps.start_ns, steps.end_ns, [None] * len(steps))
    return Breakdown(
        **vars(_whole_parts(whole)),
        start_ns=int(whole.anything[0][0]),
        end_ns=int(whole.anything[1].max()),
        on_host=not len(work.row),
        without_last_step=work.without_last_step,
        steps=parts,
    )


def _whole_parts(busy: Occupation) -> Parts:
    span = int(busy.anything[1][-1] - busy.anything[0][0])
    compute, idle = total(*busy.compute), total(*gaps(busy.anything))
    communication = total(*busy.communication)
    overlapped = total(*intersection(busy.communication, busy.covering))
    return Parts(
        span_ns=span,
        compute_ns=compute,
        non_compute_ns=span - compute - idle,
        idle_ns=idle,
        communication_ns=communication,
        exposed_communication_ns=communication - overlapped,
        overlapped_communication_ns=overlapped,
        memory_ns=total(*busy.memory),
    )


def _is_plausible(parts: Parts) -> bool:
    """What HTA asserts of its own results."""
    return max(parts.idle_ns, parts.compute_ns) <= parts.span_ns and parts.non_compute_ns >= 0


def _step_parts(
    busy: Occupation, steps: Steps, start: Ints, end: Ints, traced: list[float | None]
) -> tuple[StepParts, ...]:
    def within(spans: Intervals, begin: Ints = start, finish: Ints = end) -> Ints:
        real = spans[1] > spans[0]
        spans = (spans[0][real], spans[1][real])
        return covered_until(spans, finish) - covered_until(spans, begin)

    anything, compute, communication = within(busy.anything), within(busy.compute), within(busy.communication)
    overlapped = within(intersection(busy.communication, busy.covering))
    host_idle = steps.end_ns - steps.start_ns - within(busy.anything, steps.start_ns, steps.end_ns)
    columns = (
        end - start,
        compute,
        anything - compute,
        end - start - anything,
        communication,
        communication - overlapped,
        overlapped,
        within(busy.memory),
        steps.number,
        start,
        end,
        steps.start_ns,
        steps.end_ns,
        host_idle,
    )
    return tuple(StepParts(*row) for row in zip(*(column.tolist() for column in columns), traced, strict=True))


def _device_windows(trace: Trace, steps: Steps, work: DeviceWork, launches: Ints) -> tuple[Ints, Ints]:
    """Start and end of each step on the device. One stream runs in order, so on the busiest the steps do not mix; what
    other streams do meanwhile (a gather that reaches into the next step) counts where it runs."""
    position = step_of_rows(trace, steps, launches)[work.row]
    streams, count = number_groups(trace.device[work.row], trace.stream[work.row])
    computing = np.where(work.kind == Kind.COMPUTE, work.end_ns - work.start_ns, 0)
    main = streams == np.argmax(np.bincount(streams, weights=computing, minlength=max(count, 1)))
    end = np.full(len(steps), np.iinfo(np.int64).min)
    for which in (main, position == len(steps) - 1):
        owned = which & (position != ABSENT)
        np.maximum.at(end, position[owned], work.end_ns[owned])
    begin = int(work.start_ns[position >= 0].min(initial=int(work.start_ns.max())))
    end = np.maximum.accumulate(np.maximum(end, begin))
    return np.concatenate(([begin], end[:-1]))[: len(steps)], end
