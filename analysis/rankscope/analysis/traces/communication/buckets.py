"""DDP's gradient buckets: the all-reduces that backward starts as gradients become ready."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Floats, Ints
from rankscope.analysis.traces.columns import ABSENT, Category, Trace
from rankscope.analysis.traces.communication.calls import taken
from rankscope.analysis.traces.communication.collectives import Collectives
from rankscope.analysis.traces.communication.kinds import CollectiveKind, kind_of_host_operator
from rankscope.analysis.traces.kernels import Kind, classify, names_like
from rankscope.analysis.traces.nesting import nest
from rankscope.analysis.traces.steps import NO_STEP, Steps, find_steps, launch_rows

# DDP starts a bucket from the hook of the gradient that completes it; an all-reduce of tensor parallelism is started
# from the backward of its own function.
_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_GRADIENT = re.compile(r"autograd::engine::evaluate_function: .*AccumulateGrad")


@dataclass(frozen=True)
class Buckets:
    """One row per bucket, in the order in which backward started them."""

    collective: Ints  # row of Collectives
    step: Ints  # position in steps
    order: Ints  # 0, 1, … within its step
    bytes: Ints  # -1 where not known
    started_ns: Ints
    duration_ns: Ints
    exposed_ns: Ints
    asked_ns: Ints  # when the host asked for it
    ready_ns: Ints  # when the last gradient in it was computed
    measured: Bools
    gradient_bucket: Ints  # one row per gradient, in order: which bucket holds it
    gradient_ready_ns: Ints
    steps: Steps
    backward_began_ns: Ints  # of each step: when its forward was computed

    def __len__(self) -> int:
        return len(self.collective)

    @property
    def gradients(self) -> Ints:
        """How many parameters' gradients each holds."""
        return np.bincount(self.gradient_bucket, minlength=len(self))

    @property
    def hidden_ratio(self) -> Floats:
        """Of the bucket's time, covered by computation; NaN where it was not measured."""
        known = self.measured & (self.duration_ns > 0)
        return np.where(known, 1 - self.exposed_ns / np.where(known, self.duration_ns, 1), np.nan)


def find_buckets(trace: Trace, collectives: Collectives) -> Buckets:
    """Empty where the trace shows no DDP. Buckets outside of every step (a trace may begin within one) are left out."""
    steps = find_steps(trace)
    reductions = np.flatnonzero(collectives.kind == CollectiveKind.ALL_REDUCE)
    asked_row = _asking_rows(trace, collectives, reductions)
    hooks = nest(trace, np.flatnonzero(trace.of(Category.CPU_OP) & names_like(trace, _GRADIENT)[trace.name]))
    asked = trace.start_ns[asked_row]
    found = (hooks.around(asked_row, asked) >= 0) & (asked_row >= 0)
    step = np.where(found, steps.at(asked), NO_STEP)
    chosen = np.flatnonzero(step != NO_STEP)
    chosen = chosen[np.argsort(asked[chosen], kind="stable")]
    rows, asked, step = reductions[chosen], asked[chosen], step[chosen]
    first = np.searchsorted(step, step, side="left")
    hooked = np.sort(hooks.start_ns)
    # A gradient belongs to the next bucket of its step.
    bucket = np.searchsorted(asked, hooked, side="left")
    held = (bucket < len(asked)) & (steps.at(hooked) == taken(step, np.where(bucket < len(asked), bucket, ABSENT)))
    held &= steps.at(hooked) != NO_STEP
    return Buckets(
        collective=rows,
        step=step,
        order=np.arange(len(step)) - first,
        bytes=collectives.bytes[rows],
        started_ns=collectives.start_ns[rows],
        duration_ns=collectives.duration_ns[rows],
        exposed_ns=collectives.exposed_ns[rows],
        asked_ns=asked,
        ready_ns=computed_until(trace, asked),
        measured=collectives.measured[rows],
        gradient_bucket=bucket[held],
        gradient_ready_ns=computed_until(trace, hooked[held]),
        steps=steps,
        backward_began_ns=_backward_began(trace, steps),
    )


def computed_until(trace: Trace, moments_ns: Ints) -> Ints:
    """When all that the host had launched by each moment was computed: an event recorded then would fire there. In a
    trace without kernels that is the moment itself."""
    launches = launch_rows(trace)
    kernels = np.flatnonzero((classify(trace) == Kind.COMPUTE) & (launches != ABSENT))
    if not len(kernels):
        return moments_ns
    order = np.argsort(trace.start_ns[launches[kernels]], kind="stable")
    launched = trace.start_ns[launches[kernels[order]]]
    finished = np.maximum.accumulate(trace.end_ns[kernels[order]])
    last = np.searchsorted(launched, moments_ns, side="right") - 1
    done: Ints = np.where(last >= 0, finished[np.maximum(last, 0)], moments_ns)
    return np.maximum(moments_ns, done)


def _backward_began(trace: Trace, steps: Steps) -> Ints:
    """When each step's forward was computed; its start where it has no backward."""
    started = trace.start_ns[trace.of(Category.CPU_OP) & names_like(trace, _BACKWARD)[trace.name]]
    first = np.searchsorted(started, steps.start_ns, side="left")
    moment = taken(started, np.where(first < len(started), first, ABSENT))
    within = (moment >= 0) & (moment < steps.end_ns)
    return computed_until(trace, np.where(within, moment, steps.start_ns))


def _asking_rows(trace: Trace, collectives: Collectives, rows: Ints) -> Ints:
    """The host's row that asked for each: NCCL's own note, and for what runs on a thread of gloo the operator that put
    it there. Its queue is first in, first out, so that each transfer belongs to the next operator not yet served."""
    asked: Ints = collectives.call_row[rows].copy()
    queued = np.flatnonzero((collectives.kernel_row[rows] == ABSENT) & collectives.measured[rows])
    if not len(queued):
        return asked
    is_reduction = np.array(
        [kind_of_host_operator(name) is CollectiveKind.ALL_REDUCE for name in trace.names], dtype=bool
    )
    operators = np.flatnonzero(trace.of(Category.CPU_OP) & is_reduction[trace.name])
    begun = collectives.start_ns[rows[queued]]
    place = np.searchsorted(begun, trace.start_ns[operators], side="left")
    turn = np.arange(len(operators))
    place = turn + np.maximum.accumulate(place - turn) if len(operators) else place
    served = place < len(queued)
    asked[queued] = ABSENT
    asked[queued[place[served]]] = operators[served]
    return asked
