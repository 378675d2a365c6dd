from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509

from rankscope.operator.certificates.authority import Certificates, Lifetimes, authorities, expires, renewed

NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
NAMES = ("rankscope-webhook.rankscope.svc", "127.0.0.1")
LIFETIMES = Lifetimes(authority_seconds=300 * 86400, serving_seconds=30 * 86400)


def step(
    kept: Certificates | None, days: float = 0, trusted: bool = True, names: tuple[str, ...] = NAMES
) -> Certificates:
    return renewed(kept, names, trusted, NOW + timedelta(days=days), LIFETIMES)


def issuers(kept: Certificates) -> list[bool]:
    """Of each authority in the bundle: whether it signed what is served."""
    serving = x509.load_pem_x509_certificate(kept.serving)
    found = []
    for authority in authorities(kept.bundle):
        try:
            serving.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
            found.append(True)
        except Exception:  # noqa: BLE001 - whatever it is, it is not its issuer
            found.append(False)
    return found


def test_the_first_certificates_are_made_at_once_and_then_left_alone() -> None:
    kept = step(None)
    assert issuers(kept) == [True]
    assert step(kept, days=1) == kept
    names = x509.load_pem_x509_certificate(kept.serving).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.DNSName) == [NAMES[0]]
    assert str(names.value.get_values_for_type(x509.IPAddress)[0]) == NAMES[1]


def test_what_is_served_is_renewed_in_its_last_third_by_the_same_authority() -> None:
    kept = step(None)
    assert step(kept, days=19) == kept
    later = step(kept, days=21)
    assert later.serving != kept.serving
    assert later.bundle == kept.bundle
    assert expires(later.serving) > expires(kept.serving)


def test_a_new_authority_is_told_first_and_serves_only_once_it_is_trusted() -> None:
    kept = step(None)
    for day in range(5, 201, 5):
        kept = step(kept, days=day)
    assert len(authorities(kept.bundle)) == 1
    told = step(kept, days=201)
    assert (told.serving, told.serving_key) == (kept.serving, kept.serving_key)
    assert issuers(told) == [False, True]
    assert authorities(told.bundle)[1] == authorities(kept.bundle)[0]
    assert step(told, days=201, trusted=False) == told
    served = step(told, days=201, trusted=True)
    assert issuers(served) == [True, False]
    assert served.bundle == told.bundle  # connections elsewhere may still meet the old one
    later = served
    for day in range(205, 311, 5):
        later = step(later, days=day)
    assert later.bundle == authorities(served.bundle)[0]


def test_other_names_are_signed_anew() -> None:
    kept = step(None)
    renamed = step(kept, names=("elsewhere",))
    assert renamed.serving != kept.serving
    assert renamed.bundle == kept.bundle


@pytest.mark.parametrize("part", ["bundle", "authority_key", "serving", "serving_key"])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_secret_that_somebody_spoilt_is_made_anew(part: str, content: bytes) -> None:
    kept = replace(step(None), **{part: content})
    assert issuers(step(kept, trusted=False)) == [True]


def test_garbage_behind_a_good_authority_spoils_the_secret_too() -> None:
    kept = step(None)
    damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    assert issuers(step(replace(kept, bundle=kept.bundle + damaged), trusted=False)) == [True]


def test_keys_of_other_certificates_are_not_used() -> None:
    one, other = step(None), step(None)
    mixed = replace(one, serving_key=other.serving_key)
    assert step(mixed, trusted=False) not in (mixed, one, other)


def test_after_a_year_of_nobody_looking_everything_is_new() -> None:
    kept = step(None)
    fresh = step(kept, days=400, trusted=False)
    assert issuers(fresh) == [True]
    assert len(authorities(fresh.bundle)) == 1
