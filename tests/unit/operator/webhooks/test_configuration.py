from __future__ import annotations

from rankscope.operator.webhooks.configuration import Address, configurations


def test_only_stamps_and_statuses_fail_closed_and_names_are_unique() -> None:
    webhooks = [webhook for document in configurations(Address(url="https://x")) for webhook in document["webhooks"]]
    failing = {webhook["name"] for webhook in webhooks if webhook["failurePolicy"] == "Fail"}
    assert failing == {"stamp.captures.rankscope.dev", "status.rankscope.dev"}
    assert len({webhook["name"] for webhook in webhooks}) == len(webhooks)
    for webhook in webhooks:
        assert webhook["sideEffects"] == "None"
        pods = "pods" in webhook["rules"][0]["resources"]
        # Of pods, only those that asked: the others must not even wait.
        assert ("objectSelector" in webhook) == pods
        assert not pods or webhook["timeoutSeconds"] <= 3
