from __future__ import annotations

import pytest

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.operator.policies.controller import policy_status
from rankscope.operator.policies.policy import by_namespace, match, mfu_target_of, selects, thresholds
from rankscope.operator.runs.pods import MFU_TARGET
from tests.unit.operator.policies.policy_objects import NOW, pod, policy, run


def test_an_empty_selector_matches_every_run_of_its_namespace_only() -> None:
    assert selects(policy(), run())
    assert not selects(policy(namespace="other"), run())


@pytest.mark.parametrize(
    ("labels", "chosen"),
    [({"team": "a", "tier": "1"}, True), ({"team": "a"}, False), ({"team": "b", "tier": "1"}, False), ({}, False)],
)
def test_all_labels_have_to_be_on_one_pod(labels: dict[str, str], chosen: bool) -> None:
    wanted = policy(selector={"matchLabels": {"team": "a", "tier": "1"}})
    assert selects(wanted, run(pod("launcher"), pod("worker", **labels))) is chosen
    split = run(pod("one", team="a"), pod("two", tier="1"))
    assert not selects(wanted, split)


def test_finished_pods_do_not_choose_for_running_ones() -> None:
    wanted = policy(selector={"matchLabels": {"team": "a"}})
    assert not selects(wanted, run(pod("old", phase="Failed", team="a"), pod("new", team="b")))
    assert selects(wanted, run(pod("old", phase="Failed", team="a")))  # of a run that is over, for its status


def test_the_policy_is_chosen_by_priority_then_age_then_name() -> None:
    high = policy("z-high", priority=5, created=NOW)
    old = policy("b-old", created=NOW - 100)
    twin = policy("c-twin", created=NOW - 100)
    new = policy("a-new", created=NOW)
    for order in ([high, old, twin, new], [new, twin, old, high]):
        assert (found := match(order, run())) is not None
        assert (found.policy.name, found.rivals) == ("z-high", ())
        assert (found := match(order[1:] if order[0] is high else order[:-1], run())) is not None
        assert found.policy.name == "b-old"
        assert [rival.name for rival in found.rivals] == ["c-twin", "a-new"]


def test_an_unreadable_policy_matches_nothing_and_reports_so() -> None:
    broken = policy(priority="high")
    assert broken.spec is None
    assert match([broken], run()) is None
    (accepted, _) = policy_status(broken, 0, [], 0, NOW).conditions
    assert (accepted.type, accepted.status, accepted.reason) == ("Accepted", "False", "Invalid")
    assert "priority" in accepted.message


def test_thresholds_replace_their_own_and_no_others() -> None:
    changed = thresholds(DEFAULT_POLICY, policy(thresholds={"ratio": 2, "score": 6, "impactRatio": 0.1}), None)
    assert (changed.rank_ratio, changed.rank_score, changed.impact_ratio) == (2.0, 6.0, 0.1)
    assert changed.starved_rank_ratio == 2.0
    assert changed.stage_ratio == DEFAULT_POLICY.stage_ratio
    assert thresholds(DEFAULT_POLICY, policy(thresholds={"ratio": 1.2}), None).starved_rank_ratio == 1.5
    assert thresholds(DEFAULT_POLICY, policy(sampling={}), None) is DEFAULT_POLICY
    assert thresholds(DEFAULT_POLICY, None, None) is DEFAULT_POLICY


def test_a_pods_valid_target_overrides_the_policys() -> None:
    asked = policy(thresholds={"mfuTarget": 0.3})
    good = run(pod("b", {MFU_TARGET: "0.6"}), pod("a", {MFU_TARGET: "0.5"}))
    assert mfu_target_of(good) == 0.5
    assert thresholds(DEFAULT_POLICY, asked, mfu_target_of(good)).mfu_target_ratio == 0.5
    bad = run(pod("a", {MFU_TARGET: "plenty"}))
    assert thresholds(DEFAULT_POLICY, asked, mfu_target_of(bad)).mfu_target_ratio == 0.3


def test_the_status_tells_conflicts_budget_and_kinds_that_cause_nothing() -> None:
    asked = policy(automaticCaptures={"on": ["hang", "slow_rank"], "perDay": 2})
    status = policy_status(asked, 7, [("run-a", "older")], 2, NOW)
    told = {condition.type: condition for condition in status.conditions}
    assert (status.runs, status.captures_today, status.observed_generation) == (7, 2, 4)
    assert "hang in automaticCaptures.on causes no capture" in told["Accepted"].message
    assert (told["Conflict"].status, "run-a (by older)" in told["Conflict"].message) == ("True", True)
    assert (told["CapturesLeft"].status, told["CapturesLeft"].reason) == ("False", "BudgetSpent")


def test_of_too_many_policies_the_highest_and_oldest_come_first() -> None:
    many = [policy(f"p-{number}", created=NOW - number) for number in range(200)]
    other = policy("theirs", namespace="other")
    found = by_namespace([*many, policy("high", priority=1), other])
    assert found["other"] == [other]
    assert [each.name for each in found["team"][:3]] == ["high", "p-199", "p-198"]
