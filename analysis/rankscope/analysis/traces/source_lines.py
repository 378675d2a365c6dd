"""Device time and memory by line of the program and by nn.Module, from a trace with Python stacks.

A kernel belongs to the innermost frame of the program around its launch, and a block of memory to that around its
allocation. Work of the backward pass belongs to the line of its forward operator; what has none, such as the
accumulation of gradients, to the line that runs meanwhile: the call of backward(). The profiler names a function by its
first line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rankscope.analysis.profiles.frames import Frame, is_library
from rankscope.analysis.quantities import shorten
from rankscope.analysis.stats.robust import Bools, Floats, Ints, number_groups
from rankscope.analysis.traces.breakdown import device_rows, whole_steps
from rankscope.analysis.traces.device_memory import allocator_rows, freed_by, live_at, spans_of_events
from rankscope.analysis.traces.kernel_stacks import HostCalls, host_calls, nearest, python_frame
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import (
    BACKWARD,
    OPTIMIZER_STEP,
    Steps,
    find_steps,
    launch_rows,
    step_of_rows,
)
from rankscope.analysis.traces.summary_records import LinesSummary, LineSummary, ModuleSummary
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, take_or_absent

MAX_ROWS: Final = 1000
_MODULE: Final = re.compile(r"nn\.Module: ")
_MODULE_NUMBER: Final = re.compile(r"_\d+$")
_FRAME: Final = re.compile(r".*\(\d{1,9}\): ", re.DOTALL)
_TEXT_CHARACTERS: Final = 200
_MAX_MODULE_DEPTH: Final = 256
# The profiler shortens paths by the folders that Python imports from, so libraries are known by their first folder.
# Some names of the standard library are also those of scripts.
_SCRIPTS: Final = {"code", "profile", "test", "trace"}
_LIBRARIES: Final = {"torch", "torchgen", "functorch", "triton"} | sys.stdlib_module_names - _SCRIPTS
_PHASES = (FORWARD, BACKWARD_PASS, OPTIMIZER) = range(3)


def summarize_lines(trace: Trace) -> LinesSummary | None:
    """None if the trace has no Python stacks, or no work of a device. Times are of a step; over the whole trace if it
    has no steps."""
    rows = device_rows(trace)
    if not len(rows) or not trace.of(Category.PYTHON).any():
        return None
    places = _Places(trace, host_calls(trace))
    launches = launch_rows(trace)
    steps = find_steps(trace)
    whole = whole_steps(trace, steps, launches)
    position = step_of_rows(trace, steps, launches)[rows]
    rows = rows[np.isin(position, whole)] if len(whole) else rows
    launch = launches[rows]
    moments = np.where(launch >= 0, trace.start_ns[launch], trace.start_ns[rows])
    work = places.of(take_or_absent(places.calls.place, launch), moments)
    time_us = trace.duration_ns[rows] / 1000 / max(len(whole), 1)
    amounts = [np.where(work.phase == phase, time_us, 0.0) for phase in _PHASES]
    blocks = _blocks(trace, places, steps, whole)
    nothing = np.zeros(len(rows))
    columns = [np.concatenate((amount, np.zeros(len(blocks.kept)))) for amount in amounts]
    columns += [np.concatenate((nothing, sizes)) for sizes in (blocks.kept, blocks.at_peak)]
    where = _Where(*(np.concatenate(pair) for pair in zip(work, blocks.where, strict=True)))
    has_kept = blocks.is_known and bool(names_like(trace, BACKWARD).any())
    table = _Table(where, columns, float(time_us.sum()), has_memory=blocks.is_known, has_kept=has_kept)
    return LinesSummary(
        steps=len(whole) or None,
        total_us=table.total_us,
        lines=_lines(trace, places, table),
        modules=_modules(trace, places, table),
    )


class _Where(NamedTuple):
    """Of work or of blocks: positions of host calls, -1 if there is none."""

    line: Ints
    module: Ints
    phase: Ints


class _Places:
    """The line, module and phase of each host call."""

    def __init__(self, trace: Trace, calls: HostCalls) -> None:
        self.calls = calls
        spans, name = calls.spans, trace.name[calls.spans.row]
        is_python = trace.category[spans.row] == Category.PYTHON
        self.is_module = is_python & names_like(trace, _MODULE)[name]
        is_line = is_python & _is_program(trace)[name]
        self._line = nearest(calls.parent, is_line)
        self._module = nearest(calls.parent, self.is_module)
        is_annotation = trace.category[spans.row] == Category.USER_ANNOTATION
        in_optimizer = nearest(calls.parent, is_annotation & names_like(trace, OPTIMIZER_STEP)[name]) >= 0
        in_backward = nearest(calls.parent, names_like(trace, BACKWARD)[name]) >= 0
        self._phase = np.where(in_backward, BACKWARD_PASS, np.where(in_optimizer, OPTIMIZER, FORWARD))
        # Of the thread that runs the program.
        threads = spans.thread_of_row[spans.row[is_line]]
        main = int(np.bincount(threads).argmax()) if len(threads) else ABSENT
        on_main = np.flatnonzero(spans.thread_of_row[spans.row] == main)
        self._main_row = int(spans.row[on_main[0]]) if len(on_main) else ABSENT

    def of(self, call: Ints, moments: Ints) -> _Where:
        """`moments`: where a call has no line, the one that the program was in."""
        line = take_or_absent(self._line, call)
        lost = np.flatnonzero(line < 0)
        if self._main_row >= 0 and len(lost):
            meanwhile = self.calls.spans.around(np.full(len(lost), self._main_row), moments[lost])
            line[lost] = take_or_absent(self._line, meanwhile)
        phase = np.where(call >= 0, take_or_absent(self._phase, call), FORWARD)
        return _Where(line, take_or_absent(self._module, call), phase)


def _is_program(trace: Trace) -> Bools:
    """Per name, whether it is a frame of the program or of a library of models, not of torch or of Python."""
    is_frame = names_like(trace, _FRAME)
    found = np.zeros(len(trace.names), dtype=bool)
    for name in np.flatnonzero(is_frame).tolist():
        file = python_frame(trace.names[name]).file
        first = file.lstrip("./").partition("/")[0].removesuffix(".py")
        found[name] = bool(file) and not is_library(file) and first not in _LIBRARIES
    return found


@dataclass(frozen=True)
class _Blocks:
    where: _Where
    kept: Floats  # bytes that live when the backward pass begins, of a step
    at_peak: Floats
    is_known: bool


def _blocks(trace: Trace, places: _Places, steps: Steps, whole: Ints) -> _Blocks:
    """Of the device that holds most."""
    memory = trace.memory
    devices = [rows for rows in allocator_rows(trace) if memory.on_device[rows[0]]]
    if not devices:
        nowhere = np.zeros(0, dtype=np.int64)
        return _Blocks(_Where(nowhere, nowhere, nowhere), np.zeros(0), np.zeros(0), False)
    rows = max(devices, key=lambda rows: int(memory.allocated_bytes[rows].max()))
    allocates = np.flatnonzero(memory.change_bytes[rows] > 0)
    events = rows[allocates]
    where = places.of(spans_of_events(trace, places.calls.spans, events), memory.time_ns[events])
    sizes = memory.change_bytes[events].astype(np.float64)
    peak = int(np.argmax(memory.allocated_bytes[rows]))
    at_peak = live_at(memory, rows, peak)[allocates]
    freed = freed_by(memory, rows)[allocates]
    never = np.iinfo(np.int64).max
    freed_ns = np.append(memory.time_ns[rows], never)[freed]
    step = steps.at(memory.time_ns[events])
    candidates = (where.phase == FORWARD) & (np.isin(step, whole) if len(whole) else True)
    kept = _kept(trace, memory.time_ns[events], freed_ns, sizes, step, candidates)
    return _Blocks(where, np.where(kept, sizes, 0.0) / max(len(whole), 1), np.where(at_peak, sizes, 0.0), True)


def _kept(trace: Trace, made_ns: Ints, freed_ns: Ints, sizes: Floats, step: Ints, candidates: Bools) -> Bools:
    """Blocks of the forward pass that live when the next backward operator begins. Of several passes in a step, which
    do not live at once, those of the largest."""
    engine = trace.of(Category.CPU_OP) & names_like(trace, BACKWARD)[trace.name]
    starts = np.append(trace.start_ns[engine], np.iinfo(np.int64).max)
    following = np.searchsorted(starts[:-1], made_ns, side="right")
    kept = candidates & (following < len(starts) - 1) & (freed_ns > starts[following])
    if not kept.any():
        return kept
    passes, count = number_groups(step[kept], following[kept])
    total = np.bincount(passes, sizes[kept], count)
    first = np.full(count, ABSENT)
    first[passes] = step[kept]
    order = np.lexsort((-total, first))
    is_largest = np.zeros(count, dtype=bool)
    is_largest[order[np.append(True, np.diff(first[order]) != 0)]] = True
    kept[np.flatnonzero(kept)[~is_largest[passes]]] = False
    return kept


@dataclass(frozen=True)
class _Table:
    """A row per kernel and per block. The columns are µs forward, backward and in the optimizer; bytes kept and at the
    peak."""

    where: _Where
    columns: Sequence[Floats]
    total_us: float
    has_memory: bool
    has_kept: bool

    def sums(self, group: Ints, count: int) -> _Sums:
        columns = [np.bincount(group, column, count).astype(np.float64) for column in self.columns]
        return _Sums(columns, self.total_us, self.has_memory, self.has_kept)


@dataclass(frozen=True)
class _Sums:
    """Of the columns, by group."""

    columns: Sequence[Floats]
    total_us: float
    has_memory: bool
    has_kept: bool

    @property
    def largest(self) -> list[int]:
        """Groups by time, then memory."""
        forward, backward, optimizer, kept, peak = self.columns
        order: list[int] = np.lexsort((-peak, -kept, -(forward + backward + optimizer)))[:MAX_ROWS].tolist()
        return order

    def us(self, phase: int, group: int) -> float:
        return float(self.columns[phase][group])

    def share_ratio(self, group: int) -> float:
        return sum(self.us(phase, group) for phase in _PHASES) / (self.total_us or 1.0)

    def kept_bytes(self, group: int) -> int | None:
        return round(float(self.columns[3][group])) if self.has_kept else None

    def peak_bytes(self, group: int) -> int | None:
        return round(float(self.columns[4][group])) if self.has_memory else None


def _lines(trace: Trace, places: _Places, table: _Table) -> tuple[LineSummary, ...]:
    """Each amount belongs to one row."""
    name = trace.name[places.calls.spans.row]
    line, module = take_or_absent(name, table.where.line), take_or_absent(name, table.where.module)
    classes, class_of = _classes(trace, module)
    group, count = number_groups(line, class_of)
    first = np.full(count, ABSENT)
    first[group] = np.arange(len(group))
    sums = table.sums(group, count)
    found = []
    for at in sums.largest:
        frame = Frame("", "", 0) if line[first[at]] < 0 else python_frame(trace.named(int(line[first[at]])))
        found.append(
            LineSummary(
                file=shorten(frame.file, _TEXT_CHARACTERS),
                line=frame.line,
                function=shorten(frame.function, _TEXT_CHARACTERS),
                module=classes[int(class_of[first[at]])],
                forward_us=sums.us(FORWARD, at),
                backward_us=sums.us(BACKWARD_PASS, at),
                optimizer_us=sums.us(OPTIMIZER, at),
                share_ratio=sums.share_ratio(at),
                kept_bytes=sums.kept_bytes(at),
                peak_bytes=sums.peak_bytes(at),
            )
        )
    return tuple(found)


def _classes(trace: Trace, module: Ints) -> tuple[list[str], Ints]:
    """Names of classes, and the number of each module's. `nn.Module: Linear_3` is a Linear."""
    names, number = np.unique(module, return_inverse=True)
    texts = [_MODULE_NUMBER.sub("", _module_name(trace, int(name))) for name in names]
    classes = list(dict.fromkeys(texts))
    place = {text: at for at, text in enumerate(classes)}
    return classes, np.array([place[text] for text in texts], dtype=np.int64)[number.reshape(-1)]


