"""The webhooks' certificates: an authority of our own, what it signs, and when each is replaced.

A new authority is told to the API server long before anything signed by it is served, and the old one stays told: at no
moment is there a certificate that somebody does not trust."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# Clocks of API servers may be behind ours.
BACKDATED = timedelta(minutes=5)
AUTHORITIES_KEPT = 4
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


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


def authorities(bundle: bytes) -> list[bytes]:
    return _PEM.findall(bundle)


def expires(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


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
        authority, authority_key = _new_authority(now, lifetimes.authority_seconds)
        serving, serving_key = _signed(authority, authority_key, names, now, lifetimes.serving_seconds)
        return Certificates(authority, authority_key, serving, serving_key)
    if _is_due(kept.newest_authority, now, lifetimes.authority_seconds):
        authority, authority_key = _new_authority(now, lifetimes.authority_seconds)
        valid = [old for old in authorities(kept.bundle) if expires(old) > now]
        return replace(kept, bundle=b"".join([authority, *valid][:AUTHORITIES_KEPT]), authority_key=authority_key)
    served = x509.load_pem_x509_certificate(kept.serving)
    settled = _is_signed_by(served, kept.newest_authority) and _names(served) == set(names)
    if newest_is_trusted and (not settled or _is_due(kept.serving, now, lifetimes.serving_seconds)):
        fresh = _signed(kept.newest_authority, kept.authority_key, names, now, lifetimes.serving_seconds)
        return replace(kept, serving=fresh[0], serving_key=fresh[1])
    valid = [old for old in authorities(kept.bundle) if expires(old) > now]
    if len(valid) < len(authorities(kept.bundle)):
        return replace(kept, bundle=b"".join(valid))
    return kept


def _is_usable(kept: Certificates, now: datetime) -> bool:
    """Somebody may have edited the Secret, or nobody have looked after it for a year."""
    try:
        newest = x509.load_pem_x509_certificate(kept.newest_authority)
        serving = x509.load_pem_x509_certificate(kept.serving)
        pairs = ((newest, kept.authority_key), (serving, kept.serving_key))
        if any(_private(key).public_key() != certificate.public_key() for certificate, key in pairs):
            return False
        if min(newest.not_valid_after_utc, serving.not_valid_after_utc) <= now:
            return False
        return any(_is_signed_by(serving, authority) for authority in authorities(kept.bundle))
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound):
        return False


def _is_due(certificate: bytes, now: datetime, lifetime_seconds: float) -> bool:
    return expires(certificate) - now < timedelta(seconds=lifetime_seconds / 3)


def _is_signed_by(certificate: x509.Certificate, authority: bytes) -> bool:
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _names(certificate: x509.Certificate) -> set[str]:
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*held.get_values_for_type(x509.DNSName), *map(str, held.get_values_for_type(x509.IPAddress))}


def _new_authority(now: datetime, seconds: float) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: two authorities of one name are told apart by luck.
    name = _name(f"rankscope webhooks {secrets.token_hex(4)}")
    usage = _usage(digital_signature=False, key_cert_sign=True)
    builder = (
        _builder(name, name, key.public_key(), now, seconds)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    return _pem(builder.sign(key, hashes.SHA256())), _key_pem(key)


def _signed(
    authority: bytes, authority_key: bytes, names: Sequence[str], now: datetime, seconds: float
) -> tuple[bytes, bytes]:
    issuer = x509.load_pem_x509_certificate(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    lasting = min(seconds, (issuer.not_valid_after_utc - now).total_seconds())
    builder = (
        _builder(_name("rankscope webhooks"), issuer.subject, key.public_key(), now, lasting)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True, key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
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
