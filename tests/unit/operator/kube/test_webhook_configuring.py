from __future__ import annotations

from pathlib import Path

import yaml

from rankscope.operator.kube.webhook_configuring import MADE_BY, Address, configurations
from rankscope.operator.kube.webhooks import WebhookSettings

MANIFEST = Path(__file__).parents[4] / "deploy" / "webhooks" / "webhooks.yaml"


def test_the_manifest_has_the_webhooks_that_the_operator_answers() -> None:
    documents = {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}
    settings = WebhookSettings("0.0.0.0", 9443)
    for wanted in configurations(Address(settings.namespace, settings.service)):
        held = documents[wanted["kind"]]
        assert held["webhooks"] == wanted["webhooks"]
        assert held["metadata"]["name"] == settings.configuration
        # Else the operator would write all of it anew, and not only the authority.
        assert not MADE_BY.items() <= held["metadata"]["labels"].items()
    service = documents["Service"]
    assert f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" in settings.names
    assert service["spec"]["ports"][0]["targetPort"] == settings.listen_port


def test_nothing_waits_for_us_but_who_asked_and_every_name_is_told_once() -> None:
    webhooks = [webhook for document in configurations(Address(url="https://x")) for webhook in document["webhooks"]]
    failing = {webhook["name"] for webhook in webhooks if webhook["failurePolicy"] == "Fail"}
    assert failing == {"create.captures.rankscope.dev"}
    assert len({webhook["name"] for webhook in webhooks}) == len(webhooks)
    for webhook in webhooks:
        assert webhook["sideEffects"] == "None"
        pods = "pods" in webhook["rules"][0]["resources"]
        # Of pods, only those that asked: the others must not even wait.
        assert ("objectSelector" in webhook) == pods
        assert not pods or webhook["timeoutSeconds"] <= 3
