"""The collectives of one rank by kind and group: how many, how large, how long, how fast, how well hidden."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Floats, number_groups
from rankscope.analysis.traces.columns import Trace
from rankscope.analysis.traces.communication.bandwidth import algorithm_gbps, bus_gbps
from rankscope.analysis.traces.communication.bubbles import measure_bubble
from rankscope.analysis.traces.communication.buckets import find_buckets
from rankscope.analysis.traces.communication.collectives import Collectives
from rankscope.analysis.traces.communication.gathers import find_gathers
from rankscope.analysis.traces.communication.kinds import CollectiveKind
from rankscope.analysis.traces.communication.rebucketing import try_other_caps
from rankscope.analysis.traces.intervals import Intervals, difference, total, union
from rankscope.analysis.traces.summaries.records import (
    BubbleSummary,
    BucketsSummary,
    BucketSummary,
    CapSummary,
    CollectiveSummary,
    GatherSummary,
    ShardingSummary,
)


def summarize_collectives(found: Collectives, hiding: Intervals) -> tuple[CollectiveSummary, ...]:
    """Longest in total first. `hiding` is when there was work to hide behind; what runs at the same time is exposed
    once (gloo runs several at a time). Bandwidths are medians over calls whose size is known; a duration that includes
    waiting for other ranks makes them look slower than the links are."""
    numbers, count = number_groups(found.group, found.kind)
    algorithm = algorithm_gbps(found.bytes, found.duration_ns)
    bus = bus_gbps(found.kind, found.bytes, found.duration_ns, found.group_size)
    summaries = []
    for number in range(count):
        rows = np.flatnonzero(numbers == number)
        measured = rows[found.measured[rows]]
        sized = rows[found.bytes[rows] >= 0]
        group = found.groups[int(found.group[rows[0]])] if found.group[rows[0]] >= 0 else None
        duration = found.duration_ns[measured] / 1000
        size = int(found.group_size[rows].max())
        summaries.append(
            CollectiveSummary(
                kind=CollectiveKind(int(found.kind[rows[0]])).label,
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
                exposed_us=total(*difference(union(found.start_ns[measured], found.end_ns[measured]), hiding)) / 1000,
                algbw_gbps=_median(algorithm[measured]),
                busbw_gbps=_median(bus[measured]),
            )
        )
    return tuple(sorted(summaries, key=lambda summary: -summary.total_us))


def summarize_buckets(trace: Trace, collectives: Collectives) -> BucketsSummary | None:
    """None where the trace shows no DDP."""
    found = find_buckets(trace, collectives)
    other = try_other_caps(trace, found)
    if other is None:
        return None
    buckets = []
    for order in np.unique(found.order).tolist():
        rows = found.order == order
        measured = rows & found.measured
        size = int(found.bytes[rows].max())
        buckets.append(
            BucketSummary(
                order=order,
                bytes=size if size >= 0 else None,
                duration_us=_median(found.duration_ns[measured] / 1000),
                hidden_ratio=_median(found.hidden_ratio[measured]),
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
    """None where nothing was gathered or scattered."""
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


def summarize_bubble(trace: Trace, collectives: Collectives, stages: int | None) -> BubbleSummary | None:
    """None where the trace shows no pipeline."""
    found = measure_bubble(trace, collectives, stages=stages)
    if found is None:
        return None
    return BubbleSummary(
        measured_ratio=found.measured_ratio,
        waiting_us=found.waiting_ns / 1000,
        stages=found.stages,
        microbatches=found.microbatches,
        theoretical_ratio=found.theoretical_ratio,
    )


def _median(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None
