"""The graph of steps: an operation starts after the operation before it on its rank and the rank's own work, and ends
after the last of the ranks that it meets has arrived.

Each row has two times. `own_ns`, the rank's own work, is from the end of the operation before it to its start.
`transfer_ns` is from the arrival of the last rank to its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.analysis.collective_kinds import LEFT_TOGETHER, CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
from rankscope.analysis.step_graph.clock_alignment import SharedEnds, align
from rankscope.analysis.step_graph.matching import Meetings, match
from rankscope.analysis.step_graph.operations import UNKNOWN, Operations


@dataclass(frozen=True)
class StepGraph:
    operations: Operations
    meetings: Meetings
    before: Ints  # the row that ended last on the rank before this one starts; UNKNOWN after a pause of recording
    waits: Bools  # whether the row ends only after all that it meets have arrived
    last: Ints  # the row that arrived last, if this one waits; else itself
    own_ns: Ints  # 0 where nothing precedes
    transfer_ns: Ints

    @cached_property
    def host_ns(self) -> Ints:
        """The part of own work before the host issued the operation: a device that is late has it issued in time."""
        return np.asarray(np.clip(self.own_ns - self.operations.queued_ns, 0, self.own_ns))

    @classmethod
    def build(cls, operations: Operations) -> StepGraph:
        meetings = match(operations)
        operations = _on_one_clock(operations, meetings)
        operations = _received_after_sent(operations, meetings)
        waits, last = _last_to_arrive(operations, meetings)
        before = _before(operations, meetings.stretch, operations.start_ns[last])
        own = np.where(before >= 0, operations.start_ns - operations.stop_ns[before], 0)
        return cls(operations, meetings, before, waits, last, own, operations.stop_ns - operations.start_ns[last])

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
        met, waits = self.meetings.number, self.waits
        missing = np.bincount(met[met >= 0], minlength=self.meetings.count)
        ready = np.flatnonzero(self.before < 0)
        while len(ready):
            alone = ready[~waits[ready]]
            stops[alone] = starts[alone] + transfer_ns[alone]
            arriving = met[ready]
            arriving = arriving[arriving >= 0]
            np.subtract.at(missing, arriving, 1)
            complete = np.unique(arriving)
            complete = complete[missing[complete] == 0]
            together = self._waiting.rows(complete)
            if len(together):
                members = self._members
                arrived = np.maximum.reduceat(starts[members.rows(complete)], members.borders(complete), axis=0)
                stops[together] = arrived[np.searchsorted(complete, met[together])] + transfer_ns[together]
            ready = self._after.rows(np.concatenate([alone, together]))
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

    @classmethod
    def build(cls, number: Ints, count: int) -> _Index:
        order = np.argsort(number, kind="stable")
        return cls(order, np.searchsorted(number[order], np.arange(count + 1)))

    def rows(self, numbers: Ints) -> Ints:
        begin, size = self.begin[numbers], self.begin[numbers + 1] - self.begin[numbers]
        before = np.cumsum(size) - size
        return self.order[np.repeat(begin - before, size) + np.arange(int(size.sum()))]

    def borders(self, numbers: Ints) -> Ints:
        """The places in `rows` at which the rows of each number begin."""
        size = self.begin[numbers + 1] - self.begin[numbers]
        return np.asarray(np.cumsum(size) - size)


def _on_one_clock(operations: Operations, meetings: Meetings) -> Operations:
    """Clocks of GPUs and nodes differ. Ranks that meet in a collective leave together, by any clock. Ranks without a
    collective in common keep their clocks: the recorded ends of messages are not exact."""
    together = np.flatnonzero((meetings.number >= 0) & np.isin(operations.kind, LEFT_TOGETHER))
    ranks, ends_ns = operations.rank[together], operations.stop_ns[together]
    ends = SharedEnds(meetings.number[together], ranks, ends_ns, np.ones(len(together), dtype=bool))
    clocks = align(ends, operations.ranks)
    start, stop = (clocks.common(operations.rank, time) for time in (operations.start_ns, operations.stop_ns))
    return replace(operations, start_ns=start, stop_ns=np.maximum(stop, start + 1))


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
    """Of several messages in one kernel, the one whose other rank arrived last is the one before."""
    count = len(operations)
    place, _ = number_groups(operations.rank, stretch)
    times = np.concatenate([operations.stop_ns, operations.start_ns])
    is_start = np.repeat([False, True], count)
    order = np.lexsort((np.tile(arrived_ns, 2), is_start, times, np.tile(place, 2)))
    ended = np.maximum.accumulate(np.where(is_start[order], UNKNOWN, np.arange(2 * count)))
    before = np.full(count, UNKNOWN, dtype=np.int64)
    started = is_start[order]
    rows = order[started] - count
    known = ended[started] >= 0
    before[rows[known]] = order[ended[started][known]]
    before[(before >= 0) & (place[before] != place)] = UNKNOWN
    return before
