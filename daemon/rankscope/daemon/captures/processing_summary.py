"""What the analysis engine found, in the few words and numbers that travel."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope.analysis.mfu import peak_flops_per_second
from rankscope.analysis.traces.breakdowns.breakdown import StepParts
from rankscope.analysis.traces.diagnosis.diagnosing import diagnose
from rankscope.analysis.traces.joins.joining import Join
from rankscope.analysis.traces.summaries.records import RankSummary
from rankscope.daemon.captures.processing_records import Joined, RankJob, Summary
from rankscope.daemon.environments import printable

TOP_KERNELS = 5
FINDINGS_LIMIT = 8
NAME_LIMIT, SENTENCE_LIMIT = 160, 400
_COUNT_LIMIT = (1 << 32) - 1


def summary_of(
    summary: RankSummary, step_seconds: float | None, job: RankJob, steps: Sequence[StepParts] = (), events: int = 0
) -> Summary:
    """`steps` are the whole ones of the artifact."""
    counts: dict[str, int] = {}
    for collective in summary.collectives:
        kind = printable(collective.kind, NAME_LIMIT)
        counts[kind] = min(_COUNT_LIMIT, counts.get(kind, 0) + collective.count)
    diagnosis = diagnose([summary])
    findings = [diagnosis.sentence, *(f"{finding.title}: {finding.evidence}" for finding in diagnosis.findings)]
    return Summary(
        span_seconds=summary.span_us / 1e6,
        compute_seconds=summary.compute_us / 1e6,
        communication_seconds=summary.communication_us / 1e6,
        exposed_communication_seconds=summary.exposed_communication_us / 1e6,
        memory_copy_seconds=summary.memory_copy_us / 1e6,
        idle_seconds=summary.idle_us / 1e6,
        step_seconds=step_seconds,
        overlap_ratio=summary.overlap_ratio,
        mfu_ratio=_mfu_ratio(summary.device, step_seconds, job),
        collectives=counts,
        top_kernels=[printable(kernel.name, NAME_LIMIT) for kernel in summary.top_kernels[:TOP_KERNELS]],
        findings=[printable(finding, SENTENCE_LIMIT) for finding in findings[:FINDINGS_LIMIT]],
        each_step_seconds=[step.span_ns / 1e9 for step in steps],
        each_communication_seconds=[step.communication_ns / 1e9 for step in steps],
        each_exposed_communication_seconds=[step.exposed_communication_ns / 1e9 for step in steps],
        events=events,
    )


def joined_of(join: Join) -> Joined:
    return Joined(
        clock_residual_micros=join.clock_residual_us or 0.0,
        collectives_matched=min(_COUNT_LIMIT, join.collectives_matched),
        last_arrivals={rank: min(_COUNT_LIMIT, count) for rank, count in join.last_arrivals.items()},
        verdict=join.verdict.value,
        culprits=list(join.culprits),
        reason=printable(join.reason, SENTENCE_LIMIT),
        confidence=join.confidence.value,
        impact_ratio=join.impact_ratio,
    )


def _mfu_ratio(device: str, step_seconds: float | None, job: RankJob) -> float | None:
    """Of the declared FLOPs; None where they, the step time or the device's peak are not known."""
    peak = job.peak_flops_per_second or peak_flops_per_second(device)
    if not (job.flops_per_step and peak and step_seconds and step_seconds > 0):
        return None
    ratio = job.flops_per_step / (step_seconds * peak)
    return ratio if math.isfinite(ratio) else None
