from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, cast

from rankscope.operator.certificates.authority import Lifetimes
from rankscope.operator.certificates.webhook_secret import SecretKeeper
from rankscope.operator.kube.api_client import Api
from tests.unit.operator.kube.test_fleet_certificates import Secrets

NAME = "rankscope-webhook"


def keeper(secrets: Secrets) -> SecretKeeper:
    now = datetime(2026, 6, 1, tzinfo=timezone.utc)
    return SecretKeeper(cast(Api, secrets), "rankscope", NAME, ("a.svc",), Lifetimes(), clock=lambda: now)


def made_by_others(labels: dict[str, str]) -> Secrets:
    secrets = Secrets()
    metadata = {"name": NAME, "labels": labels, "annotations": {"meta.helm.sh/release-name": "r"}}
    document: dict[str, Any] = {"type": "Opaque", "metadata": metadata}
    secrets.create("", document)
    return secrets


def test_an_empty_secret_of_the_installation_is_filled_and_stays_the_installations() -> None:
    labels = {"app.kubernetes.io/managed-by": "Helm", "rankscope.dev/kept-by": "operator"}
    secrets = made_by_others(labels)
    keeping = keeper(secrets)
    assert keeping.read() is None
    keeping.renew(newest_is_trusted=True)
    assert keeping.read() is not None
    kept = secrets.kept[NAME]
    assert kept["type"] == "Opaque"
    assert kept["metadata"]["labels"] == labels
    assert kept["metadata"]["annotations"] == {"meta.helm.sh/release-name": "r"}


def test_a_secret_that_says_nothing_of_us_is_left_alone() -> None:
    secrets = made_by_others({"app.kubernetes.io/managed-by": "Helm"})
    keeper(secrets).renew(newest_is_trusted=True)
    assert "data" not in secrets.kept[NAME]
