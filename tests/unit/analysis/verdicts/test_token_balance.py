"""A mixture of experts: a rank with more tokens works longer, and is not slow."""

from __future__ import annotations

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Verdict, explanation, headline
from tests.unit.analysis.synthetic import SyntheticJob, watch


def judged(factor: float, tokens: list[float | None]) -> Verdict:
    """The last verdict on a job whose rank 2 works that much longer."""
    extra = {rank: {"tokens_per_step": count} for rank, count in enumerate(tokens) if count is not None}
    return watch((SyntheticJob(slow_ranks={2: factor}, extra=extra), 8))[-1]


def test_a_rank_with_more_tokens_is_an_imbalance() -> None:
    verdict = judged(1.8, [64, 64, 192, 64])
    assert (verdict.kind, verdict.culprits, verdict.is_alarm) == (Kind.DATA_IMBALANCE, (), True)
    assert headline(verdict) == "the data is uneven; no rank is to blame"
    assert explanation(verdict).startswith("rank 2 gets 3.0× the tokens of the others in every step")
    assert verdict.impact_ratio == pytest.approx(0.42, abs=0.03)


@pytest.mark.parametrize(
    "tokens",
    [[64, 66, 64, 63], [64, 64, 80, 64], [64, None, 192, 64]],
    ids=["as many", "too few more", "known of some ranks only"],
)
def test_a_rank_slower_than_its_tokens_explain_is_slow(tokens: list[float | None]) -> None:
    verdict = judged(1.8, tokens)
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (2,))


def test_uneven_tokens_that_cost_nothing_are_healthy() -> None:
    assert judged(1.0, [64, 64, 192, 64]).kind is Kind.HEALTHY
