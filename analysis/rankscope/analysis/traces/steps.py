"""Steps of a trace, and the step each event belongs to: device work belongs to the step that launched it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.intervals import merge
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, match

# An annotation that Rankscope writes where it cut a recording at a step boundary.
CUT_AT_A_STEP = "rankscope: requested steps begin here"
PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})")
OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")
BACKWARD = re.compile(r"autograd::engine::evaluate_function")
NO_STEP = -1
_MAX_VALUE = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Steps:
    """Windows on the host, sorted and disjoint. `number` is the profiler's own, otherwise counted from 0."""

    number: Ints
    start_ns: Ints
    end_ns: Ints
    source: str  # ProfilerStep, Optimizer.step, or empty if the trace shows no steps
    # Whether the first step was recorded from its beginning. Without the profiler's step annotations it begins with the
    # recording, somewhere inside a step.
    first_is_whole: bool

    def __len__(self) -> int:
        return len(self.number)

    def at(self, moments_ns: Ints) -> Ints:
        """The position (not number) of the step that contains each moment; NO_STEP if none does."""
        if len(self) == 0:
            return np.full(len(moments_ns), NO_STEP, dtype=np.int64)
        position = np.searchsorted(self.start_ns, moments_ns, "right") - 1
        inside = (position >= 0) & (moments_ns < self.end_ns[np.maximum(position, 0)])
        return np.where(inside, position, NO_STEP)


NO_STEPS = Steps(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), "", True)


def find_steps(trace: Trace) -> Steps:
    on_host = trace.of(Category.USER_ANNOTATION, Category.CPU_OP) & (trace.stream == ABSENT)
    marked = on_host & names_like(trace, PROFILER_STEP)[trace.name]
    if marked.any():
        return _profiler_steps(trace, np.flatnonzero(marked))
    optimizers = on_host & names_like(trace, OPTIMIZER_STEP)[trace.name]
    return _optimizer_steps(trace, np.flatnonzero(optimizers)) if optimizers.any() else NO_STEPS


def first_whole(steps: Steps) -> int:
    """The position of the first step that was recorded from its beginning."""
    return 0 if steps.first_is_whole else 1


def launch_rows(trace: Trace) -> Ints:
    """Per row, the row of the host call that launched it; -1 for host events and if the call is not in the trace.
    One call may launch many kernels (a graph)."""
    calls = np.flatnonzero(trace.of(Category.RUNTIME, Category.DRIVER))
    work = np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC))
    found = np.full(len(trace), ABSENT, dtype=np.int64)
    found[work] = match(trace.correlation[work], trace.correlation[calls], calls)
    return found


def step_of_rows(trace: Trace, steps: Steps, launches: Ints | None = None) -> Ints:
    """The position of each row's step: host events by their start, device events by the start of their launch. Work
    launched before the trace began belongs to no step, unless the trace has no launches at all."""
    launches = launch_rows(trace) if launches is None else launches
    positions = steps.at(trace.start_ns)
    launched = launches != ABSENT
    if launched.any():
        on_device = trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC)
        positions = np.where(launched, positions[launches], np.where(on_device, NO_STEP, positions))
    return positions


def _profiler_steps(trace: Trace, rows: Ints) -> Steps:
    numbers = np.array([_step_number(trace.named(name)) for name in trace.name[rows]], dtype=np.int64)
    start, end = trace.start_ns[rows], trace.end_ns[rows]
    # A step may be annotated on several threads: one window from the first start to the last end.
    number, position = np.unique(numbers, return_inverse=True)
    first, last = np.full(len(number), _MAX_VALUE), np.full(len(number), -_MAX_VALUE)
    np.minimum.at(first, position, start)
    np.maximum.at(last, position, end)
    order = np.argsort(first, kind="stable")
    number, first, last = number[order], first[order], last[order]
    last[:-1] = np.minimum(last[:-1], first[1:])
    return Steps(number, first, last, "ProfilerStep", True)


def _step_number(name: str) -> int:
    found = PROFILER_STEP.match(name)
    return int(found[1]) if found else 0


def _optimizer_steps(trace: Trace, rows: Ints) -> Steps:
    """A step ends with its optimizer, and the next one begins there. The first begins with the trace and may be
    incomplete."""
    # Nested optimizer calls count as one.
    start, end = merge(trace.start_ns[rows], trace.end_ns[rows])
    backward = np.flatnonzero(trace.of(Category.CPU_OP) & names_like(trace, BACKWARD)[trace.name])
    last = _ends_of_steps(start, end, trace.start_ns[backward], trace.name[rows], trace.start_ns[rows])
    end = end[last]
    host = ~trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.GPU_ANNOTATION)
    begin = int(trace.start_ns[host & ~trace.of(Category.OVERHEAD, Category.OTHER)].min())
    starts = np.concatenate(([begin], end[:-1]))
    return Steps(np.arange(len(end)), starts, end, "Optimizer.step", CUT_AT_A_STEP in trace.names)


def _ends_of_steps(start: Ints, end: Ints, backward: Ints, names: Ints, named_at: Ints) -> Bools:
    """Which optimizer calls end a step: those followed by a backward pass or by the first optimizer again. A step
    may call several optimizers in turn (one for embeddings, one that keeps an average), each possibly after its own
    backward pass (a generator and its critic)."""
    last = np.ones(len(end), dtype=bool)
    if len(end) < 2:
        return last
    if len(backward):
        # Calls with no backward pass in between belong to the same step.
        passes = np.searchsorted(np.sort(backward), end)
        last[:-1] = passes[1:] != passes[:-1]
    heads = np.flatnonzero(np.concatenate(([True], last[:-1])))
    first_name = names[np.searchsorted(named_at, start[heads])]
    distinct = len(np.unique(first_name))
    turns = first_name[: len(first_name) // distinct * distinct].reshape(-1, distinct)
    if distinct > 1 and len(turns) > 1 and (turns == turns[0]).all() and len(np.unique(turns[0])) == distinct:
        ends = np.flatnonzero(last)
        last[:] = False
        last[ends[distinct - 1 :: distinct]] = True
    return last
