"""Jobs made up from a known truth, as traces: who was late to which collective is decided here, not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import Join, join_traces
from rankscope.analysis.traces.trace import Category, ProcessGroup, Trace
from tests.unit.analysis.traces.trace_builder import Event, make_trace

UNIX_NS = 1_700_000_000_000_000_000
COMPUTE_STREAM, COMMUNICATION_STREAM = 7, 20


@dataclass(frozen=True)
class PlantedJob:
    """A step is work, then a collective in each group of `groups` in turn, `buckets` times. Times in µs."""

    ranks: int = 4
    steps: int = 5
    buckets: int = 4
    work_us: float = 20_000.0  # of a step, on every rank
    slow: Mapping[int, float] = field(default_factory=dict)  # rank → factor of its work
    slow_steps: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (rank, step) → factor
    noise: float = 0.01
    transfer_us: float = 500.0
    jitter_us: float = 5.0  # how far apart ranks leave a collective
    groups: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()  # name → rank sets; default: all ranks
    numbered: bool = True
    listed: bool = True  # the traces list the ranks of groups
    step_marks: bool = True
    offsets_us: Mapping[int, float] = field(default_factory=dict)
    drifts: Mapping[int, float] = field(default_factory=dict)
    skipped: Mapping[int, int] = field(default_factory=dict)  # rank → collectives before its capture began
    silent: tuple[int, ...] = ()
    world_size: int | None = None
    seed: int = 0

    def but(self, **changes: Any) -> PlantedJob:
        return replace(self, **changes)

    def traces(self, only: Sequence[int] | None = None) -> dict[int, Trace]:
        events, _ = self._simulated()
        return {rank: self._trace(rank, events[rank]) for rank in (range(self.ranks) if only is None else only)}

    def join(self, only: Sequence[int] | None = None, **options: Any) -> Join:
        traces = self.traces(only)
        return join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()}, **options)

    def last_arrivals(self) -> dict[int, int]:
        """The truth."""
        counts = dict.fromkeys(range(self.ranks), 0)
        for rank in self._simulated()[1]:
            counts[rank] += 1
        return counts

    def _all_groups(self) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
        return self.groups or (("0", (tuple(range(self.ranks)),)),)

    def _simulated(self) -> tuple[dict[int, list[Event]], list[int]]:
        """Events by rank on the true clock, and who came last to each collective."""
        random = np.random.default_rng(self.seed)
        now = np.full(self.ranks, 1000.0)
        events: dict[int, list[Event]] = {rank: [] for rank in range(self.ranks)}
        last: list[int] = []
        sequence = 0
        for step in range(self.steps):
            begun = now.copy()
            common = 1 + 0.05 * random.random()  # no two steps are alike
            for _bucket in range(self.buckets):
                for rank in range(self.ranks):
                    factor = self.slow.get(rank, 1.0) * self.slow_steps.get((rank, step), 1.0)
                    factor *= common * (1 + self.noise * random.standard_normal())
                    lasted = round(self.work_us / self.buckets * factor, 3)
                    place = {"stream": COMPUTE_STREAM}
                    events[rank].append(("gemm", Category.KERNEL, float(now[rank]), lasted, place))
                    now[rank] = round(now[rank] + lasted, 3)
                for name, sets in self._all_groups():
                    for members in sets:
                        last.append(max(members, key=lambda rank: now[rank]))
                        done = max(now[rank] for rank in members) + self.transfer_us
                        for rank in members:
                            end = round(done + self.jitter_us * random.random(), 3)
                            duration = round(end - now[rank], 3)
                            note = self._note(name, members, sequence)
                            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
                            if rank not in self.silent:
                                events[rank].append((kernel, Category.KERNEL, float(now[rank]), duration, note))
                            now[rank] = end
                sequence += 1
            if self.step_marks:
                for rank in range(self.ranks):
                    length = round(float(now[rank] - begun[rank]), 3)
                    mark = f"ProfilerStep#{step + 10}"
                    events[rank].append((mark, Category.USER_ANNOTATION, float(begun[rank]), length))
        return events, last

    def _note(self, name: str, members: tuple[int, ...], sequence: int) -> dict[str, Any]:
        note: dict[str, Any] = {"stream": COMMUNICATION_STREAM, "collective": "allreduce", "group": name}
        note |= {"group_size": len(members), "in_elements": 1000, "out_elements": 1000, "element_type": "Float"}
        return note | {"sequence": 100 + sequence} if self.numbered else note

    def _trace(self, rank: int, events: list[Event]) -> Trace:
        talking = [event for event in events if "nccl" in event[0]]
        cut = talking[self.skipped.get(rank, 0)][2] - 1 if talking else 0.0
        drift = self.drifts.get(rank, 0.0)
        clocked: list[Event] = []
        for event in events:
            if event[2] < cut and not event[0].startswith("ProfilerStep"):
                continue
            start, end = (round(t * (1 + drift), 3) for t in (event[2], event[2] + event[3]))
            options = event[4] if len(event) == 5 else {}
            clocked.append((event[0], event[1], start, end - start, options))
        groups = [ProcessGroup(n, "", s) for n, sets in self._all_groups() for s in sets if rank in s]
        return make_trace(
            clocked,
            rank=rank,
            world_size=self.world_size or self.ranks,
            base_ns=UNIX_NS + round(self.offsets_us.get(rank, 0.0) * 1000),
            groups=tuple(groups) if self.listed else (),
        )
