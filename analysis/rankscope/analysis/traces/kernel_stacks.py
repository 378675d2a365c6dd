"""The profile of a device: kernels under the call that launched them, the operators and the Python frames around it.

Spans of the host are nodes of a forest, and a kernel is a leaf under its launch. A node of autograd's engine is put
under the forward operator that it belongs to, so that a line of the model has its backward kernels too. Spans with the
same names from the root down are one path, numbered level by level: the cost is a few sorts of columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankscope.analysis.profiles.frames import KERNEL, KINDS, NATIVE, PYTHON, Frame
from rankscope.analysis.profiles.profile import Profile, profile_of_columns
from rankscope.analysis.quantities import shorten, shorten_all
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.traces.breakdown import device_rows
from rankscope.analysis.traces.intervals import Spans, nest
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import BACKWARD, PROFILER_STEP, launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, match, take_or_absent

NAME_CHARACTERS: Final = 512
MAX_DEPTH: Final = 512  # frames of a stack; beyond, the outermost and the kernel are kept
MAX_STACK_FRAMES: Final = 8 << 20  # of all stacks; beyond, the kernels with the least time have no callers
# Of all durations; forged ones are cut, so that the sum cannot overflow.
_MAX_NANOS: Final = 1 << 62
_ON_HOST: Final = (
    Category.PYTHON,
    Category.CPU_OP,
    Category.USER_ANNOTATION,
    Category.RUNTIME,
    Category.DRIVER,
)
_PYTHON_FRAME: Final = re.compile(r"(.*)\((\d{1,9})\): (.*)", re.DOTALL)  # torch/nn/modules/linear.py(124): forward
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")  # of a built-in method's object: another one in every process


def kernel_profile(trace: Trace) -> Profile:
    """Samples are kernels, copies and memory sets; nanoseconds are their durations on the device, added up even where
    they overlap. A kernel whose launch is not in the trace has no callers. The rank is 0 if the trace has none."""
    rows = device_rows(trace)
    calls = host_calls(trace)
    spans = calls.spans
    forest = _Forest(calls.parent)
    launch = forest.within_limit(take_or_absent(calls.place, launch_rows(trace)[rows]))
    used = forest.with_ancestors(launch)
    frames, frame_of_row = _frames(trace, np.concatenate((spans.row[used], rows)))
    frame = np.full(len(spans.row), ABSENT)
    frame[used] = frame_of_row[: len(used)]
    paths = forest.paths(used, frame, len(frames))
    nanos = np.minimum(trace.duration_ns[rows], _MAX_NANOS // max(len(rows), 1))
    kernels = frame_of_row[len(used) :]
    stack, stack_frames, stack_ends = paths.stacks(take_or_absent(paths.of_span, launch), kernels, nanos)
    once, zeros = np.ones_like(stack), np.zeros_like(stack)
    columns = np.stack((stack, np.full_like(stack, trace.rank or 0), zeros, zeros, once, nanos))
    return profile_of_columns(frames, ("",), ("",), stack_frames, stack_ends, columns)


@dataclass(frozen=True)
class HostCalls:
    """A forest: the host's spans, with backward operators below their forward ones. Numbers are positions in `spans`,
    as that of the parent."""

    spans: Spans
    parent: Ints
    place: Ints  # by row of the trace


def host_calls(trace: Trace) -> HostCalls:
    """Without the profiler's steps, whose numbers would keep equal stacks apart."""
    is_step = names_like(trace, PROFILER_STEP)
    spans = nest(trace, np.flatnonzero(trace.of(*_ON_HOST) & ~is_step[trace.name]))
    place = np.full(len(trace), ABSENT)
    place[spans.row] = np.arange(len(spans.row))
    return HostCalls(spans, _parents(trace, spans, place), place)


def nearest(parent: Ints, wanted: Bools) -> Ints:
    """Per node, itself or its nearest ancestor that is wanted; -1 if none is. Each pass doubles the reach."""
    found = np.where(wanted, np.arange(len(parent)), parent)
    while len(rest := np.flatnonzero((found >= 0) & ~wanted[found])):
        found[rest] = found[found[rest]]
    return found


def _parents(trace: Trace, spans: Spans, place: Ints) -> Ints:
    """A parent starts no later than its child, and a forward operator before its backward. So there are no cycles,
    whatever the trace claims."""
    parent: Ints = spans.parent.copy()
    links = np.stack([place[rows] for rows in _backward_links(trace)])
    forward, backward = links[:, (links >= 0).all(axis=0)]
    is_engine = names_like(trace, BACKWARD)[trace.name[spans.row]]
    engine = parent[backward]
    node = np.where((engine >= 0) & is_engine[engine], engine, backward)
    earlier = spans.start_ns[forward] < spans.start_ns[node]
    parent[node[earlier]] = forward[earlier]
    return parent


