"""The collectives of one rank as columns: what ran, in which group, how many bytes, when, and how much of it nothing
hid."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.breakdowns.occupation import occupy_host
from rankscope.analysis.traces.columns import ABSENT, Category, ProcessGroup, Trace
from rankscope.analysis.traces.communication.bandwidth import size_bytes
from rankscope.analysis.traces.communication.calls import find_calls, name_kinds
from rankscope.analysis.traces.communication.groups import find_groups
from rankscope.analysis.traces.communication.transfers import find_transfers
from rankscope.analysis.traces.intervals import Intervals, covered_until, union
from rankscope.analysis.traces.kernels import Kind, classify


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
