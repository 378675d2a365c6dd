"""The collectives of one rank as columns: what ran, in which group, how many bytes, when, and how much of it nothing
hid."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.collectives.bandwidth import size_bytes
from rankscope.analysis.collectives.kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.breakdown import occupy_host
from rankscope.analysis.traces.communication.host_calls import Noted, find_calls, find_transfers, name_kinds
from rankscope.analysis.traces.intervals import Intervals, covered_until, union
from rankscope.analysis.traces.kernels import Kind, classify
from rankscope.analysis.traces.trace import ABSENT, Category, ProcessGroup, Trace

# Which process group each communication belongs to, and how many ranks that has.


@dataclass(frozen=True)
class Grouping:
    group: Ints  # index into groups
    size: Ints  # of that group, -1 where nothing tells
    groups: tuple[ProcessGroup, ...]


def find_groups(trace: Trace, noted: Noted, stream: Ints) -> Grouping:
    """Groups by the name the profiler noted. Where it noted none: the trace's only group if it has but one, else a
    nameless group per stream, since a communicator runs on a stream of its own."""
    named = noted.group >= 0
    # A noted name is one number from 0; a stream without a name is below -1.
    only = len(trace.groups) == 1
    key = np.where(named, noted.group, np.where(only, -2, -3 - np.maximum(stream, -1) - 1))
    keys, group = np.unique(key, return_inverse=True)
    known = {known.name: known for known in trace.groups}
    groups = []
    for number, value in enumerate(keys):
        if value == -2:
            groups.append(trace.groups[0])
        elif value < 0:
            groups.append(ProcessGroup("", f"stream {-4 - value}" if value < -3 else "", ()))
        else:
            name = trace.named(int(value))
            described = noted.group_description[(group == number) & (noted.group_description >= 0)]
            description = trace.named(int(described[0])) if len(described) else ""
            groups.append(known.get(name, ProcessGroup(name, description, ())))
    # One group may be noted by name and be the trace's only one as well.
    group, merged = _merge_equal(group.astype(np.int64), groups)
    return Grouping(group, _sizes(trace, noted, group, merged), merged)


def _merge_equal(group: Ints, groups: list[ProcessGroup]) -> tuple[Ints, tuple[ProcessGroup, ...]]:
    number: dict[tuple[str, str], int] = {}
    kept: list[ProcessGroup] = []
    renumbered = np.zeros(len(groups), dtype=np.int64)
    for old, each in enumerate(groups):
        identity = (each.name, "" if each.name else each.description)
        if identity not in number:
            number[identity] = len(kept)
            kept.append(each)
        renumbered[old] = number[identity]
    return renumbered[group] if len(group) else group, tuple(kept)


def _sizes(trace: Trace, noted: Noted, group: Ints, groups: tuple[ProcessGroup, ...]) -> Ints:
    size: Ints = noted.group_size.copy()
    for number, each in enumerate(groups):
        mine = group == number
        told = size[mine & (size > 0)]
        if len(told):
            guess = int(told[0])
        elif each.ranks:
            guess = len(each.ranks)
        else:
            guess = _by_growth(noted, mine)
        if guess < 0 and trace.world_size and each.description == "default_pg":
            guess = trace.world_size
        # Whichever of the trace's groups it was, that is how many ranks it has.
        sizes = {len(known.ranks) for known in trace.groups}
        if guess < 0 and not each.name and len(sizes) == 1:
            guess = sizes.pop() or ABSENT
        size[mine & (size <= 0)] = guess
    return size


def _by_growth(noted: Noted, mine: Bools) -> int:
    """An all-gather's output is so many times its input, a reduce-scatter's input its output."""
    both = mine & (noted.in_bytes > 0) & (noted.out_bytes > 0)
    gather = both & (noted.kind == CollectiveKind.ALL_GATHER)
    scatter = both & (noted.kind == CollectiveKind.REDUCE_SCATTER)
    larger = np.concatenate([noted.out_bytes[gather], noted.in_bytes[scatter]])
    smaller = np.concatenate([noted.in_bytes[gather], noted.out_bytes[scatter]])
    if not len(larger) or np.any(larger % smaller):
        return ABSENT
    factors = np.unique(larger // smaller)
    return int(factors[0]) if len(factors) == 1 else ABSENT


@dataclass(frozen=True)
class Collectives:
    """One row per communication, sorted by start. -1 is "not known" in every integer column.

    Ranks are matched by (group's name, kind, sequence, repeat), where `sequence_noted`. Elsewhere `sequence` counts
    from the beginning of this trace, which need not be the same moment on another rank."""

    kind: Ints  # a CollectiveKind
    group: Ints  # index into groups
    sequence: Ints  # the profiler's number where it noted one for the whole group and kind; else the order of calls
    repeat: Ints  # 0, 1, … of rows that share group, kind and sequence: NCCL counts a group of calls as one
    start_ns: Ints
    duration_ns: Ints  # 0 where not measured
    bytes: Ints  # of the whole array, as nccl-tests counts
    group_size: Ints
    exposed_ns: Ints  # of the duration, not covered by any compute kernel (on a CPU trace: by any operator)
    kernel_row: Ints  # of Trace; -1 where it ran on the host, or left no kernel
    call_row: Ints  # of Trace: the host's annotation or note
    calls: Ints  # how many host calls this one kernel served; more than 1: NCCL grouped them; 0: the call is not known
    stream: Ints
    peer: Ints  # of a point-to-point transfer
    sequence_noted: Bools  # by the profiler, so that it is the same number on every rank
    measured: Bools  # False: only the host's call was seen, which tells when it was asked for and no more
    groups: tuple[ProcessGroup, ...]  # name "" where the trace names none: then one per stream

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def end_ns(self) -> Ints:
        return self.start_ns + self.duration_ns

    def where(self, chosen: Bools | Ints) -> Collectives:
        """Some of the rows, chosen by a mask or by their numbers."""
        names = [field.name for field in fields(self) if field.name != "groups"]
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


def find_collectives(trace: Trace) -> Collectives:
    """Every communication of the trace: NCCL's and RCCL's kernels with what their host calls noted, what gloo ran on
    the host, and calls that left no kernel (a group of one rank moves nothing)."""
    kinds = name_kinds(trace)
    transfers = find_transfers(trace, kinds, find_calls(trace, kinds))
    transfers = transfers.take(np.argsort(transfers.start_ns, kind="stable"))
    noted = transfers.noted
    grouping = find_groups(trace, noted, transfers.stream)
    sequence, repeat, sequence_noted = _number(noted.kind, grouping.group, noted.sequence)
    hidden = covered_until(hiding_intervals(trace), np.stack([transfers.start_ns, transfers.end_ns]).ravel())
    before, after = hidden.reshape(2, -1)
    duration = transfers.end_ns - transfers.start_ns
    return Collectives(
        kind=noted.kind,
        group=grouping.group,
        sequence=sequence,
        repeat=repeat,
        start_ns=transfers.start_ns,
        duration_ns=duration,
        bytes=size_bytes(noted.kind, noted.in_bytes, noted.out_bytes, grouping.size),
        group_size=grouping.size,
        exposed_ns=duration - (after - before),
        kernel_row=transfers.kernel_row,
        call_row=transfers.call_row,
        calls=transfers.calls,
        stream=transfers.stream,
        peer=noted.peer,
        sequence_noted=sequence_noted,
        measured=transfers.measured,
        groups=grouping.groups,
    )


def hiding_intervals(trace: Trace) -> Intervals:
    """When work ran that communication could hide behind: compute kernels, or in a trace without any kernel the
    host's operators, less those that communicate."""
    if not np.any(trace.of(Category.KERNEL)):
        return occupy_host(trace).compute
    rows = classify(trace) == Kind.COMPUTE
    return union(trace.start_ns[rows], trace.end_ns[rows])


def _number(kind: Ints, group: Ints, noted: Ints) -> tuple[Ints, Ints, Bools]:
    """Sequence, repeat and whether it was noted. Numbers from two sources would collide, so that within a group and
    kind either all are noted or none counts."""
    which, count = number_groups(group, kind)
    complete = np.ones(count, dtype=bool)
    complete[which[noted < 0]] = False
    was_noted = complete[which] if len(which) else np.zeros(0, dtype=bool)
    sequence = np.where(was_noted, noted, _order_within(which))
    same, _ = number_groups(which, sequence)
    return sequence, _order_within(same), was_noted


def _order_within(group: Ints) -> Ints:
    """0, 1, 2, … for the rows of each group, in the order they stand in."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ABSENT))
    position = np.empty(len(group), dtype=np.int64)
    lengths = np.diff(np.append(starts, len(group)))
    position[order] = np.arange(len(group)) - np.repeat(starts, lengths)
    return position
