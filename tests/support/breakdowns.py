"""Where a step of a job of eight ranks goes: two pipeline stages of two tensor groups."""

from __future__ import annotations

from rankscope.analysis.step_graph.step_breakdown import (
    BUBBLE,
    COMMUNICATION,
    EXCESS,
    OWN,
    StepBreakdown,
    StepPart,
    Traffic,
    TrafficTotal,
)


def a_breakdown(excess_seconds: float = 0.0) -> StepBreakdown:
    """A step of 0.1 s, and the excess."""
    parts = (
        StepPart(OWN, 0.02, stage=0),
        StepPart(OWN, 0.03, stage=1),
        *([StepPart(EXCESS, excess_seconds)] if excess_seconds else []),
        StepPart(BUBBLE, 0.01),
        StepPart(COMMUNICATION, 0.0399, group_kind="tensor"),
        StepPart(COMMUNICATION, 0.0001, group_kind="global"),
    )
    traffic = (Traffic("tensor", 4, 2, 2, 2.0**26, 0.05, 80e9), Traffic("global", 1, 8, 8, 12.0, 1e-4, None))
    return StepBreakdown(parts, traffic, 40, {"tensor": TrafficTotal(2.0**36, 51.2, 40.9)})
