"""X.509 as far as we need it: an authority of our own, what it signs, and how to tell that from anything else."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of those who check may be behind ours.
BACKDATED = timedelta(minutes=5)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


class Use(Enum):
    """Which side of a connection a certificate is good for: one that was stolen is no use on the other."""

    SERVER = ExtendedKeyUsageOID.SERVER_AUTH
    CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


def authorities(bundle: bytes) -> list[bytes]:
    return _PEM.findall(bundle)


def expires(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def is_due(certificate: bytes, now: datetime, lifetime_seconds: float) -> bool:
    """Whether less than a third of its life is left."""
    return expires(certificate) - now < timedelta(seconds=lifetime_seconds / 3)


def is_pair(certificate: bytes, key: bytes) -> bool:
    """Raises ValueError or TypeError for what is no certificate, or no key of ours."""
    public: bool = _private(key).public_key() == x509.load_pem_x509_certificate(certificate).public_key()
    return public


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def names_of(certificate: bytes) -> set[str]:
    """Raises x509.ExtensionNotFound for one without alternative names."""
    loaded = x509.load_pem_x509_certificate(certificate)
    held = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*held.get_values_for_type(x509.DNSName), *map(str, held.get_values_for_type(x509.IPAddress))}


def is_for(certificate: bytes, use: Use) -> bool:
    loaded = x509.load_pem_x509_certificate(certificate)
    return list(loaded.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [use.value]


def new_authority(common_name: str, now: datetime, seconds: float) -> tuple[bytes, bytes]:
    """Certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: two authorities of one name are told apart by luck.
    name = _name(f"{common_name} {secrets.token_hex(4)}")
    usage = _usage(digital_signature=False, key_cert_sign=True)
    builder = (
        _builder(name, name, key.public_key(), now, seconds)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return _pem(builder.sign(key, hashes.SHA256())), _key_pem(key)


def signed(
    authority: bytes,
    authority_key: bytes,
    common_name: str,
    names: Sequence[str],
    use: Use,
    now: datetime,
    seconds: float,
) -> tuple[bytes, bytes]:
    """Certificate and key, good for no longer than the authority is."""
    issuer = x509.load_pem_x509_certificate(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    lasting = min(seconds, (issuer.not_valid_after_utc - now).total_seconds())
    builder = (
        _builder(_name(common_name), issuer.subject, key.public_key(), now, lasting)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True, key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use.value]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_private(authority_key).public_key()), critical=False
        )
    )
    return _pem(builder.sign(_private(authority_key), hashes.SHA256())), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, now: datetime, seconds: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(seconds=seconds))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not a key of ours")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


# The webhooks' certificates: an authority of our own, what it signs, and when each is replaced.
#
# A new authority is told to the API server long before anything signed by it is served, and the old one stays told: at
# no moment is there a certificate that somebody does not trust.

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
