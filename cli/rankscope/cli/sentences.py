"""Verdicts as people read them in a terminal."""

from __future__ import annotations

from pathlib import PurePath

from rankscope.analysis.verdict import DEVICE, HOST, Confidence, Kind, Severity, Verdict
from rankscope.analysis.windows import FrameSeen
from rankscope.analysis.wording import ranks

_LATE = {False: "its host is late", True: "its input is late"}
MARKS = {Severity.NONE: "·", Severity.WARNING: "!", Severity.ALARM: "✗"}


def headline(verdict: Verdict) -> str:
    """`rank 2 is slow because of model.py:88 (normalize_features, forward)`"""
    who = verdict.group or (ranks(verdict.culprits) if verdict.culprits else "")
    plural = "are" if len(verdict.culprits) > 1 and not verdict.group else "is"
    what = {
        Kind.HEALTHY: "healthy",
        Kind.INSUFFICIENT_DATA: f"not enough to judge yet: {verdict.reason}",
        Kind.SLOW_RANK: f"{who} {plural} slow",
        Kind.SLOW_STAGE: f"pipeline stage {verdict.stage} is slow ({who})",
        Kind.DATA_IMBALANCE: "the data is uneven; no rank is to blame",
        Kind.SLOW_COMMUNICATION: "communication is slow; no rank is to blame",
        Kind.INPUT_BOUND: "every rank waits for its input",
        Kind.LOW_MFU: "MFU is below its target",
        Kind.HANG: f"the job hangs: {who} never entered the collective" if who else "the job hangs",
    }[verdict.kind]
    if verdict.kind in (Kind.SLOW_RANK, Kind.HANG) and verdict.culprits:
        what += because(verdict)
    if verdict.kind.is_finding and verdict.confidence is Confidence.LOW:
        what += " (low confidence)"
    return what


def because(verdict: Verdict) -> str:
    cause = verdict.cause
    place = source_line(cause.frames[0]) if cause.frames else ""
    if cause.phase == "starved":
        return " because it is starved of CPU"
    if cause.phase == "throttled":
        return f" because its GPU is throttled ({cause.evidence})"
    if cause.bound == DEVICE:
        return f" because its GPU is slow ({cause.evidence})"
    if place:
        phase = f", {cause.phase}" if cause.phase != "unknown" else ""
        who = _LATE[cause.phase == "input"] + ", at " if cause.bound == HOST else "of "
        return f" because {who}{place} ({cause.frames[0].function}{phase})"
    if cause.bound == HOST:
        where = f" in its {cause.phase} phase" if cause.phase not in ("unknown", "input") else ""
        return f" because {_LATE[cause.phase == 'input']}{where}"
    return f" in its {cause.phase} phase" if cause.phase != "unknown" else ""


def source_line(frame: FrameSeen) -> str:
    return f"{PurePath(frame.file).name}:{frame.line}"


def loss(verdict: Verdict) -> str:
    """`costs 41 % of the job, 0.02 GPU-hours so far`; empty where nothing is lost."""
    if verdict.impact_ratio is None or not verdict.kind.is_finding:
        return ""
    lost = f", {verdict.lost_gpu_seconds / 3600:.3f} GPU-hours so far" if verdict.lost_gpu_seconds else ""
    return f"costs {verdict.impact_ratio:.0%} of the job{lost}"
