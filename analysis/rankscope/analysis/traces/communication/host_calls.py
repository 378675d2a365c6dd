"""Communication calls on the host with the metadata that the profiler recorded, linked to the kernels that they
launched."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.collective_kinds import (
    CollectiveKind,
    annotated_backend,
    annotated_peer,
    element_bytes,
    kind_of_annotation,
    kind_of_host_operator,
    kind_of_kernel,
    kind_of_note,
)
from rankscope.analysis.stats.robust import Bools, Ints, join_rows, number_groups, take_rows
from rankscope.analysis.traces.intervals import Spans, nest
from rankscope.analysis.traces.kernels import Kind, classify
from rankscope.analysis.traces.steps import launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, match, take_or_absent

# With these backends the annotation is the transfer itself; NCCL's annotations only enqueue it.
_ON_HOST = frozenset({"gloo", "mpi"})
_POINT_TO_POINT = (CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV)
_UNSIZED = (CollectiveKind.COALESCED, CollectiveKind.SEND_RECV)


@dataclass(frozen=True)
class CallMetadata:
    """Metadata of communications as columns; -1 means not recorded."""

    kind: Ints
    group: Ints  # index into Trace.names
    group_description: Ints
    group_size: Ints
    sequence: Ints
    in_bytes: Ints
    out_bytes: Ints
    peer: Ints

    def take(self, index: Ints) -> CallMetadata:
        """Rows by index; -1 yields a row without metadata."""
        return CallMetadata(*(take_or_absent(column, index) for column in self.columns()))

    def filled_from(self, other: CallMetadata) -> CallMetadata:
        pairs = zip(self.columns(), other.columns(), strict=True)
        return CallMetadata(*(np.where(mine >= 0, mine, theirs) for mine, theirs in pairs))

    def columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class NameKinds:
    """Per entry of `Trace.names`, the kind that it stands for in each role; -1 for none."""

    kernel: Ints
    annotation: Ints
    host_operator: Ints
    note: Ints
    on_host: Bools
    peer: Ints
    element_bytes: Ints


@dataclass(frozen=True)
class Calls:
    spans: Spans  # operators and annotations of communication, nested
    leaf: Ints  # spans that enclose no other: the calls
    noted: CallMetadata  # per leaf
    on_host: Bools  # the leaf's span is the transfer itself


@dataclass(frozen=True)
class Transfers:
    """Unordered; -1 means unknown."""

    noted: CallMetadata
    start_ns: Ints
    end_ns: Ints
    kernel_row: Ints
    call_row: Ints
    calls: Ints
    stream: Ints
    measured: Bools

    def take(self, index: Ints) -> Transfers:
        return replace(take_rows(self, index), noted=self.noted.take(index))

    def joined_with(self, other: Transfers) -> Transfers:
        return replace(join_rows([self, other]), noted=join_rows([self.noted, other.noted]))


def name_kinds(trace: Trace) -> NameKinds:
    def column(values: list[CollectiveKind | int | None]) -> Ints:
        return np.array([ABSENT if value is None else int(value) for value in values], dtype=np.int64)

    names = trace.names
    return NameKinds(
        kernel=column([kind_of_kernel(name) for name in names]),
        annotation=column([kind_of_annotation(name) for name in names]),
        host_operator=column([kind_of_host_operator(name) for name in names]),
        note=column([kind_of_note(name) for name in names]),
        on_host=np.array([annotated_backend(name) in _ON_HOST for name in names], dtype=bool),
        peer=column([annotated_peer(name) for name in names]),
        element_bytes=column([element_bytes(name) for name in names]),
    )


def find_calls(trace: Trace, kinds: NameKinds) -> Calls:
    """All communication calls of the host, each once: an annotation inside a c10d event inside an operator is one
    call with the metadata of all three."""
    on_device = trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.GPU_ANNOTATION)
    annotation = take_or_absent(kinds.annotation, trace.name)
    operator = np.where(annotation >= 0, ABSENT, take_or_absent(kinds.host_operator, trace.name))
    noted_kind = np.full(len(trace), ABSENT)
    noted_kind[trace.collectives.row] = take_or_absent(kinds.note, trace.collectives.collective)
    kind_of_row = np.select([annotation >= 0, noted_kind >= 0], [annotation, noted_kind], operator)
    described = ~on_device & ((annotation >= 0) | (noted_kind >= 0))
    # Operators count as calls only if there is nothing more precise: gloo's annotations run next to them on another
    # thread.
    rows = np.flatnonzero(described if np.any(described) else ~on_device & (operator >= 0))
    outer_rows = np.flatnonzero(~on_device & ~described & (operator >= 0)) if np.any(described) else rows[:0]
    spans = nest(trace, np.concatenate([rows, outer_rows]))
    is_call = np.isin(spans.row, rows)
    children = np.bincount(spans.parent[is_call & (spans.parent >= 0)], minlength=len(spans.row))
    leaf = np.flatnonzero(is_call & (children == 0))
    everything = read_metadata(trace, kinds, spans.row)
    noted = everything.take(leaf)
    around = spans.parent[leaf]
    for _ in range(3):
        # A span around several calls describes their sum, not one of them.
        alone = np.where(take_or_absent(children, around) <= 1, around, ABSENT)
        noted = noted.filled_from(everything.take(alone))
        around = take_or_absent(spans.parent, around)
    own_kind = kind_of_row[spans.row]
    # The annotation's own name is what ran (gloo implements a reduce-scatter by an all-reduce), if it has a kind.
    has_kind = (annotation[spans.row[leaf]] >= 0) & (own_kind[leaf] != CollectiveKind.COALESCED)
    best = np.where(has_kind, own_kind[leaf], noted.kind)
    peer = kinds.peer[trace.name[spans.row[leaf]]]
    noted = replace(
        noted,
        kind=np.where(best >= 0, best, own_kind[leaf]),
        peer=np.where(noted.peer >= 0, noted.peer, peer),
    )
    noted = _with_batched_messages(noted, take_or_absent(spans.thread_of_row, spans.row[leaf]))
    return Calls(spans, leaf, noted, kinds.on_host[trace.name[spans.row[leaf]]])


def _with_batched_messages(noted: CallMetadata, thread: Ints) -> CallMetadata:
    """torch sends and receives a batch of messages in one call after theirs, which names no group: it has that of the
    messages before it, and their peer if there is one only."""
    is_message = np.isin(noted.kind, _POINT_TO_POINT)
    batches = np.flatnonzero((noted.kind == CollectiveKind.COALESCED) & (noted.group < 0))
    apart = np.concatenate([[True], (thread[1:] != thread[:-1]) | ~is_message[:-1] | ~is_message[1:]])[: len(thread)]
    begin = np.maximum.accumulate(np.where(apart, np.arange(len(thread)), 0))
    batches = batches[batches > 0]
    batches = batches[is_message[batches - 1] & (thread[batches - 1] == thread[batches])]
    first, last = begin[batches - 1], batches
    messages = _sum_up(noted, first, last)
    batches, messages = batches[messages.group >= 0], messages.take(np.flatnonzero(messages.group >= 0))
    columns = [column.copy() for column in noted.columns()]
    for column, of_batch in zip(columns, messages.columns(), strict=True):
        column[batches] = of_batch
    columns[0][batches] = CollectiveKind.SEND_RECV
    return replace(CallMetadata(*columns), sequence=noted.sequence)


def find_transfers(trace: Trace, kinds: NameKinds, calls: Calls) -> Transfers:
    kernels, served = _kernel_transfers(trace, kinds, calls)
    return kernels.joined_with(_transfers_without_kernel(trace, calls, served))


def read_metadata(trace: Trace, kinds: NameKinds, rows: Ints) -> CallMetadata:
    """The metadata of these rows themselves."""
    columns = trace.collectives
    note_of_row = np.full(len(trace), ABSENT)
    note_of_row[columns.row] = np.arange(len(columns.row))
    width = take_or_absent(kinds.element_bytes, columns.element_type)

    def in_bytes(elements: Ints) -> Ints:
        return np.where((elements >= 0) & (width > 0), elements * width, ABSENT)

    everything = CallMetadata(
        kind=take_or_absent(kinds.note, columns.collective),
        group=columns.group,
        group_description=columns.group_description,
        group_size=columns.group_size,
        sequence=columns.sequence,
        in_bytes=in_bytes(columns.in_elements),
        out_bytes=in_bytes(columns.out_elements),
        peer=columns.peer,
    )
    return everything.take(note_of_row[rows])


def _kernel_transfers(trace: Trace, kinds: NameKinds, calls: Calls) -> tuple[Transfers, Bools]:
    """One row per kernel, or per run of kernels that one call launched on one stream; and which calls they served."""
    rows = np.flatnonzero(trace.of(Category.KERNEL) & (classify(trace) == Kind.COMMUNICATION))
    span = _launching_span(trace, calls, rows)
    # A kernel without a span stays alone, under its own number.
    alone = np.where(span >= 0, ABSENT, np.arange(len(rows)))
    transfer, count = number_groups(span, alone, trace.stream[rows], trace.device[rows])
    first = np.full(count, len(trace))
    np.minimum.at(first, transfer, rows)  # rows are sorted by start
    end = np.zeros(count, dtype=np.int64)
    np.maximum.at(end, transfer, trace.end_ns[rows])
    span_of = np.full(count, ABSENT)
    span_of[transfer] = span
    low, high = _calls_within(calls, span_of)
    asked = _sum_up(calls.noted, low, high)
    on_kernel = read_metadata(trace, kinds, first)
    own = replace(on_kernel, kind=np.where(on_kernel.kind >= 0, on_kernel.kind, ABSENT))
    # A kernel carries the metadata of one call: with several calls, only their sum is its size.
    single = high - low <= 1
    noted = (
        own.take(np.where(single, np.arange(count), ABSENT))
        .filled_from(asked)
        .filled_from(replace(own, in_bytes=np.full(count, ABSENT), out_bytes=np.full(count, ABSENT)))
    )
    host_kind = np.where(single & (on_kernel.kind >= 0), on_kernel.kind, asked.kind)
    kind = np.where(host_kind >= 0, host_kind, take_or_absent(kinds.kernel, trace.name[first]))
    unsized = np.isin(kind, _UNSIZED)
    noted = replace(
        noted,
        kind=kind,
        in_bytes=np.where(unsized, ABSENT, noted.in_bytes),
        out_bytes=np.where(unsized, ABSENT, noted.out_bytes),
    )
    served = np.zeros(len(calls.leaf) + 1, dtype=np.int64)
    np.add.at(served, low, 1)
    np.add.at(served, high, -1)
    call = take_or_absent(
        calls.spans.row, np.where(single, take_or_absent(calls.leaf, np.where(high > low, low, ABSENT)), span_of)
    )
    transfers = Transfers(
        noted, trace.start_ns[first], end, first, call, high - low, trace.stream[first], np.ones(count, dtype=bool)
    )
    return transfers, np.cumsum(served)[:-1] > 0


def _launching_span(trace: Trace, calls: Calls, rows: Ints) -> Ints:
    """The innermost communication span around the runtime call that launched each kernel. Without such a call, the
    span with the same external id, which is unique within one rank."""
    launch = launch_rows(trace)[rows]
    span = np.full(len(rows), ABSENT)
    found = launch >= 0
    span[found] = calls.spans.around(launch[found], trace.start_ns[launch[found]])
    # Old traces repeat the correlation as external id.
    external = np.where(trace.external_id[rows] != trace.correlation[rows], trace.external_id[rows], ABSENT)
    by_id = match(external, trace.external_id[calls.spans.row], np.arange(len(calls.spans.row)))
    return np.where(found, span, by_id)


def _calls_within(calls: Calls, span: Ints) -> tuple[Ints, Ints]:
    """The range of calls inside each span."""
    spans = calls.spans
    keys = spans.key[calls.leaf]
    low = np.searchsorted(keys, take_or_absent(spans.key, span), side="left")
    ends = take_or_absent(spans.key_at(spans.row, spans.end_ns), span)
    high = np.searchsorted(keys, ends, side="right")
    return np.where(span >= 0, low, 0), np.where(span >= 0, high, 0)


def _sum_up(noted: CallMetadata, low: Ints, high: Ints) -> CallMetadata:
    """The combined metadata of each range of calls: bytes are summed; everything else must be equal in all of them."""

    def common(column: Ints) -> Ints:
        if not len(column):
            return np.full(len(low), ABSENT)
        changes = np.concatenate([[0], np.cumsum(column[1:] != column[:-1])])
        last = np.maximum(high - 1, 0)
        return np.where((high > low) & (changes[last] == changes[np.minimum(low, last)]), column[last], ABSENT)

    def total(column: Ints) -> Ints:
        sums = np.concatenate([[0], np.cumsum(np.maximum(column, 0))])
        unknown = np.concatenate([[0], np.cumsum(column < 0)])
        return np.where((high > low) & (unknown[high] == unknown[low]), sums[high] - sums[low], ABSENT)

    point_to_point = np.concatenate([[0], np.cumsum(~np.isin(noted.kind, _POINT_TO_POINT))])
    mixed = np.where(point_to_point[high] == point_to_point[low], CollectiveKind.SEND_RECV, CollectiveKind.COALESCED)
    made = CallMetadata(*map(common, noted.columns()))
    return replace(
        made,
        kind=np.where((made.kind < 0) & (high > low), mixed, made.kind),
        in_bytes=total(noted.in_bytes),
        out_bytes=total(noted.out_bytes),
    )


def _transfers_without_kernel(trace: Trace, calls: Calls, served: Bools) -> Transfers:
    chosen = np.flatnonzero(calls.on_host | ~served)
    span, on_host = calls.leaf[chosen], calls.on_host[chosen]
    rows = calls.spans.row[span]
    noted = calls.noted.take(chosen)
    copied = _bytes_copied_back(trace, calls)[span]
    unknown = on_host & (noted.in_bytes < 0) & (noted.out_bytes < 0)
    noted = replace(noted, out_bytes=np.where(unknown & (copied > 0), copied, noted.out_bytes))
    start = trace.start_ns[rows]
    return Transfers(
        noted=noted,
        start_ns=start,
        end_ns=np.where(on_host, trace.end_ns[rows], start),
        kernel_row=np.full(len(rows), ABSENT),
        call_row=rows,
        calls=np.ones(len(rows), dtype=np.int64),
        stream=np.full(len(rows), ABSENT),
        measured=on_host,
    )


def _bytes_copied_back(trace: Trace, calls: Calls) -> Ints:
    """Bytes copied to the device from within each span: gloo copies its result back to a GPU tensor this way.
    Without recorded shapes it is the only evidence of the size."""
    to_device = np.array(["HtoD" in name or "Host -> Device" in name for name in trace.names], dtype=bool)
    copies = np.flatnonzero(trace.of(Category.MEMCPY) & (trace.size_bytes > 0))
    copies = copies[to_device[trace.name[copies]]]
    launch = launch_rows(trace)[copies]
    copies, launch = copies[launch >= 0], launch[launch >= 0]
    span = calls.spans.around(launch, trace.start_ns[launch])
    copied = np.zeros(len(calls.spans.row), dtype=np.int64)
    np.add.at(copied, span[span >= 0], trace.size_bytes[copies[span >= 0]])
    return copied
