"""The report on a timeline as JSON."""

from __future__ import annotations

import math
from typing import Any

from rankscope.analysis.timelines.analyzing import TimelineReport


def to_json(report: TimelineReport) -> dict[str, Any]:
    """The keys are documented in docs/analyze-timeline.md."""
    found, verdict = report.decomposition, report.judgement.verdict
    stages, replicas, tensors = report.rank.shape
    places = [(s, d, t) for s in range(stages) for d in range(replicas) for t in range(tensors)]
    places.sort(key=lambda place: int(report.rank[place]))
    out = report.judgement.standing_out
    return {
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "culprit_ranks": list(verdict.culprits),
        "culprit_stage": verdict.stage,
        "impact_ratio": _number(verdict.impact_ratio),
        "slowdown": _number(found.slowdown),
        "lost_ratio": _number(report.lost_ratio),
        "m_w": _number(found.m_w),
        "m_s": _number(found.m_s),
        "step_seconds": _number(found.step_seconds.mean()),
        "ideal_step_seconds": _number(found.typical_seconds.mean()),
        "recorded_step_seconds": _number(report.recorded_step_seconds.mean()),
        "launch_slowdown": _number(report.launch_slowdown),
        "by_rank": {str(report.rank[p]): _number(found.worker_score[p[:2]]) for p in places},
        "by_dp_rank": dict(zip(map(str, report.data_ranks), map(_number, found.replica_slowdown), strict=True)),
        "by_stage": {str(stage): _number(value) for stage, value in enumerate(found.stage_slowdown)},
        "by_optype": dict(zip(report.families, map(_number, found.family_slowdown), strict=True)),
        "by_step": {
            str(step): _number(value)
            for step, value in zip(report.steps, found.step_seconds / found.typical_seconds, strict=True)
        },
        "own_work": {
            str(report.rank[p]): {
                "stage": p[0],
                "dp_rank": int(report.data_ranks[p[1]]),
                "seconds": _number(report.judgement.own_seconds[p]),
                "ratio_to_stage": _number(out.ratio[p]),
                "slow_steps_ratio": _number(out.slow_steps_ratio[p]),
            }
            for p in places
        },
        "what_if": {
            "if_rank": {
                str(report.rank[p]): _number(found.if_worker[p[:2]])
                for p in places
                if not math.isnan(found.if_worker[p[:2]])
            },
            "if_stage": {
                str(stage): _number(value) for stage, value in enumerate(found.if_stage) if not math.isnan(value)
            },
            "if_optype": dict(zip(report.families, map(_number, found.if_family), strict=True)),
        },
        "shape": {"stages": stages, "dp_ranks": replicas, "tensor_lanes": tensors},
        "steps": {"recorded": report.steps_recorded, "used": len(report.steps)},
        "notes": list(report.notes),
    }


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