def _module_name(trace: Trace, name: int) -> str:
    return shorten(_MODULE.sub("", trace.named(name), count=1), _TEXT_CHARACTERS)


def _modules(trace: Trace, places: _Places, table: _Table) -> tuple[ModuleSummary, ...]:
    """With what is inside of them, so that rows overlap."""
    calls = np.flatnonzero(places.is_module)
    inside = np.flatnonzero(table.where.module >= 0)
    if not len(calls) or not len(inside):
        return ()
    position = np.full(len(places.is_module), ABSENT)
    position[calls] = np.arange(len(calls))
    around = nearest(places.calls.parent, places.is_module)
    outer = take_or_absent(position, take_or_absent(around, places.calls.parent[calls]))
    names, number = np.unique(trace.name[places.calls.spans.row[calls]], return_inverse=True)
    number = number.reshape(-1)
    # Amounts rise from each call of a module to those around it, one level a turn.
    called = position[table.where.module[inside]]
    amounts = [np.bincount(called, column[inside], len(calls)) for column in table.columns]
    at = np.arange(len(calls))
    sums = [np.zeros(len(names)) for _ in amounts]
    for _ in range(_MAX_MODULE_DEPTH):
        for total, amount in zip(sums, amounts, strict=True):
            total += np.bincount(number[at], amount, len(names))
        inner = np.flatnonzero(outer[at] >= 0)
        if not len(inner):
            break
        at, amounts = outer[at[inner]], [amount[inner] for amount in amounts]
    found = _Sums(sums, table.total_us, table.has_memory, table.has_kept)
    return tuple(
        ModuleSummary(
            module=_module_name(trace, int(names[at])),
            forward_us=found.us(FORWARD, at),
            backward_us=found.us(BACKWARD_PASS, at),
            share_ratio=found.share_ratio(at),
            kept_bytes=found.kept_bytes(at),
            peak_bytes=found.peak_bytes(at),
        )
        for at in found.largest
    )


def heaviest_lines(trace: Trace, rows: Ints, weight: Floats, count: int) -> list[Frame]:
    """The lines of the program around host events, or around the launches of device work, with the largest sum of
    weights. Empty without Python stacks."""
    if not len(rows) or not trace.of(Category.PYTHON).any():
        return []
    places = _Places(trace, host_calls(trace))
    launch = launch_rows(trace)[rows]
    host_row = np.where(launch >= 0, launch, rows)
    line = places.of(places.calls.place[host_row], trace.start_ns[host_row]).line
    known = line >= 0
    names, number = np.unique(trace.name[places.calls.spans.row[line[known]]], return_inverse=True)
    total = np.bincount(number.reshape(-1), weight[known], len(names))
    best = [at for at in np.argsort(-total, kind="stable")[:count].tolist() if total[at] > 0]
    return [python_frame(trace.named(int(names[at]))) for at in best]
