"""Reduces one rank's trace to its numbers: a few kilobytes that report, diagnosis and JSON are made of."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.traces.breakdowns.breakdown import Breakdown, StepParts
from rankscope.analysis.traces.breakdowns.idleness import Idleness, IdleParts, split_idle
from rankscope.analysis.traces.breakdowns.launches import measure_launches
from rankscope.analysis.traces.breakdowns.top_kernels import TOP, top_kernels
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.communication.collectives import Collectives, hiding_intervals
from rankscope.analysis.traces.summaries.collectives import (
    summarize_bubble,
    summarize_buckets,
    summarize_collectives,
    summarize_sharding,
)
from rankscope.analysis.traces.summaries.kernels import mix_compute
from rankscope.analysis.traces.summaries.memory import summarize_memory
from rankscope.analysis.traces.summaries.records import (
    ComputeSummary,
    IdleSplit,
    KernelSummary,
    LaunchSummary,
    RankSummary,
    StepSummary,
)


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
    """`stages` of the pipeline, where the user knows them."""
    idle = split_idle(trace, breakdown)
    compute = mix_compute(trace)
    return RankSummary(
        rank=rank,
        file=file,
        backend=trace.backend,
        device=_device(trace),
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
        host_bound_after_synchronisation_us=idle.host_bound_after_synchronisation_ns / 1000,
        idle_gap_longest_us=idle.longest_gap_ns / 1000,
        tensor_core_ratio=compute.tensor_core_ratio if compute else None,
        compute_mix=compute,
        launch=_launch(trace),
        steps=tuple(_step(step, parts) for step, parts in zip(breakdown.steps, idle.steps, strict=True)),
        top_kernels=_kernels(trace, top),
        collectives=summarize_collectives(collectives, hiding_intervals(trace)),
        buckets=summarize_buckets(trace, collectives),
        sharding=summarize_sharding(trace, collectives),
        bubble=summarize_bubble(trace, collectives, stages),
        memory=summarize_memory(trace),
        repairs=trace.repairs,
    )


def _parts_us(breakdown: Breakdown, idle: Idleness, compute: ComputeSummary | None) -> dict[str, float]:
    """The span in parts that do not overlap. Communication on the device is work without computation; on the host
    (gloo) it shows as idle time of the device."""
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


def _kernels(trace: Trace, top: int) -> tuple[KernelSummary, ...]:
    return tuple(
        KernelSummary(
            name=use.name,
            kind=use.kind.name.lower(),
            tensor_core=use.tensor_core,
            count=use.count,
            total_us=use.total_ns / 1000,
            mean_us=use.mean_ns / 1000,
            longest_us=use.longest_ns / 1000,
            share_ratio=use.share_ratio,
        )
        for use in top_kernels(trace, top)
    )


def _launch(trace: Trace) -> LaunchSummary | None:
    found = measure_launches(trace)
    if found is None:
        return None
    return LaunchSummary(
        count=found.count,
        kernel_count=found.kernel_count,
        call_median_us=found.call_median_ns / 1000,
        call_total_us=found.call_total_ns / 1000,
        delay_median_us=found.delay_median_ns / 1000,
        unqueued_ratio=found.unqueued_ratio,
        queue_median=found.queue_median,
        short_kernel_count=found.short_kernel_count,
    )


def _device(trace: Trace) -> str:
    """The device that did most, by name."""
    used = trace.device[trace.of(Category.KERNEL)]
    used = used[used >= 0]
    index = int(np.bincount(used).argmax()) if len(used) and used.max() < 4096 else None
    return next((device.name for device in trace.devices if device.index == index), "")
