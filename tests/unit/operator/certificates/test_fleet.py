from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, cast

import pytest

from rankscope.common.tls import TlsMaterial
from rankscope.operator.certificates import rotation
from rankscope.operator.certificates.authority import (
    Lifetimes,
    authorities,
    expires,
    is_for,
    is_pair,
    is_signed_by,
    names_of,
    signed,
)
from rankscope.operator.certificates.roles import API_SECRET, OPERATOR_SECRET, Use, fleet_roles
from rankscope.operator.certificates.rotation import OURS, CertificateRotation, fleet_rotation
from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, MissingError

BEGIN = datetime(2026, 6, 1, tzinfo=timezone.utc)
LIFETIMES = Lifetimes(authority_seconds=300 * 86400, serving_seconds=30 * 86400)
LEAVES = ("rankscope-daemon-tls", "rankscope-operator-tls", "rankscope-metrics-tls", "rankscope-api-tls")
SETTLE_SECONDS = 600.0


class Secrets:
    """Of one namespace, with the API server's ways: versions, and a conflict for the writer that is late."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.before_write: Callable[[str], None] = lambda name: None

    def get(self, path: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        if name not in self.kept:
            raise MissingError(404, "NotFound", name)
        return cast(dict[str, Any], _copy(self.kept[name]))

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.before_write(body["metadata"]["name"])
        if body["metadata"]["name"] in self.kept:
            raise ConflictError(409, "AlreadyExists", "")
        return self._put(body)

    def replace(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        self.before_write(name)
        if body["metadata"]["resourceVersion"] != self.kept[name]["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", "")
        return self._put(body)

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        body = _copy(body)
        body["metadata"]["resourceVersion"] = str(self.version)
        self.kept[body["metadata"]["name"]] = body
        return body

    def part(self, name: str, key: str) -> bytes:
        return base64.b64decode(self.kept[name]["data"][key])

    def edit(self, name: str, **parts: bytes) -> None:
        for key, content in parts.items():
            self.kept[name]["data"][key.replace("_", ".")] = base64.b64encode(content).decode()


def _copy(value: Any) -> Any:
    return {key: _copy(each) for key, each in value.items()} if isinstance(value, dict) else value


class Fleet:
    def __init__(self, secrets: Secrets | None = None, leads: bool = True, api_names: tuple[str, ...] = ()) -> None:
        self.secrets = secrets or Secrets()
        self.now = BEGIN
        self.seconds = 0.0
        settings = replace(fleet_rotation("ns", api_names), lifetimes=LIFETIMES, settle_seconds=SETTLE_SECONDS)
        clocks = {"clock": lambda: self.now, "monotonic": lambda: self.seconds}
        self.kept = CertificateRotation(cast(Api, self.secrets), settings, lambda: leads, **clocks)  # type: ignore[arg-type]

    @property
    def operator(self) -> TlsMaterial | None:
        return self.kept.client(OPERATOR_SECRET)()

    @property
    def serving(self) -> TlsMaterial | None:
        return self.kept.server(API_SECRET)()

    def round(self, days: float = 0.0, seconds: float = 0.0) -> None:
        self.now += timedelta(days=days, seconds=seconds)
        self.seconds += days * 86400 + seconds
        self.kept.round()

    def snapshot(self) -> dict[str, Any]:
        return {name: document["data"] for name, document in self.secrets.kept.items()}

    @property
    def bundle(self) -> list[bytes]:
        return authorities(self.secrets.part("rankscope-authority", "ca.crt"))

    def signer(self, name: str) -> list[bool]:
        """Of each authority, the newest first: whether it signed what is in this Secret."""
        return [is_signed_by(self.secrets.part(name, "tls.crt"), each) for each in self.bundle]

    def check(self) -> None:
        """Everybody trusts what everybody shows, now."""
        for name in LEAVES:
            assert self.secrets.part(name, "ca.crt") == self.secrets.part("rankscope-authority", "ca.crt")
            assert is_pair(self.secrets.part(name, "tls.crt"), self.secrets.part(name, "tls.key"))
            assert expires(self.secrets.part(name, "tls.crt")) > self.now
            assert any(self.signer(name))


def test_one_round_makes_each_sides_certificates_then_nothing_changes() -> None:
    fleet = Fleet(api_names=("rankscope.example.com", "192.0.2.7"))
    fleet.round()
    fleet.check()
    secrets = fleet.secrets
    assert names_of(secrets.part("rankscope-daemon-tls", "tls.crt")) == {"rankscope-daemon"}
    assert names_of(secrets.part("rankscope-operator-tls", "tls.crt")) == {"rankscope-operator"}
    service = "rankscope-operator.ns.svc"
    assert names_of(secrets.part("rankscope-api-tls", "tls.crt")) == {
        *(service, f"{service}.cluster.local", "rankscope.example.com", "192.0.2.7")
    }
    uses = {"rankscope-daemon-tls": Use.SERVER, "rankscope-api-tls": Use.SERVER}
    assert all(is_for(secrets.part(name, "tls.crt"), uses.get(name, Use.CLIENT)) for name in LEAVES)
    assert "ca.key" not in {key for name in LEAVES for key in secrets.kept[name]["data"]}
    held = fleet.operator
    assert held is not None
    assert held.certificate == secrets.part("rankscope-operator-tls", "tls.crt")
    assert fleet.serving is not None
    before = fleet.snapshot()
    for _ in range(5):
        fleet.round(days=1)
    assert fleet.snapshot() == before


def test_the_apis_certificate_cannot_be_made_an_operators() -> None:
    for name in ("rankscope-operator", "Rankscope-Daemon"):
        with pytest.raises(ValueError, match=f"--api-name {name}"):
            fleet_roles("ns", ("good.example.com", name))


@pytest.mark.parametrize(
    "name", ["", "a b", "a\x00b", "\u00e4.example.com", "-a", "a..b", "x" * 300, "https://a", "a:443"]
)
def test_what_is_no_name_is_refused_before_anything_is_made(name: str) -> None:
    with pytest.raises(ValueError, match="neither a host name nor an address"):
        fleet_roles("ns", (name,))


def test_a_name_in_another_spelling_is_the_same_name() -> None:
    fleet = Fleet(api_names=("Rankscope.Example.COM", "2001:DB8:0::1", "*.example.com"))
    fleet.round()
    before = fleet.snapshot()
    fleet.round(seconds=10)
    assert fleet.snapshot() == before


def test_for_two_years_all_trust_each_other_and_nothing_expires() -> None:
    fleet = Fleet()
    fleet.round()
    changes = 0
    for _ in range(365):
        before = fleet.snapshot()
        fleet.round(days=2)
        fleet.check()
        changes += before != fleet.snapshot()
        assert len(fleet.bundle) <= 3
        assert fleet.operator is not None
        assert fleet.operator.certificate == fleet.secrets.part("rankscope-operator-tls", "tls.crt")
    assert 30 <= changes <= 60  # every 20 days and some for the authorities


def test_a_new_authority_is_published_before_its_signatures_are_used() -> None:
    fleet = Fleet()
    for _ in range(42):
        fleet.round(days=5)
    assert len(fleet.bundle) == 2
    assert {name: fleet.signer(name) for name in LEAVES} == {name: [False, True] for name in LEAVES}
    fleet.round(seconds=SETTLE_SECONDS - 1)
    assert fleet.signer("rankscope-daemon-tls") == [False, True]
    fleet.round(seconds=2)
    fleet.check()
    assert {name: fleet.signer(name) for name in LEAVES} == {name: [True, False] for name in LEAVES}


def test_the_settling_time_starts_only_after_full_publication() -> None:
    fleet = Fleet()
    for _ in range(41):
        fleet.round(days=5)

    def conflicts(name: str) -> None:
        if name == "rankscope-daemon-tls":
            raise ConflictError(409, "Conflict", "")

    fleet.secrets.before_write = conflicts
    fleet.round(days=5)
    fleet.round(seconds=SETTLE_SECONDS * 2)
    assert fleet.signer("rankscope-operator-tls") == [False, True]
    fleet.secrets.before_write = lambda name: None
    fleet.round(seconds=1)
    fleet.round(seconds=SETTLE_SECONDS - 10)
    assert fleet.signer("rankscope-operator-tls") == [False, True]
    fleet.round(seconds=20)
    assert fleet.signer("rankscope-operator-tls") == [True, False]


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("name", ["rankscope-authority", *LEAVES])
def test_what_somebody_spoilt_is_repaired_and_told_once(
    caplog: pytest.LogCaptureFixture, name: str, content: bytes
) -> None:
    for key in fleet_keys(name):
        fleet = Fleet()
        fleet.round()
        fleet.secrets.edit(name, **{key.replace(".", "_"): content})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                fleet.round(seconds=10)
        fleet.check()
        # A bundle of somebody else's in a leaf is put right without a word: nothing was recreated.
        told = [record.message for record in caplog.records if name in record.message]
        assert len(told) == (0 if key == "ca.crt" and name != "rankscope-authority" else 1), told


def fleet_keys(name: str) -> tuple[str, ...]:
    return ("ca.crt", "ca.key") if name == "rankscope-authority" else ("ca.crt", "tls.crt", "tls.key")


def test_an_authority_that_somebody_added_is_not_told_to_daemons() -> None:
    fleet, other = Fleet(), Fleet()
    fleet.round()
    other.round()
    mixed = b"".join([*fleet.bundle, *other.bundle])
    fleet.secrets.edit("rankscope-daemon-tls", ca_crt=mixed)
    fleet.round()
    fleet.check()


def test_a_certificate_with_extra_names_or_wrong_use_is_replaced() -> None:
    for names, use in ((("rankscope-daemon", "rankscope-operator"), Use.SERVER), (("rankscope-daemon",), Use.CLIENT)):
        fleet = Fleet()
        fleet.round()
        key = fleet.secrets.part("rankscope-authority", "ca.key")
        wider = signed(fleet.bundle[0], key, "x", names, use, fleet.now, 86400.0 * 30)
        fleet.secrets.edit("rankscope-daemon-tls", tls_crt=wider[0], tls_key=wider[1])
        fleet.round()
        assert fleet.secrets.part("rankscope-daemon-tls", "tls.crt") != wider[0]
        fleet.check()


def test_a_leaf_cannot_be_made_the_authority() -> None:
    fleet = Fleet()
    fleet.round()
    leaf = [fleet.secrets.part("rankscope-api-tls", key) for key in ("tls.crt", "tls.key")]
    fleet.secrets.edit("rankscope-authority", ca_crt=leaf[0], ca_key=leaf[1])
    fleet.round()
    assert fleet.bundle != [leaf[0]]
    fleet.check()


def test_secrets_of_others_are_left_alone_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.round()
    del fleet.secrets.kept["rankscope-api-tls"]["metadata"]["labels"]
    fleet.secrets.edit("rankscope-api-tls", tls_crt=b"theirs")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fleet.round(seconds=10)
    assert fleet.secrets.part("rankscope-api-tls", "tls.crt") == b"theirs"
    assert len([record for record in caplog.records if "rankscope-api-tls" in record.message]) == 1
    assert fleet.serving is not None  # what we had


def test_empty_secrets_of_the_installation_are_filled_without_a_complaint(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    for name in ("rankscope-authority", *LEAVES):
        labels = {**OURS, "app.kubernetes.io/managed-by": "Helm"}
        fleet.secrets.create("", {"type": "Opaque", "metadata": {"name": name, "labels": labels}})
    with caplog.at_level(logging.WARNING):
        fleet.round()
    fleet.check()
    assert not [record for record in caplog.records if record.name == rotation.__name__]
    assert fleet.secrets.kept["rankscope-api-tls"]["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    assert fleet.secrets.kept["rankscope-api-tls"]["type"] == "Opaque"  # the API server lets nobody change it


def test_an_uncreatable_secret_is_reported_once_and_others_are_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    fleet.round()
    del fleet.secrets.kept["rankscope-metrics-tls"]
    fleet.secrets.edit("rankscope-api-tls", tls_crt=b"spoilt")

    def refuse(name: str) -> None:
        if name == "rankscope-metrics-tls":
            raise ApiError(403, "Forbidden", "may not create secrets")

    fleet.secrets.before_write = refuse
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fleet.round(seconds=10)
    assert fleet.secrets.part("rankscope-api-tls", "tls.crt") != b"spoilt"
    told = [record.message for record in caplog.records if "rankscope-metrics-tls" in record.message]
    assert len(told) == 1
    assert "create it empty with label" in told[0]


def test_of_two_leaders_one_signs_and_both_show_the_same() -> None:
    secrets = Secrets()
    first, second = Fleet(secrets), Fleet(secrets)
    raced: list[str] = []

    def race(name: str) -> None:
        if name not in raced:  # the other is a moment faster, every time
            raced.append(name)
            first.round()

    secrets.before_write = race
    second.round()
    second.round()
    first.round()
    first.check()
    assert first.operator is not None
    assert first.operator == second.operator


def test_a_follower_writes_nothing_and_shows_what_the_leader_made() -> None:
    secrets = Secrets()
    follower, leader = Fleet(secrets, leads=False), Fleet(secrets)
    follower.round()
    assert not secrets.kept
    assert follower.operator is None
    leader.round()
    follower.round()
    assert follower.operator == leader.operator
    assert follower.kept.are_held


def test_a_deleted_authority_is_no_longer_trusted() -> None:
    fleet = Fleet()
    fleet.round()
    (old,) = fleet.bundle
    del fleet.secrets.kept["rankscope-authority"]
    fleet.round(seconds=1)
    fleet.check()
    assert old not in fleet.bundle


def test_keys_are_not_in_what_is_printed_of_them() -> None:
    fleet = Fleet()
    fleet.round()
    assert "PRIVATE" not in repr(fleet.operator) + repr(fleet.serving)
    assert fleet.serving is not None
    assert "PRIVATE" in repr(replace(fleet.serving, authorities=fleet.serving.key))  # the check sees something
