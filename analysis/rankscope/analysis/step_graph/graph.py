"""The graph of steps: an operation starts after the operation before it on its rank and the rank's own work, and ends
after the last of the ranks that it meets has arrived.

Each row has two times. `own_ns`, the rank's own work, is from the end of the operation before it to its start.
`transfer_ns` is from the arrival of the last rank to its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.analysis.collective_kinds import LEFT_TOGETHER, CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, order_by_group, rows_of_groups
from rankscope.analysis.step_graph.clock_alignment import SharedEnds, align
from rankscope.analysis.step_graph.matching import Meetings, match
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations

# The ends of some tens of collectives of each group show the clocks of a large job as well as all of them.
MANY_ENDS = 1 << 14
ENDS_OF_GROUP = 24


@dataclass(frozen=True)
class StepGraph:
    operations: Operations
    meetings: Meetings
    before: Ints  # the row that ended last on the rank before this one starts; UNKNOWN after a pause of recording
    waits: Bools  # whether the row ends only after all that it meets have arrived
    last: Ints  # the row that arrived last, if this one waits; else itself
    own_ns: Ints  # 0 where nothing precedes
    transfer_ns: Ints  # from the last arrival, also of ranks that are not in the graph

    @cached_property
    def host_ns(self) -> Ints:
        """The part of own work before the host issued the operation: a device that is late has it issued in time."""
        return np.asarray(np.clip(self.own_ns - self.operations.queued_ns, 0, self.own_ns))

    @classmethod
    def build(cls, operations: Operations, outside_ns: Ints | None = None) -> StepGraph:
        """`outside_ns`: of each row, from the last arrival of a rank that is not there to the end."""
        meetings = match(operations)
        operations = _on_one_clock(operations, meetings)
        operations = _received_after_sent(operations, meetings)
        waits, last = _last_to_arrive(operations, meetings)
        before = _before(operations, meetings.stretch, operations.start_ns[last])
        own = np.where(before >= 0, operations.start_ns - operations.stop_ns[before], 0)
        transfer = operations.stop_ns - operations.start_ns[last]
        transfer = transfer if outside_ns is None else np.minimum(transfer, outside_ns)
        return cls(operations, meetings, before, waits, last, own, transfer)

    def __len__(self) -> int:
        return len(self.operations)

    def path(self) -> Ints:
        """The critical path of every stretch, from its end: the transfer of each row, then the own work of the row that
        arrived last there, and so on."""
        parent = self.before[self.last].tolist()
        path: list[int] = []
        for rows in rows_of_groups(self.meetings.stretch, int(self.meetings.stretch.max(initial=-1)) + 1):
            row = int(rows[np.argmax(self.operations.stop_ns[rows])])
            for _ in range(len(rows)):  # times that contradict each other may go in a circle
                path.append(row)
                row = parent[row]
                if row < 0:
                    break
        return np.array(path, dtype=np.int64)

    def replay(self, own_ns: Ints, transfer_ns: Ints | None = None) -> Ints:
        """The end of each operation with other times of own work, a column for each replay. Transfers take as long as
        they did where no other times are given, a column for each replay too."""
        starts = np.repeat(self.operations.start_ns[:, None], own_ns.shape[1], axis=1)
        stops = np.repeat(self.operations.stop_ns[:, None], own_ns.shape[1], axis=1)
        transfer_ns = self.transfer_ns[:, None] if transfer_ns is None else transfer_ns
        met, waits, is_met = self.meetings.number, self.waits, self.meetings.number >= 0
        missing = np.bincount(met[is_met], minlength=self.meetings.count)
        ready = np.flatnonzero(self.before < 0)
        while len(ready):
            over = ready[~waits[ready]]
            if len(over):
                stops[over] = starts[over] + transfer_ns[over]
            arriving = met[ready[is_met[ready]]]
            np.subtract.at(missing, arriving, 1)
            complete = np.sort(arriving[missing[arriving] == 0])
            complete = complete[_is_first(complete)]
            together, waiting = self._waiting.rows(complete)
            if len(together):
                members, sizes = self._members.rows(complete)
                arrived = np.maximum.reduceat(starts[members], np.cumsum(sizes) - sizes, axis=0)
                stops[together] = np.repeat(arrived, waiting, axis=0) + transfer_ns[together]
                over = np.concatenate([over, together]) if len(over) else together
            ready, _ = self._after.rows(over)
            starts[ready] = stops[self.before[ready]] + own_ns[ready]
        return stops

    @cached_property
    def _members(self) -> _Index:
        return _Index.build(self.meetings.number, self.meetings.count)

    @cached_property
    def _waiting(self) -> _Index:
        return _Index.build(np.where(self.waits, self.meetings.number, UNKNOWN), self.meetings.count)

    @cached_property
    def _after(self) -> _Index:
        return _Index.build(self.before, len(self))


@dataclass(frozen=True)
class _Index:
    """The rows that have a number."""

    order: Ints
    begin: Ints
    places: Ints  # 0, 1, 2, …

    @classmethod
    def build(cls, number: Ints, count: int) -> _Index:
        order = order_by_group(number, count)
        return cls(order, np.searchsorted(number[order], np.arange(count + 1)), np.arange(len(number)))

    def rows(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the rows of all numbers, and how many each has."""
        begin = self.begin[numbers]
        size = self.begin[numbers + 1] - begin
        end = np.cumsum(size)
        place = np.repeat(begin - end + size, size)
        place += self.places[: len(place)]
        return self.order[place], size


