"""The collectives of one rank as columns: kind, process group, bytes, time, and how much of it is exposed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, kind_of_host_operator, size_bytes
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, occurrence, rows_of_groups
from rankscope.analysis.step_graph.group_kinds import GroupKind, infer_group_kinds
from rankscope.analysis.step_graph.operations import MESSAGES, UNKNOWN, Group, Operations
from rankscope.analysis.traces.breakdown import occupy_host
from rankscope.analysis.traces.communication.host_calls import CallMetadata, find_calls, find_transfers, name_kinds
from rankscope.analysis.traces.intervals import Intervals, Spans, covered_until, nest, union
from rankscope.analysis.traces.kernels import Kind, classify, names_like
from rankscope.analysis.traces.steps import NO_STEP, find_steps, step_of_rows
from rankscope.analysis.traces.trace import ABSENT, Category, ProcessGroup, Trace

PURPOSES = tuple(GroupKind)
_PIPELINE = PURPOSES.index(GroupKind.PIPELINE)
POINT_TO_POINT = (CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV)
_GRADIENT = re.compile(r"autograd::engine::evaluate_function: .*AccumulateGrad")
# Members of a group that has all ranks of the job and no list of them.
MAX_UNLISTED_MEMBERS = 1 << 16
# NCCL counts the part of a rank for these.
_IN_PARTS = (
    *(CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL),
    *(CollectiveKind.GATHER, CollectiveKind.SCATTER),
)


@dataclass(frozen=True)
class Collectives:
    """One row per communication, sorted by start. -1 means unknown in all integer columns.

    Ranks are matched by (group's name, kind, sequence, repeat) if `sequence_noted`. Otherwise `sequence` counts from
    the beginning of this trace, which may be another moment than on other ranks."""

    kind: Ints  # a CollectiveKind
    group: Ints  # index into groups
    sequence: Ints  # the profiler's number if recorded for the whole group and kind; otherwise the order of calls
    repeat: Ints  # 0, 1, … of rows with the same group, kind and sequence: NCCL counts a group of calls as one
    start_ns: Ints
    duration_ns: Ints  # 0 if not measured
    bytes: Ints  # size of the whole array, as in nccl-tests
    group_size: Ints
    exposed_ns: Ints  # part of the duration not covered by compute kernels (in a CPU trace: by operators)
    kernel_row: Ints  # row of Trace; -1 if it ran on the host or has no kernel
    call_row: Ints  # row of Trace: the host's annotation or operator
    calls: Ints  # number of host calls that the kernel served; more than 1: NCCL grouped them; 0: unknown
    stream: Ints
    peer: Ints  # of point-to-point transfers
    sequence_noted: Bools  # recorded by the profiler, so it is the same number on all ranks
    measured: Bools  # False: only the host call was recorded, which shows when it was made but not how long it took
    groups: tuple[ProcessGroup, ...]  # name "" if the trace names none: then one per stream
    group_kinds: tuple[GroupKind, ...] = ()  # of each of the groups

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def purpose(self) -> Ints:
        """The kind of each row's group as an index into `PURPOSES`. Collectives in the group of a pipeline's messages
        have none."""
        of_group = np.array([PURPOSES.index(kind) for kind in self.group_kinds], dtype=np.int64)[self.group]
        aside = (of_group == _PIPELINE) & ~np.isin(self.kind, POINT_TO_POINT)
        return np.where(aside, PURPOSES.index(GroupKind.UNKNOWN), of_group)

    @property
    def between_stages(self) -> Bools:
        """The messages of a pipeline."""
        return np.asarray(self.purpose == _PIPELINE)

    @property
    def end_ns(self) -> Ints:
        return self.start_ns + self.duration_ns


def find_collectives(trace: Trace) -> Collectives:
    """All communication of the trace: NCCL's and RCCL's kernels with the metadata of their host calls, gloo's
    transfers on the host, and calls without a kernel (a group of one rank transfers nothing)."""
    kinds = name_kinds(trace)
    transfers = find_transfers(trace, kinds, find_calls(trace, kinds))
    transfers = transfers.take(np.argsort(transfers.start_ns, kind="stable"))
    noted = transfers.noted
    grouping = find_groups(trace, noted, transfers.stream)
    sequence, repeat, sequence_noted = _number(noted.kind, grouping.group, noted.sequence)
    hidden = covered_until(compute_intervals(trace), np.stack([transfers.start_ns, transfers.end_ns]).ravel())
    before, after = hidden.reshape(2, -1)
    duration = transfers.end_ns - transfers.start_ns
    collectives = Collectives(
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
    return replace(collectives, group_kinds=_group_kinds(trace, collectives))


def gradient_hooks(trace: Trace) -> Spans:
    """The nodes of the backward pass that complete a gradient. DDP starts a bucket from the last of its gradients."""
    return nest(trace, np.flatnonzero(trace.of(Category.CPU_OP) & names_like(trace, _GRADIENT)[trace.name]))


def calls_of_reductions(trace: Trace, collectives: Collectives, rows: Ints) -> Ints:
    """The host's row that started each: with NCCL the annotated call; for transfers on a gloo thread the operator
    that queued it. The queue is FIFO, so each transfer belongs to the next operator not yet served."""
    called: Ints = collectives.call_row[rows].copy()
    queued = np.flatnonzero((collectives.kernel_row[rows] == ABSENT) & collectives.measured[rows])
    if not len(queued):
        return called
    is_reduction = np.array(
        [kind_of_host_operator(name) is CollectiveKind.ALL_REDUCE for name in trace.names], dtype=bool
    )
    operators = np.flatnonzero(trace.of(Category.CPU_OP) & is_reduction[trace.name])
    begun = collectives.start_ns[rows[queued]]
    place = np.searchsorted(begun, trace.start_ns[operators], side="left")
    turn = np.arange(len(operators))
    place = turn + np.maximum.accumulate(place - turn) if len(operators) else place
    served = place < len(queued)
    called[queued] = ABSENT
    called[queued[place[served]]] = operators[served]
    return called


def _group_kinds(trace: Trace, collectives: Collectives) -> tuple[GroupKind, ...]:
    kinds = infer_group_kinds(read_operations(trace, collectives)[1], trace.world_size)
    rows = np.flatnonzero(collectives.kind == CollectiveKind.ALL_REDUCE)
    calls = calls_of_reductions(trace, collectives, rows)
    rows, calls = rows[calls != ABSENT], calls[calls != ABSENT]
    hooked = gradient_hooks(trace).around(calls, trace.start_ns[calls]) >= 0
    of_gradients = set(collectives.group[rows[hooked]].tolist())
    return tuple(
        GroupKind.DATA if kind is GroupKind.UNKNOWN and number in of_gradients else kind
        for number, kind in enumerate(kinds)
    )


def read_operations(
    trace: Trace, collectives: Collectives, local_peers: Sequence[bool] | None = None
) -> tuple[Ints, Operations]:
    """Return the operations of the rank: what was measured, and all messages; and the row in `collectives` that has the
    times of each. torch sends and receives a batch of messages in one kernel after their calls: each of them has the
    times of this kernel, which is no operation of its own then.

    `local_peers` says of each group whether it numbers its peers by their position in it."""
    rows, carrier = _with_carriers(trace, collectives)
    at = np.where(
        collectives.kernel_row[carrier] != ABSENT, collectives.kernel_row[carrier], collectives.call_row[carrier]
    )
    steps = find_steps(trace)
    start = collectives.start_ns[carrier]
    called = collectives.call_row[carrier]
    issued = np.where(called != ABSENT, trace.start_ns[called], start)
    groups = tuple(
        Group(each.name, each.ranks or _all_ranks(trace, size), each.description)
        for each, size in zip(collectives.groups, _largest(collectives), strict=True)
    )
    group, rank = collectives.group[rows], UNKNOWN if trace.rank is None else trace.rank
    return carrier, Operations(
        rank=np.full(len(rows), rank),
        step=step_of_rows(trace, steps)[at] if len(steps) else np.full(len(rows), NO_STEP),
        group=group,
        kind=collectives.kind[rows],
        sequence=collectives.sequence[rows],
        peer=_ranks_of_peers(rank, groups, group, collectives.peer[rows], local_peers),
        bytes=_counted_bytes(collectives, rows),
        start_ns=start,
        stop_ns=start + collectives.duration_ns[carrier],
        queued_ns=np.maximum(start - issued, 0),
        groups=groups,
    )


def _largest(collectives: Collectives) -> list[int]:
    size = np.full(len(collectives.groups), ABSENT)
    np.maximum.at(size, collectives.group, collectives.group_size)
    return [int(each) for each in size]


def _all_ranks(trace: Trace, size: int) -> tuple[int, ...]:
    return tuple(range(size)) if size == trace.world_size and size <= MAX_UNLISTED_MEMBERS else ()


def _with_carriers(trace: Trace, collectives: Collectives) -> tuple[Ints, Ints]:
    """Return the rows of operations, and for each the row that has its times."""
    kind, call = collectives.kind, collectives.call_row
    is_message = np.isin(kind, MESSAGES)
    batches = np.flatnonzero((kind == CollectiveKind.SEND_RECV) & (call != ABSENT))
    batches = batches[np.argsort(trace.start_ns[call[batches]], kind="stable")]
    carrier = np.arange(len(collectives))
    carried = np.flatnonzero(is_message & ~collectives.measured)
    following = np.searchsorted(trace.start_ns[call[batches]], collectives.start_ns[carried])
    carried, following = carried[following < len(batches)], following[following < len(batches)]
    carrier[carried] = batches[following]
    is_operation = collectives.measured | is_message
    is_operation[carrier[carried]] = False
    rows = np.flatnonzero(is_operation)
    return rows, carrier[rows]


def _counted_bytes(collectives: Collectives, rows: Ints) -> Ints:
    """Return sizes as NCCL counts them: what a rank gives or takes, rather than the whole array."""
    size, ranks = collectives.bytes[rows], collectives.group_size[rows]
    is_part = np.isin(collectives.kind[rows], _IN_PARTS) & (size >= 0) & (ranks > 0)
    return np.where(is_part, size // np.maximum(ranks, 1), size)


def number_peers_by_position(rank: int, members: tuple[int, ...], peers: Ints) -> bool:
    """Return whether a rank's peers are positions in a group: one of them is no member, or the rank itself."""
    return bool(members) and not set(np.unique(peers[peers >= 0]).tolist()) <= set(members) - {rank}


def _ranks_of_peers(
    rank: int, groups: tuple[Group, ...], group: Ints, peer: Ints, local_peers: Sequence[bool] | None
) -> Ints:
    ranks: Ints = peer.copy()
    for number, (each, rows) in enumerate(zip(groups, rows_of_groups(group, len(groups)), strict=True)):
        rows = rows[peer[rows] >= 0]
        if local_peers is None:
            is_local = number_peers_by_position(rank, each.ranks, peer[rows])
        else:
            is_local = local_peers[number]
        if is_local:
            rows = rows[peer[rows] < len(each.ranks)]
            ranks[rows] = np.array(each.ranks, dtype=np.int64)[peer[rows]]
    return ranks


def compute_intervals(trace: Trace) -> Intervals:
    """When work ran that can hide communication: compute kernels, or, in a trace without kernels, the host's
    operators except those that communicate."""
    if not np.any(trace.of(Category.KERNEL)):
        return occupy_host(trace).compute
    rows = classify(trace) == Kind.COMPUTE
    return union(trace.start_ns[rows], trace.end_ns[rows])


def _number(kind: Ints, group: Ints, noted: Ints) -> tuple[Ints, Ints, Bools]:
    """Sequence, repeat, and whether the sequence was recorded. Numbers from two sources would collide, so recorded
    numbers are used only if the whole group and kind has them."""
    which, count = number_groups(group, kind)
    complete = np.ones(count, dtype=bool)
    complete[which[noted < 0]] = False
    was_noted = complete[which] if len(which) else np.zeros(0, dtype=bool)
    sequence = np.where(was_noted, noted, occurrence(which))
    same, _ = number_groups(which, sequence)
    return sequence, occurrence(same), was_noted


@dataclass(frozen=True)
class Grouping:
    group: Ints  # index into groups
    size: Ints  # size of that group, -1 if unknown
    groups: tuple[ProcessGroup, ...]


def find_groups(trace: Trace, noted: CallMetadata, stream: Ints) -> Grouping:
    """Groups by the name that the profiler recorded. Without a name: the trace's only group if there is just one,
    otherwise an unnamed group per stream, because a communicator has its own stream."""
    named = noted.group >= 0
    # A recorded name is a number from 0; a stream without a name is below -1.
    only = len(trace.groups) == 1
    key = np.where(named, noted.group, np.where(only, -2, -3 - np.maximum(stream, -1) - 1))
    keys, group = np.unique(key, return_inverse=True)
    known = {known.name: known for known in trace.groups}
    described, first = np.unique(group[noted.group_description >= 0], return_index=True)
    texts = noted.group_description[noted.group_description >= 0][first]
    description_of = dict(zip(described.tolist(), texts.tolist(), strict=True))
    groups = []
    for number, value in enumerate(keys):
        if value == -2:
            groups.append(trace.groups[0])
        elif value < 0:
            groups.append(ProcessGroup("", f"stream {-4 - value}" if value < -3 else "", ()))
        else:
            name = trace.named(int(value))
            description = trace.named(description_of.get(number, ABSENT))
            groups.append(known.get(name, ProcessGroup(name, description, ())))
    # A group may appear by name and as the trace's only group.
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


def _sizes(trace: Trace, noted: CallMetadata, group: Ints, groups: tuple[ProcessGroup, ...]) -> Ints:
    size: Ints = noted.group_size.copy()
    sizes = {len(known.ranks) for known in trace.groups}
    for each, mine in zip(groups, rows_of_groups(group, len(groups)), strict=True):
        known_sizes = size[mine[size[mine] > 0]]
        if len(known_sizes):
            guess = int(known_sizes[0])
        elif each.ranks:
            guess = len(each.ranks)
        else:
            guess = _size_from_bytes(noted, mine)
        if guess < 0 and trace.world_size and each.description == "default_pg":
            guess = trace.world_size
        # Whichever of the trace's groups it is, all have this size.
        if guess < 0 and not each.name and len(sizes) == 1:
            guess = max(sizes) or ABSENT
        size[mine[size[mine] <= 0]] = guess
    return size


def _size_from_bytes(noted: CallMetadata, mine: Ints) -> int:
    """An all-gather's output is a multiple of its input, a reduce-scatter's input a multiple of its output."""
    both = mine[(noted.in_bytes[mine] > 0) & (noted.out_bytes[mine] > 0)]
    gather = both[noted.kind[both] == CollectiveKind.ALL_GATHER]
    scatter = both[noted.kind[both] == CollectiveKind.REDUCE_SCATTER]
    larger = np.concatenate([noted.out_bytes[gather], noted.in_bytes[scatter]])
    smaller = np.concatenate([noted.in_bytes[gather], noted.out_bytes[scatter]])
    if not len(larger) or np.any(larger % smaller):
        return ABSENT
    factors = np.unique(larger // smaller)
    return int(factors[0]) if len(factors) == 1 else ABSENT
