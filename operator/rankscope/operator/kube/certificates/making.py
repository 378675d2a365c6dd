"""The webhooks' certificates: an authority of our own, what it signs, and when each is replaced.

A new authority is told to the API server long before anything signed by it is served, and the old one stays told: at no
moment is there a certificate that somebody does not trust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from cryptography import x509

from rankscope.operator.kube.certificates.issuing import (
    Use,
    authorities,
    expires,
    is_due,
    is_pair,
    is_signed_by,
    names_of,
    new_authority,
    signed,
)

AUTHORITIES_KEPT = 4
_NAME = "rankscope webhooks"


@dataclass(frozen=True)
class Lifetimes:
    """Renewed when a third is left."""

    authority_seconds: float = 365 * 86400.0
    serving_seconds: float = 60 * 86400.0


@dataclass(frozen=True)
class Certificates:
    """All PEM. `bundle` has the authorities that are to be trusted, the newest first: the one `authority_key` is of."""

    bundle: bytes
    authority_key: bytes
    serving: bytes
    serving_key: bytes

    @property
    def newest_authority(self) -> bytes:
        return authorities(self.bundle)[0]


def renewed(
    kept: Certificates | None,
    names: Sequence[str],
    newest_is_trusted: bool,
    now: datetime,
    lifetimes: Lifetimes,
) -> Certificates:
    """What to keep from now on: `kept` itself if nothing is due. One step at a time: call it again later.

    `newest_is_trusted`: the API server has known the newest authority for long enough to go by it."""
    if kept is None or not _is_usable(kept, now):
        authority, authority_key = new_authority(_NAME, now, lifetimes.authority_seconds)
        serving, serving_key = signed(
            authority, authority_key, _NAME, names, Use.SERVER, now, lifetimes.serving_seconds
        )
        return Certificates(authority, authority_key, serving, serving_key)
    if is_due(kept.newest_authority, now, lifetimes.authority_seconds):
        authority, authority_key = new_authority(_NAME, now, lifetimes.authority_seconds)
        valid = [old for old in authorities(kept.bundle) if expires(old) > now]
        return replace(kept, bundle=b"".join([authority, *valid][:AUTHORITIES_KEPT]), authority_key=authority_key)
    settled = is_signed_by(kept.serving, kept.newest_authority) and names_of(kept.serving) == set(names)
    if newest_is_trusted and (not settled or is_due(kept.serving, now, lifetimes.serving_seconds)):
        key = kept.authority_key
        fresh = signed(kept.newest_authority, key, _NAME, names, Use.SERVER, now, lifetimes.serving_seconds)
        return replace(kept, serving=fresh[0], serving_key=fresh[1])
    valid = [old for old in authorities(kept.bundle) if expires(old) > now]
    if len(valid) < len(authorities(kept.bundle)):
        return replace(kept, bundle=b"".join(valid))
    return kept


def _is_usable(kept: Certificates, now: datetime) -> bool:
    """Somebody may have edited the Secret, or nobody have looked after it for a year."""
    try:
        pairs = ((kept.newest_authority, kept.authority_key), (kept.serving, kept.serving_key))
        if not all(is_pair(certificate, key) for certificate, key in pairs):
            return False
        if min(expires(certificate) for certificate, _ in pairs) <= now:
            return False
        for authority in authorities(kept.bundle):
            expires(authority)
        return any(is_signed_by(kept.serving, authority) for authority in authorities(kept.bundle))
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound):
        return False
