from __future__ import annotations

import pytest

from rankscope.operator.captures.controller import PlanError, plan
from rankscope.operator.kube.resources import CaptureSpec
from tests.unit.operator.correlation.test_metrics import SLOW, state


def test_the_plan_has_the_job_and_accused_ranks_with_nodes() -> None:
    spec = CaptureSpec(run="r", ranks="straggler+peer", steps=3)
    made = plan(spec, "r", state(SLOW), 64)
    assert made.job == state(SLOW).job
    assert len(made.ranks) == 2
    assert (1, "a", "accepted") in [(rank.rank, rank.node, rank.state) for rank in made.ranks]


@pytest.mark.parametrize(
    ("number", "says"), [(1, "no rank of run r reports"), (2, "no rank of job #2 of run r reports")]
)
def test_a_job_that_nobody_reports_for_is_named(number: int, says: str) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        plan(CaptureSpec(run="r", steps=3, job_number=number), "r", None, 64)
    assert refused.value.reason == "NoRanks"
    with pytest.raises(PlanError, match="at most 64"):
        plan(CaptureSpec(run="r", steps=3, ranks="all"), "r", state(SLOW, ranks=65), 64)
