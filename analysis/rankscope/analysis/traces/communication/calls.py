"""The host's side of communication: which calls were made, and what the profiler noted about them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import ABSENT, Category, Trace
from rankscope.analysis.traces.communication.bandwidth import element_bytes
from rankscope.analysis.traces.communication.kinds import (
    CollectiveKind,
    annotated_backend,
    annotated_peer,
    kind_of_annotation,
    kind_of_host_operator,
    kind_of_kernel,
    kind_of_note,
)
from rankscope.analysis.traces.nesting import Spans, nest

# On the host's own threads these run the transfer itself; NCCL's annotations only enqueue it.
_ON_HOST = frozenset({"gloo", "mpi"})


@dataclass(frozen=True)
class Noted:
    """What is known of some communications, a column each; -1 is "not noted"."""

    kind: Ints
    group: Ints  # index into Trace.names
    group_description: Ints
    group_size: Ints
    sequence: Ints
    in_bytes: Ints
    out_bytes: Ints
    peer: Ints

    def take(self, index: Ints) -> Noted:
        """Rows by index; -1 takes a row of which nothing is known."""
        return Noted(*(taken(column, index) for column in self.columns()))

    def or_else(self, other: Noted) -> Noted:
        pairs = zip(self.columns(), other.columns(), strict=True)
        return Noted(*(np.where(mine >= 0, mine, theirs) for mine, theirs in pairs))

    def columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class NameKinds:
    """The kind that each of `Trace.names` would stand for in each place, -1 for none."""

    kernel: Ints
    annotation: Ints
    host_operator: Ints
    note: Ints
    on_host: Bools
    peer: Ints
    element_bytes: Ints


@dataclass(frozen=True)
class Calls:
    spans: Spans  # operators, notes and annotations of communication, nested
    own_kind: Ints  # of each span
    leaf: Ints  # spans without such a span inside: the calls
    noted: Noted  # of each leaf
    on_host: Bools  # the leaf's span is the transfer itself


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


def read_notes(trace: Trace, kinds: NameKinds, rows: Ints) -> Noted:
    """What the profiler noted on these rows themselves."""
    columns = trace.collectives
    note_of_row = np.full(len(trace), ABSENT)
    note_of_row[columns.row] = np.arange(len(columns.row))
    width = taken(kinds.element_bytes, columns.element_type)

    def in_bytes(elements: Ints) -> Ints:
        return np.where((elements >= 0) & (width > 0), elements * width, ABSENT)

    everything = Noted(
        kind=taken(kinds.note, columns.collective),
        group=columns.group,
        group_description=columns.group_description,
        group_size=columns.group_size,
        sequence=columns.sequence,
        in_bytes=in_bytes(columns.in_elements),
        out_bytes=in_bytes(columns.out_elements),
        peer=columns.peer,
    )
    return everything.take(note_of_row[rows])


def find_calls(trace: Trace, kinds: NameKinds) -> Calls:
    """Every communication the host asked for, once: an annotation inside a note inside an operator is one call, and
    knows what all three say."""
    on_device = trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.SYNC, Category.GPU_ANNOTATION)
    annotation = taken(kinds.annotation, trace.name)
    operator = np.where(annotation >= 0, ABSENT, taken(kinds.host_operator, trace.name))
    noted_kind = np.full(len(trace), ABSENT)
    noted_kind[trace.collectives.row] = taken(kinds.note, trace.collectives.collective)
    kind_of_row = np.select([annotation >= 0, noted_kind >= 0], [annotation, noted_kind], operator)
    speaking = ~on_device & ((annotation >= 0) | (noted_kind >= 0))
    # Operators alone are calls only where nothing says it better: gloo's run beside them on a thread of its own.
    rows = np.flatnonzero(speaking if np.any(speaking) else ~on_device & (operator >= 0))
    outer_rows = np.flatnonzero(~on_device & ~speaking & (operator >= 0)) if np.any(speaking) else rows[:0]
    spans = nest(trace, np.concatenate([rows, outer_rows]))
    is_call = np.isin(spans.row, rows)
    children = np.bincount(spans.parent[is_call & (spans.parent >= 0)], minlength=len(spans.row))
    leaf = np.flatnonzero(is_call & (children == 0))
    everything = read_notes(trace, kinds, spans.row)
    noted = everything.take(leaf)
    around = spans.parent[leaf]
    for _ in range(3):
        # What surrounds several calls sums them up; it says nothing about one of them.
        alone = np.where(taken(children, around) <= 1, around, ABSENT)
        noted = noted.or_else(everything.take(alone))
        around = taken(spans.parent, around)
    own_kind = kind_of_row[spans.row]
    # The annotation's own name is what ran (gloo builds a reduce-scatter from an all-reduce) if it says anything.
    says = (annotation[spans.row[leaf]] >= 0) & (own_kind[leaf] != CollectiveKind.COALESCED)
    best = np.where(says, own_kind[leaf], noted.kind)
    peer = kinds.peer[trace.name[spans.row[leaf]]]
    noted = replace(
        noted,
        kind=np.where(best >= 0, best, own_kind[leaf]),
        peer=np.where(noted.peer >= 0, noted.peer, peer),
    )
    return Calls(spans, own_kind, leaf, noted, kinds.on_host[trace.name[spans.row[leaf]]])


def taken(column: Ints, index: Ints) -> Ints:
    """The column by index, -1 where the index is -1."""
    if not len(column):
        return np.full(len(index), ABSENT)
    return np.where(index >= 0, column[index], ABSENT)
