"""X.509: an authority of our own, the certificates that it signs, and when each of them is replaced. No I/O.

A new authority is distributed beside the old one before a certificate that it signed is shown, so that at no moment one
side shows a certificate that the other does not trust."""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rankscope.common.tls import TlsMaterial
from rankscope.operator.certificates.roles import Role, Use

MAX_AUTHORITIES = 4
# Clocks of machines that check a certificate may be behind ours.
BACKDATED = timedelta(minutes=5)
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True)
class Lifetimes:
    """A certificate is renewed when a third of its lifetime is left."""

    authority_seconds: float = 365 * 86400.0
    serving_seconds: float = 60 * 86400.0


@dataclass(frozen=True)
class Authority:
    """All PEM. `bundle` has the trusted authorities, the newest first: the one that `key` belongs to."""

    bundle: bytes
    key: bytes = field(repr=False)

    @property
    def newest(self) -> bytes:
        return authorities(self.bundle)[0]


def renewed_authority(kept: Authority | None, name: str, now: datetime, lifetimes: Lifetimes) -> Authority:
    """The authority from now on: `kept` itself if nothing is due."""
    if kept is None or not _is_usable(kept, now):
        return Authority(*new_authority(name, now, lifetimes.authority_seconds))
    valid = [old for old in authorities(kept.bundle) if expires(old) > now]
    if is_due(kept.newest, now, lifetimes.authority_seconds):
        newest, key = new_authority(name, now, lifetimes.authority_seconds)
        return Authority(b"".join([newest, *valid][:MAX_AUTHORITIES]), key)
    bundle = b"".join(valid)
    return kept if bundle == kept.bundle else replace(kept, bundle=bundle)


def renewed_certificate(
    kept: TlsMaterial | None,
    role: Role,
    authority: Authority,
    newest_is_trusted: bool,
    now: datetime,
    lifetimes: Lifetimes,
) -> TlsMaterial:
    """The role's certificate from now on: `kept` itself if nothing is due. `newest_is_trusted`: the newest authority
    was distributed long enough ago. A certificate that cannot be used is replaced at once: nobody trusts it."""
    if kept is not None and _is_certificate_of(kept, role, authority, now):
        is_newest = is_signed_by(kept.certificate, authority.newest)
        due = is_due(kept.certificate, now, lifetimes.serving_seconds)
        if not newest_is_trusted or (is_newest and not due):
            return replace(kept, authorities=authority.bundle)
    fresh = signed(
        authority.newest, authority.key, role.common_name, role.names, role.use, now, lifetimes.serving_seconds
    )
    return TlsMaterial(*fresh, authority.bundle)


def _is_usable(kept: Authority, now: datetime) -> bool:
    """Somebody may have edited the Secret, or the operator was away for years."""
    try:
        held = [x509.load_pem_x509_certificate(each) for each in authorities(kept.bundle)]
        if not is_pair(kept.newest, kept.key) or held[0].not_valid_after_utc <= now:
            return False
        limits = [each.extensions.get_extension_for_class(x509.BasicConstraints).value for each in held]
        return all(each.ca for each in limits) and is_signed_by(kept.newest, kept.newest)
    except (ValueError, TypeError, IndexError, x509.ExtensionNotFound):
        return False


def _is_certificate_of(kept: TlsMaterial, role: Role, authority: Authority, now: datetime) -> bool:
    """Exactly what we would sign: a further name, or the other side, was added by somebody else."""
    try:
        if not is_pair(kept.certificate, kept.key) or expires(kept.certificate) <= now:
            return False
        if names_of(kept.certificate) != set(role.names) or not is_for(kept.certificate, role.use):
            return False
        return any(is_signed_by(kept.certificate, each) for each in authorities(authority.bundle))
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return False


def authorities(bundle: bytes) -> list[bytes]:
    return _PEM.findall(bundle)


def expires(certificate: bytes) -> datetime:
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def is_due(certificate: bytes, now: datetime, lifetime_seconds: float) -> bool:
    """Whether less than a third of its lifetime is left."""
    return expires(certificate) - now < timedelta(seconds=lifetime_seconds / 3)


def is_pair(certificate: bytes, key: bytes) -> bool:
    """Raises ValueError or TypeError for something else than a certificate and a key of ours."""
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
    return list(loaded.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == _identifiers(use)


def new_authority(common_name: str, now: datetime, seconds: float) -> tuple[bytes, bytes]:
    """Certificate and key."""
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own: verifiers may confuse two authorities of the same name.
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
    """Certificate and key, valid for no longer than the authority is."""
    issuer = x509.load_pem_x509_certificate(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    lasting = min(seconds, (issuer.not_valid_after_utc - now).total_seconds())
    builder = (
        _builder(_name(common_name), issuer.subject, key.public_key(), now, lasting)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True, key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_identifiers(use)), critical=False)
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


def _identifiers(use: Use) -> list[x509.ObjectIdentifier]:
    return [x509.ObjectIdentifier(each) for each in use.identifiers]


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
