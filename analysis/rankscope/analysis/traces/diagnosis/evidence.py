"""What the rules of a diagnosis look at, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import Struct

from rankscope.analysis.traces.summaries.records import RankSummary


class Finding(Struct, frozen=True):
    """`saving_us` is per step (of the whole trace where it has no steps), at best; `numbers` is the evidence to compute
    with."""

    kind: str
    bound: str
    title: str
    saving_us: float
    saving_ratio: float
    evidence: str
    suggestion: str
    numbers: dict[str, float] = {}
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """The typical rank: medians over the ranks of a job, which all step together."""

    ranks: tuple[RankSummary, ...]
    wait_ratio: dict[int, float]  # of exposed communication, waiting for others; by rank, as far as known

    @cached_property
    def step_us(self) -> float:
        """The whole span where a trace shows no steps."""
        return float(np.median([_step_us(rank) for rank in self.ranks]))

    @cached_property
    def shares(self) -> dict[str, float]:
        return self.shares_of(self.ranks)

    def shares_of(self, ranks: Sequence[RankSummary]) -> dict[str, float]:
        """Of the span, by part; the parts do not overlap. Waiting for others in a collective is no communication."""
        rows = []
        for rank in ranks:
            waited = rank.parts_us["communication"] * self.wait_ratio.get(-1 if rank.rank is None else rank.rank, 0.0)
            parts = {**rank.parts_us, "communication": rank.parts_us["communication"] - waited, "waiting": waited}
            rows.append({part: value / rank.span_us for part, value in parts.items()})
        return {part: float(np.median([row[part] for row in rows])) for part in rows[0]}

    def typical(self, of: Callable[[RankSummary], float | None]) -> float | None:
        known = [value for value in map(of, self.ranks) if value is not None]
        return float(np.median(known)) if known else None

    def per_step(self, of: Callable[[RankSummary], float | None]) -> float | None:
        """Of what is counted over the whole trace, the part that falls on one step."""

        def share(rank: RankSummary) -> float | None:
            counted = of(rank)
            return None if counted is None else of_one_step(rank, counted)

        return self.typical(share)

    def lost(self, part: str) -> tuple[float, float]:
        """Saving in µs a step and as a share of the step."""
        return self.shares[part] * self.step_us, self.shares[part]


def of_one_step(rank: RankSummary, counted: float) -> float:
    return counted * _step_us(rank) / rank.span_us


def _step_us(rank: RankSummary) -> float:
    return rank.step_us or rank.span_us
