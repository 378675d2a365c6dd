"""The cost of parallelism per step: all-gathers and reduce-scatters of sharded parameters (FSDP, ZeRO), and the
bubble of a pipeline, measured and in theory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints, grouped_median, number_groups, rows_of_groups, take_rows
from rankscope.analysis.step_graph.group_kinds import GroupKind, declared_kind
from rankscope.analysis.step_graph.window_parts import one_forward_one_backward_ratio
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
    given are inferred: stages from a process group named for the pipeline, micro-batches and chunks from the number of
    sends to each peer."""
    messages = take_rows(collectives, collectives.between_stages)
    transfers = take_rows(messages, messages.measured)
    steps = find_steps(trace)
    if not len(transfers) or not len(steps):
        return None
    of_row = step_of_rows(trace, steps)
    step = of_row[_rows_of(transfers)]
    computing = compute_intervals(trace)
    work = np.flatnonzero((classify(trace) == Kind.COMPUTE) & (of_row != NO_STEP))
    work_of_step = rows_of_groups(of_row[work], len(steps))
    busy, lasted = [], []
    ends_of_work = trace.end_ns
    for number, rows in enumerate(rows_of_groups(step, len(steps))):
        if not len(rows):
            continue
        start, end, own = transfers.start_ns[rows], transfers.end_ns[rows], work[work_of_step[number]]
        begun = min(int(start.min()), int(trace.start_ns[own].min(initial=start.min())))
        ended = max(int(end.max()), int(ends_of_work[own].max(initial=end.max())))
        busy.append(union(start, end))
        lasted.append(ended - begun)
    if not lasted:
        return None
    waited = uncovered(busy, computing)
    stages = stages or _stages(transfers)
    sends, chunks = _sends(messages, of_row[_rows_of(messages)])
    if microbatches is not None:
        sends, chunks = microbatches, 1
    return BubbleSummary(
        measured_ratio=float(np.median(np.array(waited) / np.maximum(lasted, 1))),
        waiting_us=float(np.median(waited)) / 1000,
        stages=stages,
        microbatches=sends // chunks if sends else None,
        chunks=chunks if sends else None,
        theoretical_ratio=one_forward_one_backward_ratio(stages, sends) if stages and sends else None,
    )


def _framework(trace: Trace) -> str:
    for name, pattern in _FRAMEWORKS:
        if names_like(trace, pattern, anywhere=True).any():
            return name
    return ""


def _rows_of(collectives: Collectives) -> Ints:
    return np.where(collectives.kernel_row != ABSENT, collectives.kernel_row, collectives.call_row)


def _sends(messages: Collectives, step: Ints) -> tuple[int, int]:
    """How often a stage sends to one peer in a step, and for how many chunks. With m micro-batches in v chunks, the
    ends of the pipeline exchange m(v-1) and neighbours m·v; of two stages, the peers are the same."""
    rows = np.flatnonzero((messages.kind == CollectiveKind.SEND) & (messages.peer >= 0) & (step != NO_STEP))
    if not len(rows):
        return 0, 1
    link, links = number_groups(step[rows], messages.peer[rows])
    counts, first = np.bincount(link, minlength=links), np.unique(link, return_index=True)[1]
    peers, number = np.unique(messages.peer[rows[first]], return_inverse=True)
    usual = sorted(grouped_median(counts.astype(np.float64), number, len(peers)).astype(np.int64).tolist())
    most, less = usual[-1], usual[0]
    interleaved = len(usual) == 2 and less < most and most % (most - less) == 0
    return most, most // (most - less) if interleaved else 1


def _stages(transfers: Collectives) -> int | None:
    for number in np.unique(transfers.group).tolist():
        group = transfers.groups[number]
        if declared_kind(f"{group.name} {group.description}") is GroupKind.PIPELINE:
            size = int(transfers.group_size[transfers.group == number].max())
            if size > 1:
                return size
    return None
