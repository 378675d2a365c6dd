"""The webhooks' authority and certificate, which share a Secret, through the years."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

import pytest

from rankscope.operator.certificates.authority import Lifetimes, authorities, expires, is_signed_by, names_of
from rankscope.operator.certificates.rotation import OURS, CertificateFiles, CertificateRotation
from rankscope.operator.kube.api_client import Api
from rankscope.operator.webhooks.webhooks import WebhookSettings
from tests.certificates import Authority
from tests.unit.operator.certificates.test_fleet import Secrets

BEGIN = datetime(2026, 6, 1, tzinfo=timezone.utc)
NAME = "rankscope-webhook"
LIFETIMES = Lifetimes(authority_seconds=300 * 86400, serving_seconds=30 * 86400)
SETTINGS = WebhookSettings("127.0.0.1", 0, url="https://127.0.0.1:9", lifetimes=LIFETIMES)


class Webhook:
    """`published` is what the API server trusts."""

    def __init__(self, secrets: Secrets | None = None, settings: WebhookSettings = SETTINGS) -> None:
        self.secrets = secrets or Secrets()
        self.now = BEGIN
        self.published = b""
        self.may_publish = True
        self.rotation = CertificateRotation(
            cast(Api, self.secrets),
            settings.rotation,
            lambda: True,
            self._publish,
            lambda: self.now,
            lambda: (self.now - BEGIN).total_seconds(),
        )

    def _publish(self, bundle: bytes) -> bool:
        stood = self.published == bundle
        if self.may_publish:
            self.published = bundle
        return stood

    def round(self, days: float = 0.0, seconds: float = 0.0) -> None:
        self.now += timedelta(days=days, seconds=seconds)
        self.rotation.round()

    @property
    def certificate(self) -> bytes:
        held = self.rotation.server(NAME)()
        assert held is not None
        assert held.certificate == self.secrets.part(NAME, "tls.crt")
        assert held.authorities == b""
        return held.certificate

    @property
    def signers(self) -> list[bool]:
        """Of each authority in the bundle, the newest first: whether it signed what is served."""
        return [is_signed_by(self.certificate, each) for each in self.bundle]

    @property
    def bundle(self) -> list[bytes]:
        return authorities(self.secrets.part(NAME, "ca.crt"))

    def check(self) -> None:
        """The API server trusts what is served."""
        assert any(is_signed_by(self.certificate, each) for each in authorities(self.published))
        assert expires(self.certificate) > self.now


def test_the_first_certificate_is_published_at_once_and_left_unchanged() -> None:
    webhook = Webhook()
    webhook.round()
    webhook.check()
    assert names_of(webhook.certificate) == {"127.0.0.1"}
    assert webhook.secrets.kept[NAME]["type"] == "kubernetes.io/tls"
    before = webhook.secrets.version
    webhook.round(days=1)
    assert webhook.secrets.version == before
    service = replace(SETTINGS, url="", namespace="ns")
    assert service.names == ("rankscope-webhook.ns.svc", "rankscope-webhook.ns.svc.cluster.local")


def test_for_two_years_the_api_server_trusts_what_is_served() -> None:
    webhook = Webhook()
    webhook.round()
    for _ in range(730):
        webhook.round(days=1)
        webhook.check()
        assert len(webhook.bundle) <= 3


def test_a_new_authority_signs_only_after_it_is_trusted() -> None:
    webhook = Webhook()
    webhook.round()
    while len(webhook.bundle) == 1:
        webhook.round(days=5)
    assert webhook.signers == [False, True]
    webhook.round(seconds=1)  # published, and seen to be
    webhook.round(seconds=SETTINGS.settle_seconds - 2)
    assert webhook.signers == [False, True]
    webhook.round(seconds=3)
    assert webhook.signers == [True, False]
    webhook.check()


def test_an_authority_that_cannot_be_published_signs_nothing() -> None:
    webhook = Webhook()
    webhook.round()
    while len(webhook.bundle) == 1:
        webhook.may_publish = (webhook.now - BEGIN).days < 195
        webhook.round(days=5)
    for _ in range(5):
        webhook.round(days=1)
        webhook.check()
        assert webhook.signers == [False, True]


def test_other_names_get_another_certificate_of_the_same_authority() -> None:
    webhook = Webhook()
    webhook.round()
    renamed = Webhook(webhook.secrets, replace(SETTINGS, url="https://elsewhere.example.com"))
    before, bundle = webhook.certificate, webhook.bundle
    renamed.round()
    assert renamed.certificate != before
    assert renamed.bundle == bundle


@pytest.mark.parametrize("part", ["ca_crt", "ca_key", "tls_crt", "tls_key"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_secret_that_somebody_damaged_is_repaired(part: str, content: bytes) -> None:
    webhook = Webhook()
    webhook.round()
    webhook.secrets.edit(NAME, **{part: content})
    webhook.round()
    webhook.check()
    assert webhook.signers[0]


def test_garbage_behind_a_good_authority_is_removed() -> None:
    webhook = Webhook()
    webhook.round()
    damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    webhook.secrets.edit(NAME, ca_crt=b"".join(webhook.bundle) + damaged)
    webhook.round()
    assert damaged not in webhook.secrets.part(NAME, "ca.crt")
    webhook.check()


def test_after_years_without_an_operator_everything_is_new() -> None:
    webhook = Webhook()
    webhook.round()
    old = webhook.bundle
    webhook.round(days=400)
    assert webhook.signers == [True]
    assert webhook.bundle != old


def made_by_others(labels: dict[str, str]) -> Secrets:
    secrets = Secrets()
    metadata = {"name": NAME, "labels": labels, "annotations": {"meta.helm.sh/release-name": "r"}}
    document: dict[str, Any] = {"type": "Opaque", "metadata": metadata}
    secrets.create("", document)
    return secrets


def test_an_empty_helm_secret_is_filled_and_keeps_its_metadata() -> None:
    labels = {"app.kubernetes.io/managed-by": "Helm", **OURS}
    webhook = Webhook(made_by_others(labels))
    webhook.round()
    webhook.check()
    kept = webhook.secrets.kept[NAME]
    assert kept["type"] == "Opaque"
    assert kept["metadata"]["labels"] == labels
    assert kept["metadata"]["annotations"] == {"meta.helm.sh/release-name": "r"}


def test_a_secret_without_our_label_is_left_alone() -> None:
    webhook = Webhook(made_by_others({"app.kubernetes.io/managed-by": "Helm"}))
    webhook.round()
    assert "data" not in webhook.secrets.kept[NAME]
    assert not webhook.rotation.are_held
    assert webhook.published == b""


def test_foreign_files_are_reread_and_half_a_change_is_ignored(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    first, second = authority.issue("first", "x"), authority.issue("second", "x")
    published: list[bytes] = []
    source = CertificateFiles(
        "webhook",
        first.certificate,
        first.key,
        authority.certificate,
        lambda: True,
        lambda bundle: bool(published.append(bundle)),
        10.0,
    )
    assert not source.are_held
    source.round()
    read = source.server("webhook")
    before = read()
    assert before is not None and before.certificate == first.certificate.read_bytes()
    assert published == [authority.certificate.read_bytes()]
    first.certificate.write_bytes(second.certificate.read_bytes())
    source.round()
    assert read() == before
    first.key.write_bytes(second.key.read_bytes())
    source.round()
    after = read()
    assert after is not None and after.certificate == second.certificate.read_bytes()
