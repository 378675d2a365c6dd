"""The operations of a job that wait until all ranks have sent the same steps, packed as they came: of all ranks, or of
some of a large job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.path_windows import MIN_WINDOW_STEPS, whole_steps
from rankscope.analysis.step_graph.replicas import ReplicaSampler, Sample, last_following
from rankscope.analysis.step_graph.window_operations import RankOperations, Seat, has_plausible_rows, is_plausible, join

# Rows of a job, and of a rank where there are more ranks: 180 MB for 4,096 ranks.
MAX_ROWS = 1 << 20
MAX_RANK_ROWS = 3 << 9
# A window has at most so many rows, or a few more steps.
MAX_WINDOW_ROWS = 1 << 15
# A window of a job with more rows holds some replicas only; where there are no replicas, all ranks up to twice as many.
MAX_GRAPH_ROWS = 5 << 15


class PendingOperations:
    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, RankOperations]]] = {}  # with the last step
        self._seats: dict[int, tuple[Seat, ...]] = {}  # plausible ones
        self.rows = 0
        self.replicas = ReplicaSampler(MAX_GRAPH_ROWS)

    def add(self, parts: Iterable[RankOperations]) -> None:
        """When that is too much, forget early steps; and everything if some rank does not complete its steps."""
        for part in parts:
            known = self._seats.get(part.rank)
            if not (is_plausible(part) if known != part.seats else has_plausible_rows(part)):
                continue
            self._seats[part.rank] = part.seats
            self._parts.setdefault(part.rank, []).append((part.last_step, part))
            self.rows += part.size
        most = max(MAX_ROWS, MAX_RANK_ROWS * len(self._parts))
        if self.rows > most:
            self.drop((self.last_common_step(list(self._parts)) or 0) - MIN_WINDOW_STEPS)
        if self.rows > most:
            self._parts.clear()
            self._seats.clear()
            self.rows = 0

    def last_common_step(self, ranks: Sequence[int]) -> int | None:
        """None if a rank has sent nothing."""
        lasts = [parts[-1][0] for rank in ranks if (parts := self._parts.get(rank))]
        return min(lasts) if lasts and len(lasts) == len(ranks) else None

    def take(self, ranks: Sequence[int], first: int, last: int, suspects: Collection[int]) -> Sample | None:
        """The steps in between that all ranks have sent. Of a large job, `suspects` and some other ranks. None if too
        few steps follow each other, or if a large job cannot be cut."""
        parts = [part for rank in ranks for _, part in self._parts.get(rank, ())]
        steps = np.unique(np.concatenate([part.steps for part in parts if part.rank == ranks[0]]))
        steps_inside = steps[(steps >= first) & (steps <= last)]
        if np.count_nonzero(np.diff(steps_inside) == 1) < MIN_WINDOW_STEPS:
            return None
        held = sum(part.size for part in parts)
        rows = (MIN_WINDOW_STEPS + 1) * held / len(steps)
        if rows > MAX_GRAPH_ROWS or held > MAX_ROWS:
            wanted = last_following(steps_inside, MIN_WINDOW_STEPS)
            if not len(wanted):
                return None
            late = [part for rank in ranks for end, part in self._parts.get(rank, ()) if end >= wanted[0]]
            sample = self.replicas.sample(ranks, late, first, MIN_WINDOW_STEPS, suspects)
            if sample is not None or rows > 2 * MAX_GRAPH_ROWS or held > MAX_ROWS:
                return sample
        return _all_ranks(join(parts), len(ranks), first, last)

    def drop(self, before: int) -> None:
        """Forget what ends before a step."""
        parts = {rank: [kept for kept in parts if kept[0] >= before] for rank, parts in self._parts.items()}
        self._parts = {rank: kept for rank, kept in parts.items() if kept}
        self.rows = sum(part.size for kept in self._parts.values() for _, part in kept)


def _all_ranks(operations: Operations, world_size: int, first: int, last: int) -> Sample | None:
    wanted = take_rows(operations, (operations.step >= first) & (operations.step <= last))
    steps = whole_steps(wanted) if len(wanted.ranks) == world_size else wanted.step[:0]
    per_step = max(len(wanted), 1) / max(len(steps), 1)
    most = max(MIN_WINDOW_STEPS + 1, min(2 * MIN_WINDOW_STEPS, int(MAX_GRAPH_ROWS / per_step)))
    most = max(most, int(MAX_WINDOW_ROWS / per_step))
    chosen = take_rows(wanted, np.isin(wanted.step, steps[-most:]))
    return Sample(chosen) if 0 < len(chosen) <= 2 * MAX_GRAPH_ROWS else None
