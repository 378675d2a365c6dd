"""Nobody in particular is slow, yet all wait: another rank is last each step (uneven data)."""

from __future__ import annotations

from math import isnan

from rankscope.analysis.policy import Policy
from rankscope.analysis.summaries import JobSummary


def is_contended(summary: JobSummary, policy: Policy) -> bool:
    """On an oversubscribed machine the scheduler spreads the steps; that says nothing about the data."""
    return summary.starved_seconds >= policy.contended_ratio * summary.step_seconds


def imbalance_impact(summary: JobSummary, policy: Policy) -> float | None:
    """Share of the step that even data would give back, if the window looks like uneven data; else None."""
    waited = summary.mean_waited_ratio
    spread = summary.self_spread_ratio
    if isnan(waited) or isnan(spread) or is_contended(summary, policy):
        return None
    if summary.slowest_excess_ratio >= policy.imbalance_one_rank_share * waited:
        return None  # one rank holds what the others wait for: it is late, if only for part of the window
    uneven = waited >= policy.imbalance_wait_ratio and spread >= policy.imbalance_spread
    return waited if uneven else None
