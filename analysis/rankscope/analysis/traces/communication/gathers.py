"""What sharding costs: the all-gathers of parameters and reduce-scatters of gradients of FSDP and ZeRO, per step."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT, Trace
from rankscope.analysis.traces.communication.collectives import Collectives, hiding_intervals
from rankscope.analysis.traces.communication.kinds import CollectiveKind
from rankscope.analysis.traces.intervals import contains, covered_until, total, union
from rankscope.analysis.traces.kernels import names_like
from rankscope.analysis.traces.steps import NO_STEP, find_steps, step_of_rows

_FRAMEWORKS = (
    ("fsdp", re.compile(r"FSDP|FullyShardedDataParallel|fully_shard", re.IGNORECASE)),
    ("zero", re.compile(r"deepspeed|zero3|zero_?(stage|optimizer)|partition(ed)?_param", re.IGNORECASE)),
)


@dataclass(frozen=True)
class Gathering:
    """One kind in one step, or in the whole trace where it shows no steps."""

    step: int | None  # the profiler's number
    kind: CollectiveKind  # ALL_GATHER or REDUCE_SCATTER
    count: int
    bytes: int | None  # None where the size of one of them is not known
    duration_ns: int  # of their union
    exposed_ns: int
    # How many began while computation ran: a gather that begins when nothing computes was asked for too late.
    prefetched: int

    @property
    def hidden_ratio(self) -> float | None:
        return 1 - self.exposed_ns / self.duration_ns if self.duration_ns else None

    @property
    def prefetched_ratio(self) -> float | None:
        return self.prefetched / self.count if self.count else None


@dataclass(frozen=True)
class Gathers:
    framework: str  # fsdp, zero; empty where nothing in the trace says so: sequence parallelism gathers too
    steps: tuple[Gathering, ...]

    @property
    def exposed_ns(self) -> int:
        return sum(step.exposed_ns for step in self.steps)


def find_gathers(trace: Trace, collectives: Collectives) -> Gathers | None:
    """None where no all-gather and no reduce-scatter was measured."""
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    chosen = collectives.where(np.isin(collectives.kind, kinds) & collectives.measured)
    if not len(chosen):
        return None
    steps = find_steps(trace)
    row = np.where(chosen.kernel_row != ABSENT, chosen.kernel_row, chosen.call_row)
    step = step_of_rows(trace, steps)[row] if len(steps) else np.zeros(len(chosen), dtype=np.int64)
    hiding = hiding_intervals(trace)
    computing = contains(hiding, chosen.start_ns)
    found = []
    for number in np.unique(step[step != NO_STEP]).tolist():
        for kind in kinds:
            rows: Ints = np.flatnonzero((step == number) & (chosen.kind == kind))
            if not len(rows):
                continue
            busy = union(chosen.start_ns[rows], chosen.end_ns[rows])
            before, after = covered_until(hiding, np.concatenate(busy)).reshape(2, -1)
            sizes = chosen.bytes[rows]
            found.append(
                Gathering(
                    step=int(steps.number[number]) if len(steps) else None,
                    kind=kind,
                    count=len(rows),
                    bytes=int(sizes.sum()) if np.all(sizes >= 0) else None,
                    duration_ns=total(*busy),
                    exposed_ns=total(*busy) - int((after - before).sum()),
                    prefetched=int(computing[rows].sum()),
                )
            )
    return Gathers(_framework(trace), tuple(found))


def _framework(trace: Trace) -> str:
    for name, pattern in _FRAMEWORKS:
        if names_like(trace, pattern, anywhere=True).any():
            return name
    return ""
