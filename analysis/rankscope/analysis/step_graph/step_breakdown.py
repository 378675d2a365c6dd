"""Splits a step into parts on the critical path that add up to it, and sums up the transfers of each kind of group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rankscope.analysis.quantities import count, quantity
from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.analysis.step_graph.window_parts import KINDS, MAX_STAGES, WindowParts

# A rank that moves fewer bytes in a step has no bandwidth: times do not depend on sizes there.
MIN_BANDWIDTH_BYTES = 1 << 16

OWN, EXCESS, BUBBLE, COMMUNICATION, UNACCOUNTED = "own", "excess", "bubble", "communication", "unaccounted"
PARTS = (OWN, EXCESS, BUBBLE, COMMUNICATION, UNACCOUNTED)
GROUP_KINDS = tuple(kind.value for kind in KINDS)


@dataclass(frozen=True)
class StepPart:
    part: str  # of PARTS
    seconds: float
    stage: int | None = None  # of own work, where there are several
    group_kind: str = ""  # of communication


@dataclass(frozen=True)
class Traffic:
    """Transfers of the groups of one kind in a step, on the path or beside it: the mean of their ranks. A message
    counts at its receiver."""

    group_kind: str
    groups: int
    min_ranks: int  # of a group
    max_ranks: int
    bytes: float  # sizes of arrays, as nccl-tests count them
    transfer_seconds: float  # after the last rank has arrived
    bus_bytes_per_second: float | None


@dataclass(frozen=True)
class TrafficTotal:
    """Since the job's first steps, for a rank in such groups. Steps that were not looked at count as those before."""

    bytes: float = 0.0
    transfer_seconds: float = 0.0
    exposed_seconds: float = 0.0  # on the path


@dataclass(frozen=True)
class StepBreakdown:
    parts: tuple[StepPart, ...]
    traffic: tuple[Traffic, ...]
    steps: int  # of which these are the means
    totals: Mapping[str, TrafficTotal] = field(default_factory=dict)  # by kind of group, while a job runs

    @property
    def step_seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def exposed_ratio(self) -> float:
        """The share of the step that is communication which no work hides."""
        exposed = sum(part.seconds for part in self.parts if part.part == COMMUNICATION)
        return exposed / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def has_excess(self) -> bool:
        return any(part.part == EXCESS for part in self.parts)


class Row(NamedTuple):
    """A part for people."""

    part: str
    name: str
    seconds: float
    ratio: float  # of the step
    details: str


def rows(breakdown: StepBreakdown, culprits: str) -> Iterator[Row]:
    """`culprits`: who has the excess, as `rank 2`."""
    total = breakdown.step_seconds
    traffic = {each.group_kind: each for each in breakdown.traffic}
    for part in breakdown.parts:
        details = _details(traffic[part.group_kind]) if part.group_kind in traffic else ""
        yield Row(part.part, _name(part, culprits), part.seconds, part.seconds / total if total > 0 else 0.0, details)


def _name(part: StepPart, culprits: str) -> str:
    if part.part == OWN:
        return "own work" if part.stage is None else f"own work of stage {part.stage}"
    return {
        EXCESS: f"excess of {culprits}",
        BUBBLE: "pipeline bubble",
        COMMUNICATION: f"{part.group_kind} communication",
    }.get(part.part, "not accounted for")


def _details(traffic: Traffic) -> str:
    ranks = f"{traffic.min_ranks} to {traffic.max_ranks} ranks"
    if traffic.min_ranks == traffic.max_ranks:
        ranks = count(traffic.max_ranks, "rank")
    bandwidth = traffic.bus_bytes_per_second
    rate = f" at {quantity(bandwidth, 'B/s')}" if bandwidth is not None else ""
    return f"{count(traffic.groups, 'group')} of {ranks}, {quantity(traffic.bytes, 'B')}{rate}"


def summarize(windows: Sequence[WindowParts], culprits: Collection[int], ranks: Sequence[int]) -> StepBreakdown | None:
    """The mean step of windows of the same `ranks`. The excess of the culprits is a part of its own."""
    steps = sum(window.steps for window in windows)
    if not steps:
        return None
    is_culprit = np.isin(np.array(ranks), list(culprits))
    own = np.zeros(len(ranks))
    excess = bubble = 0.0
    for window in windows:
        beyond = np.where(is_culprit, window.excess_ns, 0.0)
        rest = window.own_ns - beyond
        idle = window.idle_ns * rest / np.maximum(window.own_ns, 1.0)
        most = window.bubble_ratio * rest.sum()
        idle *= min(1.0, most / max(float(idle.sum()), 1.0))
        own += np.maximum(rest - idle, 0.0)
        excess, bubble = excess + float(beyond.sum()), bubble + float(idle.sum())
    path_ns = np.sum([window.path_ns for window in windows], axis=0)
    left_ns = sum(window.total_ns for window in windows) - own.sum() - excess - bubble - path_ns.sum()
    split = [
        *((OWN, stage, "", nanoseconds) for stage, nanoseconds in _by_stage(own, windows[-1].stages)),
        (EXCESS, None, "", excess),
        (BUBBLE, None, "", bubble),
        *((COMMUNICATION, None, kind, each) for kind, each in zip(GROUP_KINDS, path_ns.tolist(), strict=True)),
        (UNACCOUNTED, None, "", left_ns),
    ]
    parts = (
        StepPart(part, float(nanoseconds) / steps / 1e9, stage, kind)
        for part, stage, kind, nanoseconds in split
        if nanoseconds >= 1 or stage is not None
    )
    return StepBreakdown(tuple(parts), _mean_traffic(windows, steps), steps)


def _by_stage(own_ns: Floats, stages: Ints) -> list[tuple[int | None, float]]:
    sums = np.bincount(stages, own_ns).tolist()
    return [*enumerate(sums)] if 1 < len(sums) <= MAX_STAGES else [(None, sum(sums))]


def _mean_traffic(windows: Sequence[WindowParts], steps: int) -> tuple[Traffic, ...]:
    columns = [np.stack(column) for column in zip(*(window.traffic for window in windows), strict=True)]
    nanoseconds, size, bus = (column.sum(axis=0) for column in columns[:3])
    # Windows differ in the groups that they use.
    members, groups, smallest, largest = (column.max(axis=0) for column in columns[3:])
    has_rate = (size >= MIN_BANDWIDTH_BYTES * steps * members) & (bus > 0) & (nanoseconds > 0)
    return tuple(
        Traffic(
            kind.value,
            int(groups[number]),
            int(smallest[number]),
            int(largest[number]),
            float(size[number] / members[number]) / steps,
            float(nanoseconds[number] / members[number]) / steps / 1e9,
            1e9 * float(bus[number] / nanoseconds[number]) if has_rate[number] else None,
        )
        for number, kind in enumerate(KINDS)
        if members[number]
    )


def add_traffic(totals: Mapping[str, TrafficTotal], breakdown: StepBreakdown, steps: int) -> Mapping[str, TrafficTotal]:
    """The totals after so many more steps like these."""
    exposed = {part.group_kind: part.seconds for part in breakdown.parts}
    grown = dict(totals)
    for each in breakdown.traffic:
        before = totals.get(each.group_kind, TrafficTotal())
        grown[each.group_kind] = TrafficTotal(
            before.bytes + steps * each.bytes,
            before.transfer_seconds + steps * each.transfer_seconds,
            before.exposed_seconds + steps * exposed.get(each.group_kind, 0.0),
        )
    return grown
