"""The graph of steps: an operation starts after the operation before it on its rank and the rank's own work, and ends
after the last of the ranks that it meets has arrived.

Each row has two times. `own_ns`, the rank's own work, is from the end of the operation before it to its start.
`transfer_ns` is from the arrival of the last rank to its end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rankscope.analysis.collectives.kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, number_groups, rows_of_groups
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

    @classmethod
    def build(cls, operations: Operations) -> StepGraph:
        meetings = match(operations)
        operations = _received_after_sent(operations, meetings)
        waits, last = _last_to_arrive(operations, meetings)
        before = _before(operations, meetings.stretch)
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

    def replay(self, own_ns: Ints) -> Ints:
        """The end of each operation with other times of own work. Transfers take as long as they did."""
        starts: Ints = self.operations.start_ns.copy()
        stops: Ints = self.operations.stop_ns.copy()
        met, waits = self.meetings.number, self.waits
        arrived = np.full(self.meetings.count, np.iinfo(np.int64).min)
        missing = np.bincount(met[met >= 0], minlength=self.meetings.count)
        ready = np.flatnonzero(self.before < 0)
        while len(ready):
            alone = ready[~waits[ready]]
            arriving = ready[met[ready] >= 0]
            np.maximum.at(arrived, met[arriving], starts[arriving])
            np.subtract.at(missing, met[arriving], 1)
            complete = np.unique(met[arriving])
            together = self._waiting.rows(complete[missing[complete] == 0])
            stops[alone] = starts[alone] + self.transfer_ns[alone]
            stops[together] = arrived[met[together]] + self.transfer_ns[together]
            ready = self._after.rows(np.concatenate([alone, together]))
            starts[ready] = stops[self.before[ready]] + own_ns[ready]
        return stops

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


def _before(operations: Operations, stretch: Ints) -> Ints:
    count = len(operations)
    place, _ = number_groups(operations.rank, stretch)
    times = np.concatenate([operations.stop_ns, operations.start_ns])
    is_start = np.repeat([False, True], count)
    order = np.lexsort((is_start, times, np.tile(place, 2)))
    ended = np.maximum.accumulate(np.where(is_start[order], UNKNOWN, np.arange(2 * count)))
    before = np.full(count, UNKNOWN, dtype=np.int64)
    started = is_start[order]
    rows = order[started] - count
    known = ended[started] >= 0
    before[rows[known]] = order[ended[started][known]]
    before[(before >= 0) & (place[before] != place)] = UNKNOWN
    return before
