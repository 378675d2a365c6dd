"""Matches the calls of different ranks that are the same collective: same group and sequence number, or, if the
profiler recorded no numbers, the same position in the order. External ids are never used: each rank counts its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.analysis.collective_kinds import LEFT_TOGETHER, CollectiveKind
from rankscope.analysis.stats.robust import (
    Bools,
    Ints,
    number_groups,
    occurrence,
    rows_of_groups,
    take_rows,
)
from rankscope.analysis.step_graph.clock_alignment import SharedEnds
from rankscope.analysis.step_graph.matching import match
from rankscope.analysis.step_graph.operations import MESSAGES, UNKNOWN, Group
from rankscope.analysis.traces.communication.collectives import POINT_TO_POINT
from rankscope.analysis.traces.joins.channels import Calls, Channel, alike_kind
from rankscope.analysis.traces.joins.shift_search import number_by_order

_ONE_GROUP = (Group("", ()),)


@dataclass(frozen=True)
class Matched:
    """The calls that met, sorted by meeting and rank."""

    everything: Calls  # also those that did not meet
    rows: Ints  # of `everything`
    collective: Ints  # number of the meeting of each, from 0
    notes: tuple[str, ...]

    @property
    def count(self) -> int:
        return int(self.collective.max(initial=-1)) + 1

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self.everything.channels

    @cached_property
    def calls(self) -> Calls:
        return take_rows(self.everything, self.rows)

    @cached_property
    def _first(self) -> Ints:
        return self.rows[np.searchsorted(self.collective, np.arange(self.count))]

    @property
    def channel(self) -> Ints:
        """Return the channel of each meeting."""
        return self.everything.channel[self._first]

    @property
    def kind(self) -> Ints:
        """Return the kind of each meeting: SEND_RECV for a message."""
        kind = self.everything.kind[self._first]
        return np.where(np.isin(kind, POINT_TO_POINT), int(CollectiveKind.SEND_RECV), kind)

    @property
    def together(self) -> Bools:
        """By meeting: all ranks leave it at the same time."""
        return np.asarray(np.isin(self.kind, LEFT_TOGETHER))

    @property
    def ends(self) -> SharedEnds:
        return SharedEnds(self.collective, self.calls.rank, self.calls.stop_ns, self.together[self.collective])

    @property
    def operations(self) -> Calls:
        """All operations, with the numbers of meetings as sequences. Messages that were not matched have none, so that
        their order may tell."""
        kind, is_message = self.everything.kind.copy(), np.isin(self.everything.kind, MESSAGES)
        sequence = np.where(is_message, UNKNOWN, self.count + np.arange(len(kind)))
        sequence[self.rows] = self.collective
        kind[self.rows] = np.where(is_message[self.rows], kind[self.rows], self.kind[self.collective])
        return replace(self.everything, sequence=sequence, kind=kind)

    def keep(self, collectives: Bools) -> Matched:
        """A selection of the meetings, renumbered."""
        members = collectives[self.collective]
        numbers = np.cumsum(collectives) - 1
        return replace(self, rows=self.rows[members], collective=numbers[self.collective[members]])


def match_calls(calls: Calls) -> Matched:
    """Gives a number to calls that have none, and matches all by their numbers."""
    notes: list[str] = []
    number = np.full(len(calls), UNKNOWN)
    noted = calls.sequence >= 0
    number[noted] = _number_noted(take_rows(calls, noted))
    unnoted = np.flatnonzero(~noted & (calls.channel >= 0))
    for members in rows_of_groups(*number_groups(calls.channel[unnoted])):
        rows = unnoted[members]
        found = number_by_order(take_rows(calls, rows), calls.channels[int(calls.channel[rows[0]])], notes)
        number[rows] = np.where(found >= 0, int(number.max()) + 1 + found, UNKNOWN)
    number[~_are_consistent(calls, number, notes)] = UNKNOWN
    sequence = np.where(number >= 0, number, int(number.max(initial=0)) + 1 + np.arange(len(calls)))
    # The numbers are of all groups together, and members may know a group or a kind by another name.
    alike = replace(calls, sequence=sequence, group=0 * calls.group, kind=alike_kind(calls.kind), groups=_ONE_GROUP)
    meeting = match(alike).number
    rows = np.flatnonzero(meeting >= 0)
    rows = rows[np.lexsort((calls.rank[rows], meeting[rows]))]
    return Matched(calls, rows, meeting[rows], tuple(notes))


def _number_noted(calls: Calls) -> Ints:
    """One number per (group, sequence). Coalesced calls share a sequence and are distinguished by kind and order."""
    kind = alike_kind(calls.kind)
    again = occurrence(number_groups(calls.channel, calls.sequence, kind, calls.rank)[0])
    return number_groups(calls.channel, calls.sequence, kind, again)[0]


def _are_consistent(calls: Calls, number: Ints, notes: list[str]) -> Bools:
    """Return false where a number stands for different collectives, or a group's name for several groups."""
    known = np.flatnonzero(number >= 0)
    of, count = number_groups(number[known])
    channel, token = np.zeros((2, count), dtype=np.int64)
    channel[of], token[of] = calls.channel[known], calls.token[known]
    size = np.bincount(of, minlength=count)
    alike = np.ones(count, dtype=bool)
    alike[of[calls.token[known] != token[of]]] = False
    limit = np.array([c.size for c in calls.channels], dtype=np.int64)[channel]
    crowded = (limit >= 0) & (size > limit)
    # One collective with too many members shows that the name is used by several groups: none of it can be trusted.
    shared = np.isin(channel, channel[crowded])
    most = np.zeros(len(calls.channels), dtype=np.int64)
    np.maximum.at(most, channel, size)
    for number_of in np.unique(channel[crowded]).tolist():
        which = calls.channels[number_of]
        notes.append(
            f"{which.label}: {int(most[number_of])} ranks use it but it has {which.size}; the name "
            "stands for several groups and the traces do not list their ranks; left out"
        )
    unlike = int(((size >= 2) & ~shared & ~alike).sum())
    if unlike:
        notes.append(f"{unlike} numbered collectives differ in kind or size between ranks; excluded")
    consistent = np.zeros(len(calls), dtype=bool)
    consistent[known] = (alike & ~shared)[of]
    return consistent
