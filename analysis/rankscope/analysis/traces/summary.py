"""Reduces one rank's trace to a RankSummary: a few kilobytes that the report, the diagnosis and the JSON output use."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, algorithm_gbps, bus_gbps
from rankscope.analysis.stats.robust import Floats, number_groups, rows_of_groups
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.traces.breakdown import Breakdown, StepParts, measure_launches
from rankscope.analysis.traces.communication.collectives import PURPOSES, Collectives, compute_intervals
from rankscope.analysis.traces.communication.gradient_buckets import find_buckets, predict_other_caps
from rankscope.analysis.traces.communication.parallelism_costs import find_gathers, measure_bubble
from rankscope.analysis.traces.device_memory import summarize_memory
from rankscope.analysis.traces.idle_time import Idleness, IdleParts, split_idle
from rankscope.analysis.traces.intervals import Intervals, difference, total, uncovered, union, unite
from rankscope.analysis.traces.kernels import TOP, summarize_compute, top_kernels
from rankscope.analysis.traces.ranges import summarize_ranges
from rankscope.analysis.traces.summary_records import (
    BucketsSummary,
    BucketSummary,
    CapSummary,
    CollectiveSummary,
    ComputeSummary,
    GatherSummary,
    IdleSplit,
    RankSummary,
    ShardingSummary,
    StepSummary,
)
from rankscope.analysis.traces.trace import Category, Trace


def summarize(
    trace: Trace,
    breakdown: Breakdown,
    collectives: Collectives,
    *,
    rank: int | None,
    file: str,
    top: int = TOP,
    stages: int | None = None,
) -> RankSummary:
    """`stages` of the pipeline, if the user knows the number."""
    idle = split_idle(trace, breakdown)
    compute = summarize_compute(trace)
    computing = compute_intervals(trace)
    return RankSummary(
        rank=rank,
        file=file,
        backend=trace.backend,
        device=device_name(trace),
        world_size=trace.world_size,
        on_host=breakdown.on_host,
        span_us=breakdown.span_ns / 1000,
        compute_us=breakdown.compute_ns / 1000,
        non_compute_us=breakdown.non_compute_ns / 1000,
        idle_us=breakdown.idle_ns / 1000,
        communication_us=breakdown.communication_ns / 1000,
        exposed_communication_us=breakdown.exposed_communication_ns / 1000,
        overlap_ratio=breakdown.overlap_ratio,
        memory_copy_us=breakdown.memory_ns / 1000,
        exposed_memory_copy_us=breakdown.exposed_memory_ns / 1000,
        outside_steps_us=breakdown.outside_steps_ns / 1000,
        parts_us=_parts_us(breakdown, idle, compute),
        idle=_idle(idle),
        exposed_by_group_kind_us=exposed_by_group_kind(collectives, computing),
        host_bound_after_synchronisation_us=idle.host_bound_after_synchronisation_ns / 1000,
        idle_gap_longest_us=idle.longest_gap_ns / 1000,
        tensor_core_ratio=compute.tensor_core_ratio if compute else None,
        compute_mix=compute,
        launch=measure_launches(trace),
        steps=tuple(_step(step, parts) for step, parts in zip(breakdown.steps, idle.steps, strict=True)),
        top_kernels=top_kernels(trace, top),
        collectives=summarize_collectives(collectives, computing),
        buckets=summarize_buckets(trace, collectives),
        sharding=summarize_sharding(trace, collectives),
        bubble=measure_bubble(trace, collectives, stages=stages),
        memory=summarize_memory(trace),
        ranges=summarize_ranges(trace),
        repairs=trace.repairs,
    )


def _parts_us(breakdown: Breakdown, idle: Idleness, compute: ComputeSummary | None) -> dict[str, float]:
    """The span in parts that do not overlap. Communication on the device is work without computation; on the host
    (gloo) it is idle time of the device."""
    exposed = breakdown.non_compute_ns - breakdown.exposed_memory_ns
    moving = breakdown.compute_ns * (compute.moving_ratio if compute else 0.0)
    drained = idle.host_bound_after_synchronisation_ns
    parts = {
        "compute": breakdown.compute_ns - moving,
        "memory_kernels": moving,
        "memory_copies": breakdown.exposed_memory_ns,
        "communication": exposed + idle.communication_ns,
        "input": idle.input_ns,
        "host": idle.host_bound_ns - drained,
        "synchronisation": idle.synchronisation_ns + drained,
        "other": idle.other_ns,
    }
    return {part: value / 1000 for part, value in parts.items()}


def _step(step: StepParts, idle: IdleParts) -> StepSummary:
    return StepSummary(
        number=step.number,
        duration_us=step.span_ns / 1000,
        host_us=step.host_ns / 1000,
        whole=step.whole,
        traced_launch_ratio=step.traced_launch_ratio,
        compute_us=step.compute_ns / 1000,
        non_compute_us=step.non_compute_ns / 1000,
        idle_us=step.idle_ns / 1000,
        communication_us=step.communication_ns / 1000,
        exposed_communication_us=step.exposed_communication_ns / 1000,
        overlap_ratio=step.overlap_ratio,
        memory_copy_us=step.memory_ns / 1000,
        exposed_memory_copy_us=step.exposed_memory_ns / 1000,
        idle=_idle(idle),
    )


def _idle(idle: IdleParts) -> IdleSplit:
    return IdleSplit(
        host_bound_us=idle.host_bound_ns / 1000,
        input_wait_us=idle.input_ns / 1000,
        synchronisation_us=idle.synchronisation_ns / 1000,
        communication_us=idle.communication_ns / 1000,
        other_us=idle.other_ns / 1000,
    )


def device_name(trace: Trace) -> str:
    """Of the device that ran the most kernels; empty if it is not known."""
    used = trace.device[trace.of(Category.KERNEL)]
    used = used[used >= 0]
    if not len(used):
        return ""
    indices, counts = np.unique(used, return_counts=True)
    names = {device.index: device.name for device in trace.devices}
    # A process that sees one device may number it otherwise than the trace does.
    only = next(iter(names.values())) if len(names) == 1 else ""
    return names.get(int(indices[counts.argmax()]), only)


def exposed_by_group_kind(collectives: Collectives, computing: Intervals) -> dict[str, float]:
    """Microseconds by kind of group. Communication that runs while a stage waits for another counts as the wait."""
    covered, purpose, exposed_us = computing, collectives.purpose, {}
    kinds = sorted(set(purpose[collectives.measured].tolist()), key=lambda kind: PURPOSES[kind] != GroupKind.PIPELINE)
    for kind in kinds:
        rows = collectives.measured & (purpose == kind)
        exposed = difference(union(collectives.start_ns[rows], collectives.end_ns[rows]), covered)
        exposed_us[PURPOSES[kind].value] = total(*exposed) / 1000
        covered = unite(covered, exposed)
    return exposed_us


def summarize_collectives(found: Collectives, computing: Intervals) -> tuple[CollectiveSummary, ...]:
    """Longest in total first. `computing` is when there was work to hide behind; concurrent collectives are exposed
    once (gloo runs several at a time). Bandwidths are medians over calls of known size. Durations include waiting
    for other ranks, so that links may look slower than they are."""
    numbers, count = number_groups(found.group, found.kind)
    purpose = found.purpose
    algorithm = algorithm_gbps(found.bytes, found.duration_ns)
    bus = bus_gbps(found.kind, found.bytes, found.duration_ns, found.group_size)
    summaries = []
    groups = rows_of_groups(numbers, count)
    measured_rows = [rows[found.measured[rows]] for rows in groups]
    busy = [union(found.start_ns[rows], found.end_ns[rows]) for rows in measured_rows]
    for rows, measured, exposed_ns in zip(groups, measured_rows, uncovered(busy, computing), strict=True):
        sized = rows[found.bytes[rows] >= 0]
        group = found.groups[int(found.group[rows[0]])] if found.group[rows[0]] >= 0 else None
        duration = found.duration_ns[measured] / 1000
        size = int(found.group_size[rows].max())
        summaries.append(
            CollectiveSummary(
                kind=CollectiveKind(int(found.kind[rows[0]])).label,
                group_kind=PURPOSES[int(purpose[rows[0]])].value,
                group=group.name if group else "",
                group_description=group.description if group else "",
                group_size=size if size > 0 else None,
                count=len(rows),
                measured_count=len(measured),
                bytes_total=int(found.bytes[sized].sum()) if len(sized) else None,
                bytes_median=float(np.median(found.bytes[sized])) if len(sized) else None,
                total_us=float(duration.sum()),
                median_us=float(np.median(duration)) if len(duration) else None,
                longest_us=float(duration.max()) if len(duration) else None,
                exposed_us=exposed_ns / 1000,
                algbw_gbps=_median(algorithm[measured]),
                busbw_gbps=_median(bus[measured]),
            )
        )
    return tuple(sorted(summaries, key=lambda summary: -summary.total_us))


def summarize_buckets(trace: Trace, collectives: Collectives) -> BucketsSummary | None:
    """None if the trace shows no DDP."""
    found = find_buckets(trace, collectives)
    other = predict_other_caps(trace, found)
    if other is None:
        return None
    buckets, hidden_ratio = [], found.hidden_ratio
    for rows in rows_of_groups(*number_groups(found.order)):
        measured = rows[found.measured[rows]]
        size = int(found.bytes[rows].max())
        buckets.append(
            BucketSummary(
                order=int(found.order[rows[0]]),
                bytes=size if size >= 0 else None,
                duration_us=_median(found.duration_ns[measured] / 1000),
                hidden_ratio=_median(hidden_ratio[measured]),
            )
        )
    return BucketsSummary(
        buckets=tuple(buckets),
        cap_mb=other.cap_mb,
        communication_us=other.communication_ns / 1000,
        exposed_us=other.exposed_ns / 1000,
        other_caps=tuple(CapSummary(cap.cap_mb, cap.buckets, cap.exposed_ns / 1000) for cap in other.predictions),
        recommended_cap_mb=other.recommended_cap_mb,
        gain_us=None if other.gain_ns is None else other.gain_ns / 1000,
        advice=other.advice,
        reason=other.reason,
    )


def summarize_sharding(trace: Trace, collectives: Collectives) -> ShardingSummary | None:
    """None if nothing was gathered or scattered."""
    found = find_gathers(trace, collectives)
    if found is None:
        return None
    gathers = []
    for kind in sorted({gathering.kind for gathering in found.steps}):
        steps = [gathering for gathering in found.steps if gathering.kind == kind]
        sizes = [gathering.bytes for gathering in steps]
        count = sum(gathering.count for gathering in steps)
        gathers.append(
            GatherSummary(
                kind=kind.label,
                count=count,
                bytes=None if None in sizes else sum(size or 0 for size in sizes),
                duration_us=sum(gathering.duration_ns for gathering in steps) / 1000,
                exposed_us=sum(gathering.exposed_ns for gathering in steps) / 1000,
                prefetched_ratio=sum(gathering.prefetched for gathering in steps) / count,
            )
        )
    return ShardingSummary(found.framework, tuple(gathers))


def _median(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None
