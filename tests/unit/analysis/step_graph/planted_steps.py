"""Faults planted into recorded steps: what the recording would be if some work or some transfers had taken longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, rows_of_groups, take_rows
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind, infer_group_kinds
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.roles import find_stages

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"


@dataclass(frozen=True)
class Recorded:
    """A recording to plant faults into, from a step on."""

    operations: Operations
    first_step: int = 0

    @classmethod
    def read(cls, name: str, first_step: int = 0, last_step: int = 1_000_000) -> Recorded:
        operations = read_recording(RECORDINGS / f"{name}.npz").operations
        return cls(take_rows(operations, operations.step <= last_step), first_step)

    @cached_property
    def graph(self) -> StepGraph:
        return StepGraph.build(self.operations)

    @property
    def after(self) -> Bools:
        return np.asarray(self.graph.meetings.step >= self.first_step)

    @property
    def stages(self) -> dict[int, int]:
        return find_stages(self.graph)

    def ranks_of(self, stage: int) -> list[int]:
        return [rank for rank, number in self.stages.items() if number == stage]

    def slow_ranks(self, ranks: Sequence[int], factor: float, share: float = 1.0, seed: int = 0) -> Operations:
        """Own work of these ranks takes longer in a share of the steps."""
        some = np.random.default_rng(seed).random(int(self.graph.meetings.step.max()) + 1) < share
        rows = np.isin(self.graph.operations.rank, ranks) & self.after & some[self.graph.meetings.step]
        return self.replayed(own=np.where(rows, factor, 1.0))

    def slow_stage(self, stage: int, factor: float) -> Operations:
        return self.slow_ranks(self.ranks_of(stage), factor)

    def uneven(self, spread: float, seed: int = 0, steps: int = 1) -> Operations:
        """Own work of each rank varies by a random factor, which changes after so many steps."""
        step = self.graph.meetings.step // steps
        ranks = max(self.operations.ranks) + 1
        factors = np.exp(np.random.default_rng(seed).normal(0.0, spread, (int(step.max()) + 1, ranks)))
        return self.replayed(own=np.where(self.after, factors[step, self.graph.operations.rank], 1.0))

    def slow_group(self, kind: GroupKind, factor: float, ranks: Sequence[int] = ()) -> Operations:
        """Transfers of the groups of a kind take longer, or of one group, or between two ranks in both directions."""
        return self.replayed(transfer=np.where(self._of_group(kind, ranks) & self.after, factor, 1.0))

    def bigger_messages(self, kind: GroupKind, factor: int) -> Operations:
        """Operations of a kind have more bytes, and take longer by as much."""
        rows = self._of_group(kind, ()) & self.after
        slow = self.replayed(transfer=np.where(rows, float(factor), 1.0))
        return replace(slow, bytes=np.where(rows, factor * slow.bytes, slow.bytes))

    def checkpoint(self, every: int, nanoseconds: int) -> Operations:
        """Every rank pauses before the first operation of some steps."""
        graph, step = self.graph, self.graph.meetings.step
        own = graph.own_ns.astype(np.float64)
        for rows in rows_of_groups(graph.operations.rank, max(self.operations.ranks) + 1):
            first = rows[np.unique(step[rows], return_index=True)[1]]
            own[first[step[first] % every == 0]] += nanoseconds
        return self.replayed(own=own / np.maximum(graph.own_ns, 1))

    def _of_group(self, kind: GroupKind, ranks: Sequence[int]) -> Bools:
        operations = self.graph.operations
        kinds = infer_group_kinds(self.operations)
        rows = np.array([one is kind for one in kinds], dtype=bool)[operations.group]
        if len(ranks) and kind is GroupKind.PIPELINE:
            return np.asarray(rows & np.isin(operations.rank, ranks) & np.isin(operations.peer, ranks))
        if len(ranks):
            rows &= np.array([group.ranks == tuple(ranks) for group in operations.groups])[operations.group]
        return np.asarray(rows)

    def replayed(self, own: Floats | None = None, transfer: Floats | None = None) -> Operations:
        """`own` and `transfer` multiply the times of rows."""
        graph, operations = self.graph, self.graph.operations
        own_ns = graph.own_ns if own is None else (graph.own_ns * own).astype(np.int64)
        transfer_ns = graph.transfer_ns if transfer is None else (graph.transfer_ns * transfer).astype(np.int64)
        stop = graph.replay(own_ns[:, None], transfer_ns[:, None])[:, 0]
        follows = graph.before >= 0
        start = np.where(follows, stop[graph.before] + own_ns, operations.start_ns)
        delay = 0
        for rows in rows_of_groups(graph.meetings.stretch, int(graph.meetings.stretch.max()) + 1):
            grown = int(stop[rows].max() - operations.stop_ns[rows].max())
            start[rows] += delay
            stop[rows] += delay
            delay += max(grown, 0)
        return replace(operations, start_ns=start, stop_ns=np.maximum(stop, start + 1))


Plant = Callable[[Recorded], Operations]
