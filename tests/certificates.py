"""An authority of a test's own, and certificates signed by it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


class Authority:
    """Writes what it signs below `folder`."""

    def __init__(self, folder: Path, name: str = "rankscope test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(self._name, self._name, self._key, timedelta(days=30))
        signed = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = folder / "authority.pem"
        self.certificate.write_bytes(_pem(signed.sign(self._key, hashes.SHA256())))

    def issue(
        self, file: str, common_name: str, names: tuple[str, ...] | None = None, lasts: timedelta = timedelta(days=30)
    ) -> Pair:
        """`names` are the alternative names, by default the common name; () leaves them out. A negative time has
        passed already. Written in place of a pair of the same file name, as whole files."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_name(common_name), self._name, key, lasts)
        named = [x509.DNSName(name) for name in ((common_name,) if names is None else names)]
        if named:
            made = made.add_extension(x509.SubjectAlternativeName(named), critical=False)
        pair = Pair(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        _replace(pair.certificate, _pem(made.sign(self._key, hashes.SHA256())))
        _replace(
            pair.key,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
        pair.key.chmod(0o600)
        return pair


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + lasts)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _replace(path: Path, content: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)
