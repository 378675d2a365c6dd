"""The fleet's certificates: one authority, and what each part of Rankscope shows to the others.

A new authority is told to everybody beside the old one before anything signed by it is shown, so that at no moment
somebody shows what another does not trust."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from cryptography import x509

from rankscope.operator.certificates.authority import (
    AUTHORITIES_KEPT,
    Lifetimes,
    Use,
    authorities,
    expires,
    is_due,
    is_for,
    is_pair,
    is_signed_by,
    names_of,
    new_authority,
    signed,
)

_NAME = "rankscope fleet"
DAEMON, OPERATOR, METRICS = "rankscope-daemon", "rankscope-operator", "rankscope-metrics"
# By these names daemons and operator know each other: no certificate for anything else may carry one.
ROLES = frozenset({DAEMON, OPERATOR, METRICS})
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
FLEET_LIFETIMES = Lifetimes(authority_seconds=2 * 365 * 86400.0, serving_seconds=60 * 86400.0)


@dataclass(frozen=True)
class Role:
    """What is kept in a Secret of its own: whom it names, and on which side of a connection it is good."""

    secret: str
    names: Sequence[str]
    use: Use

    @property
    def common_name(self) -> str:
        return self.names[0][:64]


def roles(namespace: str, api_names: Sequence[str] = ()) -> tuple[Role, ...]:
    """Raises ValueError for a name of the API that is none, or that would make its certificate an operator's or a
    daemon's."""
    service = f"rankscope-operator.{namespace}.svc"
    return (
        Role("rankscope-daemon-tls", (DAEMON,), Use.SERVER),
        Role("rankscope-operator-tls", (OPERATOR,), Use.CLIENT),
        Role("rankscope-metrics-tls", (METRICS,), Use.CLIENT),
        Role("rankscope-api-tls", (service, f"{service}.cluster.local", *map(_api_name, api_names)), Use.SERVER),
    )


def _api_name(text: str) -> str:
    """As it will be read from the certificate again: spelt otherwise, it would seem to be another."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        name = text.lower()
    if name in ROLES:
        raise ValueError(f"--api-name {text}: daemons know the operator by such a name; use a full host name")
    if len(name) > 253 or _HOST.fullmatch(name) is None:
        raise ValueError(f"--api-name {text!r} is neither a host name nor an address")
    return name


@dataclass(frozen=True)
class Authority:
    """`bundle` has the authorities that are to be trusted, the newest first: the one that `key` is of."""

    bundle: bytes
    key: bytes = field(repr=False)

    @property
    def newest(self) -> bytes:
        return authorities(self.bundle)[0]


@dataclass(frozen=True)
class Leaf:
    """What one side shows, and the authorities that it has to trust. All PEM."""

    bundle: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def renewed_authority(kept: Authority | None, now: datetime, lifetimes: Lifetimes) -> Authority:
    """What to keep from now on: `kept` itself if nothing is due."""
    if kept is None or not _is_usable(kept, now):
        return Authority(*new_authority(_NAME, now, lifetimes.authority_seconds))
    valid = [old for old in authorities(kept.bundle) if expires(old) > now]
    if is_due(kept.newest, now, lifetimes.authority_seconds):
        newest, key = new_authority(_NAME, now, lifetimes.authority_seconds)
        return Authority(b"".join([newest, *valid][:AUTHORITIES_KEPT]), key)
    bundle = b"".join(valid)
    return kept if bundle == kept.bundle else replace(kept, bundle=bundle)


def renewed_leaf(
    kept: Leaf | None, role: Role, authority: Authority, newest_is_told: bool, now: datetime, lifetimes: Lifetimes
) -> Leaf:
    """`newest_is_told`: everybody has had the newest authority for long enough to trust what it signed. What cannot be
    used is signed anew at once, told or not: nobody trusts it as it is."""
    usable = kept is not None and _is_a_leaf_of(kept, role, authority, now)
    if kept is not None and usable:
        settled = is_signed_by(kept.certificate, authority.newest)
        due = is_due(kept.certificate, now, lifetimes.serving_seconds)
        if not newest_is_told or (settled and not due):
            return kept if kept.bundle == authority.bundle else replace(kept, bundle=authority.bundle)
    fresh = signed(
        authority.newest, authority.key, role.common_name, role.names, role.use, now, lifetimes.serving_seconds
    )
    return Leaf(authority.bundle, *fresh)


def _is_usable(kept: Authority, now: datetime) -> bool:
    """Somebody may have edited the Secret, or nobody have looked after it for years."""
    try:
        held = [x509.load_pem_x509_certificate(each) for each in authorities(kept.bundle)]
        if not is_pair(kept.newest, kept.key) or held[0].not_valid_after_utc <= now:
            return False
        limits = [each.extensions.get_extension_for_class(x509.BasicConstraints).value for each in held]
        return all(each.ca for each in limits) and is_signed_by(kept.newest, kept.newest)
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound):
        return False


def _is_a_leaf_of(kept: Leaf, role: Role, authority: Authority, now: datetime) -> bool:
    """Exactly what we would sign: a name more, or another side, is somebody else's idea."""
    try:
        if not is_pair(kept.certificate, kept.key) or expires(kept.certificate) <= now:
            return False
        if names_of(kept.certificate) != set(role.names) or not is_for(kept.certificate, role.use):
            return False
        return any(is_signed_by(kept.certificate, each) for each in authorities(authority.bundle))
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False
