"""Ranks that work longer because they were given more to work on: experts of a mixture that get most of the tokens.

Known only where the program counts its tokens (`rankscope.probe.count_tokens`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, median_or_nan
from rankscope.analysis.verdicts.slow_rank import Screen
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import ranks
from rankscope.analysis.verdicts.windows import RankColumns


@dataclass(frozen=True)
class TokenImbalance:
    busiest: tuple[int, ...]
    tokens_ratio: float  # of the busiest to the median rank
    impact_ratio: float

    def __str__(self) -> str:
        get = "gets" if len(self.busiest) == 1 else "get"
        return f"{ranks(self.busiest)} {get} {self.tokens_ratio:.1f}× the tokens of the others in every step"


def explained_by_tokens(columns: RankColumns, screen: Screen, policy: Policy) -> Bools:
    """Of the outliers: those with more tokens than the others, by at least as much as they work longer."""
    tokens = columns.tokens_per_step
    usual = median_or_nan(tokens)
    if np.isnan(tokens).any() or not usual > 0:
        return np.zeros(len(columns), dtype=bool)
    with np.errstate(all="ignore"):
        ratio = tokens / usual
        longer = screen.compared_seconds / screen.reference_seconds
    explained: Bools = (
        screen.outlier & (ratio >= policy.rank_ratio) & (longer - 1 <= (1 + FIXED.token_excess_ratio) * (ratio - 1))
    )
    return explained


def find_token_imbalance(columns: RankColumns, screen: Screen, explained: Bools) -> TokenImbalance:
    """At least one rank is explained."""
    tokens = columns.tokens_per_step
    return TokenImbalance(
        tuple(columns.rank[explained].tolist()),
        float(tokens[explained].max() / median_or_nan(tokens)),
        float(np.nanmax(screen.impact_ratio[explained], initial=0.0)),
    )
