"""What launching kernels costs: the calls, how far the host runs ahead, and kernels shorter than their launch."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT, Category, Trace
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import NO_STEP, Steps, launch_rows

_LAUNCH = re.compile(r"(cuda|cu|hip)\w*Launch(?!Host)|runFunction\b")  # the last is MTIA's


@dataclass(frozen=True)
class Launches:
    """Of all kernels, copies and sets whose launch is in the trace."""

    count: int  # of launch calls; a graph's call launches many kernels
    kernel_count: int  # of what they launched
    call_total_ns: int
    call_median_ns: int
    call_longest_ns: int
    # From the begin of the call to the start of the kernel. Small means that the device waits for the host.
    delay_median_ns: int
    delay_p90_ns: int
    delay_longest_ns: int
    # Started within two calls' usual time of the call's begin: the queue was empty, the device waited for this launch.
    unqueued_ratio: float
    # Launched and not yet ended, when another is launched.
    queue_median: int
    queue_longest: int
    short_kernel_count: int  # kernels that ran shorter than the call that launched them
    short_kernel_ns: int
    # Device events whose launch is not in the trace, and launches whose kernel is not: where the trace was cut.
    unlaunched_count: int
    untraced_launch_count: int


def measure_launches(trace: Trace) -> Launches | None:
    """None where no launch can be tied to a kernel."""
    launch = launch_rows(trace)
    is_work = trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    work = np.flatnonzero(is_work & (launch != ABSENT))
    if len(work) == 0:
        return None
    calls = np.unique(launch[work])
    call_ns = trace.duration_ns[calls]
    usual_ns = int(np.median(call_ns))
    delay = trace.start_ns[work] - trace.start_ns[launch[work]]
    depth = _queue_depths(trace, work, launch[work])
    short = trace.of(Category.KERNEL)[work] & (trace.duration_ns[work] < trace.duration_ns[launch[work]])
    return Launches(
        count=len(calls),
        kernel_count=len(work),
        call_total_ns=int(call_ns.sum()),
        call_median_ns=usual_ns,
        call_longest_ns=int(call_ns.max()),
        delay_median_ns=int(np.median(delay)),
        delay_p90_ns=int(np.percentile(delay, 90)),
        delay_longest_ns=int(delay.max()),
        unqueued_ratio=float(np.mean(delay <= 2 * usual_ns)),
        queue_median=int(np.median(depth)),
        queue_longest=int(depth.max()),
        short_kernel_count=int(short.sum()),
        short_kernel_ns=int(trace.duration_ns[work[short]].sum()),
        unlaunched_count=int((is_work & (launch == ABSENT)).sum()),
        untraced_launch_count=len(np.setdiff1d(_launch_calls(trace), calls)),
    )


def traced_launch_ratios(trace: Trace, steps: Steps, launch: Ints) -> list[float | None]:
    """Of each step, the share of its launches whose kernel is in the trace; None where it launched nothing."""
    calls = np.union1d(_launch_calls(trace), launch[launch != ABSENT])
    position = steps.at(trace.start_ns[calls])
    traced = np.isin(calls, launch)
    counts = np.bincount(position[position != NO_STEP], minlength=len(steps))
    found = np.bincount(position[traced & (position != NO_STEP)], minlength=len(steps))
    return [float(some / every) if every else None for some, every in zip(found, counts, strict=True)]


def _launch_calls(trace: Trace) -> Ints:
    """Calls that by their name launch kernels, whether or not the kernels are in the trace."""
    return np.flatnonzero(trace.of(Category.RUNTIME, Category.DRIVER) & names_like(trace, _LAUNCH)[trace.name])


def _queue_depths(trace: Trace, work: Ints, launch: Ints) -> Ints:
    """How many device events were launched and not ended when each was launched, itself included."""
    launched = np.sort(trace.start_ns[launch])
    ended = np.sort(trace.end_ns[work])
    moments = trace.start_ns[launch]
    return np.searchsorted(launched, moments, "right") - np.searchsorted(ended, moments, "right")
