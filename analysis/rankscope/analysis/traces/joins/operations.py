"""The operations of a job's traces, for the graph of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.stats.robust import Ints, join_rows, take_rows
from rankscope.analysis.step_graph.clock_alignment import Clocks
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import MESSAGES, UNKNOWN, Group, Operations, since_issued
from rankscope.analysis.traces.communication.collectives import Collectives, read_operations
from rankscope.analysis.traces.joins.channels import Channel, identify_groups, peers_are_local
from rankscope.analysis.traces.joins.collective_matching import Matched
from rankscope.analysis.traces.joins.self_time import CommonSteps
from rankscope.analysis.traces.steps import NO_STEP
from rankscope.analysis.traces.trace import ABSENT, Trace


def job_operations(
    traces: Mapping[int, Trace],
    collectives: Mapping[int, Collectives],
    matched: Matched,
    clocks: Clocks,
    steps: CommonSteps,
) -> Operations:
    """Return the operations in the steps that ranks have in common; at least one rank has steps. The sequence of a
    collective is the number of its match; those that were not matched have one of their own."""
    identities = identify_groups(traces, collectives)
    is_local = peers_are_local(collectives, identities)
    members: dict[Channel, set[int]] = {}
    purposes: dict[Channel, str] = {}
    parts: list[Operations] = []
    unmatched = matched.count
    for rank in steps.windows:
        trace, rows = traces[rank], collectives[rank]
        channels = [identities[rank, index] for index in range(len(rows.groups))]
        for channel, group, purpose in zip(channels, rows.groups, rows.group_kinds, strict=True):
            members.setdefault(channel, set(channel.ranks)).add(rank)
            purposes.setdefault(channel, group.description if purpose is GroupKind.UNKNOWN else purpose.value)
        numbers = {channel: number for number, channel in enumerate(members)}
        of_group = np.array([numbers[channel] for channel in channels], dtype=np.int64)
        places, part = read_operations(trace, rows, [is_local[channel] for channel in channels])
        call = rows.call_row[places]
        called = np.where(call != ABSENT, trace.start_ns[call], part.start_ns)
        kind, sequence = _matches(matched, rank, rows, unmatched)
        unmatched += len(rows)
        is_message = np.isin(part.kind, MESSAGES) & (part.peer >= 0)
        part = replace(
            part,
            rank=np.full(len(places), rank),
            step=steps.at(rank, called, call != ABSENT),
            group=of_group[part.group],
            kind=np.where(is_message, part.kind, kind[places]),
            sequence=np.where(is_message, UNKNOWN, sequence[places]),
            start_ns=clocks.shifts[rank].common(part.start_ns + trace.base_ns),
            stop_ns=clocks.shifts[rank].common(part.stop_ns + trace.base_ns),
        )
        order = np.argsort(called, kind="stable")
        is_known = (part.step != NO_STEP) & (part.stop_ns > part.start_ns) & (rows.group_size[places] != 1)
        parts.append(take_rows(part, order[is_known[order]]))
    groups = tuple(
        Group(f"{channel.group} of {sorted(ranks)}", tuple(sorted(ranks)), purposes[channel])
        for channel, ranks in members.items()
    )
    operations = replace(join_rows(parts), groups=groups)
    return replace(operations, queued_ns=since_issued(operations.rank, operations.queued_ns))


def _matches(matched: Matched, rank: int, rows: Collectives, unmatched: int) -> tuple[Ints, Ints]:
    """Return the kind and the sequence of each row. Kinds of one collective may differ between traces."""
    mine = matched.calls.rank == rank
    numbers, places = matched.collective[mine], matched.calls.row[mine]
    kind, sequence = rows.kind.copy(), unmatched + np.arange(len(rows))
    kind[places], sequence[places] = matched.kind[numbers], numbers
    return kind, sequence
