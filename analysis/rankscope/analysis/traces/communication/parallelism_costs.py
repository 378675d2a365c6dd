"""The cost of parallelism per step: all-gathers and reduce-scatters of sharded parameters (FSDP, ZeRO), and the
bubble of a pipeline, measured and in theory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints, number_groups, rows_of_groups, take_rows
from rankscope.analysis.traces.communication.collectives import Collectives, compute_intervals
from rankscope.analysis.traces.intervals import contains, total, uncovered, union
from rankscope.analysis.traces.kernels import Kind, classify, names_like
from rankscope.analysis.traces.steps import NO_STEP, find_steps, step_of_rows
from rankscope.analysis.traces.summary_records import BubbleSummary
from rankscope.analysis.traces.trace import ABSENT, Trace

_FRAMEWORKS = (
    ("fsdp", re.compile(r"FSDP|FullyShardedDataParallel|fully_shard", re.IGNORECASE)),
    ("zero", re.compile(r"deepspeed|zero3|zero_?(stage|optimizer)|partition(ed)?_param", re.IGNORECASE)),
)
_POINT_TO_POINT = (CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV)


@dataclass(frozen=True)
class Gathering:
    """One kind in one step, or in the whole trace if it shows no steps."""

    step: int | None  # the profiler's number
    kind: CollectiveKind  # ALL_GATHER or REDUCE_SCATTER
    count: int
    bytes: int | None  # None if one of the sizes is unknown
    duration_ns: int  # of their union
    exposed_ns: int
    # How many started while computation ran: a gather that starts when nothing computes was started too late.
    prefetched: int


@dataclass(frozen=True)
class Gathers:
    framework: str  # fsdp, zero; empty if unknown: sequence parallelism gathers too
    steps: tuple[Gathering, ...]


def find_gathers(trace: Trace, collectives: Collectives) -> Gathers | None:
    """None if no all-gather and no reduce-scatter was measured."""
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    chosen = take_rows(collectives, np.isin(collectives.kind, kinds) & collectives.measured)
    if not len(chosen):
        return None
    steps = find_steps(trace)
    row = np.where(chosen.kernel_row != ABSENT, chosen.kernel_row, chosen.call_row)
    step = step_of_rows(trace, steps)[row] if len(steps) else np.zeros(len(chosen), dtype=np.int64)
    hiding = compute_intervals(trace)
    computing = contains(hiding, chosen.start_ns)
    inside = np.flatnonzero(step != NO_STEP)
    groups = [inside[rows] for rows in rows_of_groups(*number_groups(step[inside], chosen.kind[inside]))]
    busy = [union(chosen.start_ns[rows], chosen.end_ns[rows]) for rows in groups]
    found = []
    for rows, spans, exposed_ns in zip(groups, busy, uncovered(busy, hiding), strict=True):
        sizes = chosen.bytes[rows]
        found.append(
            Gathering(
                step=int(steps.number[step[rows[0]]]) if len(steps) else None,
                kind=CollectiveKind(int(chosen.kind[rows[0]])),
                count=len(rows),
                bytes=int(sizes.sum()) if np.all(sizes >= 0) else None,
                duration_ns=total(*spans),
                exposed_ns=exposed_ns,
                prefetched=int(computing[rows].sum()),
            )
        )
    return Gathers(_framework(trace), tuple(found))


def measure_bubble(
    trace: Trace, collectives: Collectives, *, stages: int | None = None, microbatches: int | None = None
) -> BubbleSummary | None:
    """Medians over steps. None if the trace shows no step with transfers between neighbours. Arguments that are not
    given are inferred: stages from a process group named for the pipeline, micro-batches from the number of sends to
    one peer."""
    transfers = take_rows(collectives, np.isin(collectives.kind, _POINT_TO_POINT) & collectives.measured)
    steps = find_steps(trace)
    if not len(transfers) or not len(steps):
        return None
    of_row = step_of_rows(trace, steps)
    row = np.where(transfers.kernel_row != ABSENT, transfers.kernel_row, transfers.call_row)
    step = of_row[row]
    computing = compute_intervals(trace)
    work = np.flatnonzero((classify(trace) == Kind.COMPUTE) & (of_row != NO_STEP))
    work_of_step = rows_of_groups(of_row[work], len(steps))
    busy, lasted, sent = [], [], []
    ends_of_work = trace.end_ns
    for number, rows in enumerate(rows_of_groups(step, len(steps))):
        if not len(rows):
            continue
        start, end, own = transfers.start_ns[rows], transfers.end_ns[rows], work[work_of_step[number]]
        begun = min(int(start.min()), int(trace.start_ns[own].min(initial=start.min())))
        ended = max(int(end.max()), int(ends_of_work[own].max(initial=end.max())))
        busy.append(union(start, end))
        lasted.append(ended - begun)
        sent.append(_most_sent(transfers.kind[rows], transfers.peer[rows]))
    if not lasted:
        return None
    waited = uncovered(busy, computing)
    stages = stages or _stages(transfers)
    microbatches = microbatches or int(np.median(sent)) or None
    return BubbleSummary(
        measured_ratio=float(np.median(np.array(waited) / np.maximum(lasted, 1))),
        waiting_us=float(np.median(waited)) / 1000,
        stages=stages,
        microbatches=microbatches,
        theoretical_ratio=one_forward_one_backward_ratio(stages, microbatches) if stages and microbatches else None,
    )


def _framework(trace: Trace) -> str:
    for name, pattern in _FRAMEWORKS:
        if names_like(trace, pattern, anywhere=True).any():
            return name
    return ""


def one_forward_one_backward_ratio(stages: int, microbatches: int) -> float:
    """Idle share of a balanced 1F1B pipeline: (p−1)/(m+p−1)."""
    if stages < 1 or microbatches < 1:
        raise ValueError(f"stages and micro-batches must be positive, not {stages} and {microbatches}")
    return (stages - 1) / (microbatches + stages - 1)


def _most_sent(kind: Ints, peer: Ints) -> int:
    """A stage sends each micro-batch's activations to the next stage and gradients to the previous one."""
    peers = peer[(kind == CollectiveKind.SEND) & (peer >= 0)]
    # Not bincount: a trace may contain any number, and the table would be as long.
    return int(np.unique(peers, return_counts=True)[1].max()) if len(peers) else 0


def _stages(transfers: Collectives) -> int | None:
    for number in np.unique(transfers.group).tolist():
        group = transfers.groups[number]
        words = f"{group.name} {group.description}".lower()
        if "pipe" in words or "pp" in words.replace("_", " ").split():
            size = int(transfers.group_size[transfers.group == number].max())
            if size > 1:
                return size
    return None
