"""Which process group each communication belongs to, and how many ranks that has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import ABSENT, ProcessGroup, Trace
from rankscope.analysis.traces.communication.calls import Noted
from rankscope.analysis.traces.communication.kinds import CollectiveKind


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