def _is_first(ordered: Ints) -> Bools:
    is_first = np.ones(len(ordered), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return is_first


def _on_one_clock(operations: Operations, meetings: Meetings) -> Operations:
    """Clocks of GPUs and nodes differ. Ranks that meet in a collective leave together, by any clock. Ranks without a
    collective in common keep their clocks: the recorded ends of messages are not exact."""
    together = np.flatnonzero((meetings.number >= 0) & np.isin(operations.kind, LEFT_TOGETHER))
    if len(together) > MANY_ENDS:
        together = together[_is_one_of_few(operations.group[together], meetings.number[together])]
    ranks, ends_ns = operations.rank[together], operations.stop_ns[together]
    ends = SharedEnds(meetings.number[together], ranks, ends_ns, np.ones(len(together), dtype=bool))
    clocks = align(ends, operations.ranks)
    start, stop = (clocks.common(operations.rank, time) for time in (operations.start_ns, operations.stop_ns))
    return replace(operations, start_ns=start, stop_ns=np.maximum(stop, start + 1))


def _is_one_of_few(group: Ints, meeting: Ints) -> Bools:
    """Return whether each meeting is one of some tens of its group. Meetings of a group have numbers in a row."""
    first, last = (np.full(int(group.max()) + 1, extreme) for extreme in (np.iinfo(np.int64).max, -1))
    np.minimum.at(first, group, meeting)
    np.maximum.at(last, group, meeting)
    stride = np.maximum((last - first) // ENDS_OF_GROUP, 1)
    return np.asarray((meeting - first[group]) % stride[group] == 0)


def _received_after_sent(operations: Operations, meetings: Meetings) -> Operations:
    """A rank sends and receives in one kernel, and NCCL records for both when the first of the two is over. What it
    receives cannot be there before the other rank sends it."""
    stop = operations.stop_ns.copy()
    sent = np.full(meetings.count, np.iinfo(np.int64).min)
    left = sent.copy()
    is_send = (operations.kind == CollectiveKind.SEND) & (meetings.number >= 0)
    sent[meetings.number[is_send]] = operations.start_ns[is_send]
    left[meetings.number[is_send]] = operations.stop_ns[is_send]
    received = np.flatnonzero((operations.kind == CollectiveKind.RECV) & (meetings.number >= 0))
    number = meetings.number[received]
    early = stop[received] < sent[number]
    stop[received[early]] = left[number[early]]
    return replace(operations, stop_ns=stop)


def _last_to_arrive(operations: Operations, meetings: Meetings) -> tuple[Bools, Ints]:
    met = np.flatnonzero(meetings.number >= 0)
    by_start = met[np.argsort(operations.start_ns[met], kind="stable")]
    last_of = np.zeros(meetings.count, dtype=np.int64)
    last_of[meetings.number[by_start]] = by_start  # the latest is written last
    waits, last = np.zeros(len(operations), dtype=bool), np.arange(len(operations))
    arrived = last_of[meetings.number[met]]
    # A root that only sends leaves before the others arrive.
    waits[met] = operations.stop_ns[met] >= operations.start_ns[arrived]
    last[met] = np.where(waits[met], arrived, met)
    return waits, last


def _before(operations: Operations, stretch: Ints, arrived_ns: Ints) -> Ints:
    """Return the row before each. Several messages in one kernel end together: the one whose other rank arrived last
    counts."""
    count = len(operations)
    place, places = number_groups(operations.rank, stretch)
    is_start = np.repeat([False, True], count)
    by_arrival = np.argsort(arrived_ns, kind="stable")
    # A row that ends when another starts is before it.
    rows = np.concatenate([by_arrival, by_arrival + count])
    times = np.concatenate([operations.stop_ns, operations.start_ns])
    by_time = rows[np.argsort(times[rows], kind="stable")]
    order = by_time[order_by_group(np.tile(place, 2)[by_time], places)]
    ended = np.maximum.accumulate(np.where(is_start[order], UNKNOWN, np.arange(2 * count)))
    before = np.full(count, UNKNOWN, dtype=np.int64)
    started = is_start[order]
    rows = order[started] - count
    known = ended[started] >= 0
    before[rows[known]] = order[ended[started][known]]
    before[(before >= 0) & (place[before] != place)] = UNKNOWN
    return before