def _backward_links(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of forward operators, and of their backward operators."""
    flows = trace.flows
    operators = np.flatnonzero(trace.of(Category.CPU_OP) & np.isin(trace.start_ns, flows.time_ns))
    keys = (
        (trace.process[operators], flows.process),
        (trace.thread[operators], flows.thread),
        (trace.start_ns[operators], flows.time_ns),
    )
    group, count = number_groups(*(np.concatenate(pair) for pair in keys))
    operator_of_group = np.full(count, ABSENT)
    operator_of_group[group[: len(operators)]] = operators  # of several, the innermost, which is the last
    row = operator_of_group[group[len(operators) :]]
    begins, ends = (np.flatnonzero((row >= 0) & side) for side in (flows.is_forward, ~flows.is_forward))
    forward = match(flows.number[ends], flows.number[begins], row[begins])
    return forward[forward >= 0], row[ends][forward >= 0]


def _frames(trace: Trace, rows: Ints) -> tuple[tuple[Frame, ...], Ints]:
    """The frames, and the number of each row's. Every name is looked at once."""
    kind_of_category = np.full(len(Category), KINDS.index(NATIVE))
    kind_of_category[Category.PYTHON] = KINDS.index(PYTHON)
    kind_of_category[[Category.KERNEL, Category.MEMCPY, Category.MEMSET]] = KINDS.index(KERNEL)
    kind = kind_of_category[trace.category[rows]]
    pairs, pair_of_row = np.unique(trace.name[rows] * len(KINDS) + kind, return_inverse=True)
    named = [(trace.names[name], KINDS[kind]) for name, kind in zip(*np.divmod(pairs, len(KINDS)), strict=True)]
    native = [text for text, kind in named if kind != PYTHON]
    short = dict(zip(native, shorten_all(native, NAME_CHARACTERS), strict=True))
    numbers: dict[Frame, int] = {}
    of_pair = [
        numbers.setdefault(python_frame(text) if kind == PYTHON else Frame(short[text], "", 0, kind), len(numbers))
        for text, kind in named
    ]
    return tuple(numbers), np.array(of_pair, dtype=np.int64)[pair_of_row]


def python_frame(text: str) -> Frame:
    """Others than functions with a source are `nn.Module: Linear_3` and `<built-in method …>`."""
    source = _PYTHON_FRAME.fullmatch(text)
    if source is None:
        return Frame(shorten(_ADDRESS.sub("", text), NAME_CHARACTERS), "", 0, PYTHON)
    file, line, function = source.groups()
    return Frame(shorten(function, NAME_CHARACTERS), shorten(file, NAME_CHARACTERS), int(line), PYTHON)


class _Forest:
    """Nodes by the number of their parent; -1 for a root."""

    def __init__(self, parent: Ints) -> None:
        self._parent = parent
        self._depth = _depths(parent)

    def within_limit(self, nodes: Ints) -> Ints:
        """The nodes, or for those that are too deep their innermost ancestors that are not."""
        deep = self._depth >= MAX_DEPTH
        if not deep.any():
            return nodes
        above = np.where(deep, self._parent, np.arange(len(deep)))
        while deep[above].any():
            above = above[above]
        return take_or_absent(above, nodes)

    def with_ancestors(self, nodes: Ints) -> Ints:
        """Each once, by level."""
        is_used = np.zeros(len(self._parent), dtype=bool)
        is_used[nodes[nodes >= 0]] = True
        levels = rows_of_groups(np.where(self._depth < MAX_DEPTH, self._depth, ABSENT), MAX_DEPTH)
        for level in reversed(levels[2:]):
            is_used[self._parent[level[is_used[level]]]] = True
        used = np.concatenate(levels)
        return used[is_used[used]]

    def paths(self, used: Ints, frame: Ints, frames: int) -> _Paths:
        """`used` by level, with all ancestors; `frame` by node, of `frames`."""
        of_span = np.full(len(self._parent), ABSENT)
        parents, path_frames, count = [], [], 0
        levels = np.split(used, np.flatnonzero(np.diff(self._depth[used])) + 1)
        for level in levels:
            above = take_or_absent(of_span, self._parent[level])
            keys, number = np.unique((above + 1) * frames + frame[level], return_inverse=True)
            of_span[level] = count + number
            parents.append(keys // frames - 1)
            path_frames.append(keys % frames)
            count += len(keys)
        depth = np.repeat(np.arange(1, len(levels) + 1), [len(part) for part in parents])
        return _Paths(of_span, np.concatenate(parents), np.concatenate(path_frames), depth, frames)


def _depths(parent: Ints) -> Ints:
    """1 for roots. Each pass doubles the reach."""
    depth, above = np.ones(len(parent), dtype=np.int64), parent.copy()
    while len(inner := np.flatnonzero(above >= 0)):
        depth[inner] += depth[above[inner]]
        above[inner] = above[above[inner]]
    return depth


@dataclass(frozen=True)
class _Paths:
    """Distinct stacks of the host, each by its innermost frame and the number of the path around it."""

    of_span: Ints
    parent: Ints
    frame: Ints
    depth: Ints
    frames: int  # in all

    def stacks(self, path: Ints, kernel: Ints, nanos: Ints) -> tuple[Ints, Ints, Ints]:
        """The number of each kernel's stack; the frames of all stacks, innermost first, and where each stack ends."""
        keys, stack = np.unique((path + 1) * self.frames + kernel, return_inverse=True)
        lengths = self._lengths(keys)
        if lengths.sum() > MAX_STACK_FRAMES:
            order = np.argsort(-np.bincount(stack, nanos, len(keys)), kind="stable")
            fits = np.empty(len(keys), dtype=bool)
            fits[order] = np.cumsum(lengths[order]) <= MAX_STACK_FRAMES
            keys, kept = np.unique(np.where(fits, keys, keys % self.frames), return_inverse=True)
            stack, lengths = kept[stack], self._lengths(keys)
        ends = np.cumsum(lengths)
        at, place = keys // self.frames - 1, ends - lengths
        stack_frames = np.empty(int(lengths.sum()), dtype=np.int64)
        stack_frames[place] = keys % self.frames
        while len(inner := np.flatnonzero(at >= 0)):
            at, place = at[inner], place[inner] + 1
            stack_frames[place] = self.frame[at]
            at = self.parent[at]
        return stack, stack_frames, ends

    def _lengths(self, keys: Ints) -> Ints:
        return 1 + np.maximum(take_or_absent(self.depth, keys // self.frames - 1), 0)
