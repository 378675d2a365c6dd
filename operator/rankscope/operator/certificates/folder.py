"""An authority and its certificates as files, for daemons and a correlator without Kubernetes.

The folder of the authority holds `ca.crt` and `ca.key`. Each certificate has a folder of its own in it, with `tls.crt`,
`tls.key` and `ca.crt`, which is copied to the machine as it is."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path

from rankscope.operator.certificates.authority import expires, is_pair, new_authority, signed
from rankscope.operator.certificates.roles import CLIENT, DAEMON, METRICS, OPERATOR, Use, host_name

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
AUTHORITY_NAME = "rankscope"
DAY = timedelta(days=1)
_PERSON = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,63}")


class CertificateFolderError(Exception):
    """Nothing was written: names the file, the reason and the next step."""


class FleetRole(Enum):
    """Value: the alternative name that others know the role by."""

    DAEMON = DAEMON
    CORRELATOR = OPERATOR
    CLIENT = CLIENT
    METRICS = METRICS

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def use(self) -> Use:
        if self is FleetRole.CORRELATOR:
            return Use.BOTH  # it calls daemons, and users call it
        return Use.SERVER if self is FleetRole.DAEMON else Use.CLIENT

    @property
    def is_machine(self) -> bool:
        """Whether its certificate is for a host name."""
        return self in (FleetRole.DAEMON, FleetRole.CORRELATOR)


@dataclass(frozen=True)
class Issued:
    folder: Path
    names: Sequence[str]
    until: datetime


def init(folder: Path, days: float = AUTHORITY_DAYS, now: datetime | None = None) -> Issued:
    """Makes an authority. Never replaces one: every certificate that it signed would be worthless."""
    certificate, key = new_authority(AUTHORITY_NAME, now or datetime.now(timezone.utc), days * DAY.total_seconds())
    existing = [path for path in (folder / "ca.crt", folder / "ca.key") if path.exists()]
    if existing:
        raise CertificateFolderError(f"{existing[0]} exists: name another folder; the authority in it stays as it is")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(folder / "ca.key", key, 0o600)
        _write(folder / "ca.crt", certificate, 0o644)
    except OSError as error:
        raise CertificateFolderError(f"{error.filename or folder}: {error.strerror}; name another folder") from error
    return Issued(folder, (), expires(certificate))


def issue(
    folder: Path,
    role: FleetRole,
    name: str,
    addresses: Sequence[str] = (),
    days: float = CERTIFICATE_DAYS,
    now: datetime | None = None,
) -> Issued:
    """`name` is the host's name, or the user's; `addresses` are further names and addresses of the host."""
    names = _names(role, name, addresses)
    try:
        authority, key = (folder / "ca.crt").read_bytes(), (folder / "ca.key").read_bytes()
    except OSError as error:
        next_step = f"next: rankscope certificates init {folder}"
        raise CertificateFolderError(f"{error.filename}: {error.strerror}; {next_step}") from error
    moment = now or datetime.now(timezone.utc)
    try:
        if not is_pair(authority, key):
            raise ValueError("ca.crt and ca.key do not belong together")
        if expires(authority) <= moment:
            raise ValueError("the authority has expired")
    except (ValueError, TypeError) as error:
        raise CertificateFolderError(f"{folder}: {error}; make an authority in another folder") from error
    certificate, own_key = signed(authority, key, name[:64], names, role.use, moment, days * DAY.total_seconds())
    made = folder / f"{role.word}-{name}"
    try:
        made.mkdir(mode=0o700)
    except FileExistsError as error:
        raise CertificateFolderError(
            f"{made} exists: remove the folder to replace the certificate, or choose another name"
        ) from error
    except OSError as error:
        raise CertificateFolderError(f"{made}: {error.strerror}") from error
    try:
        _write(made / "tls.key", own_key, 0o600)
        _write(made / "tls.crt", certificate, 0o644)
        _write(made / "ca.crt", authority, 0o644)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise CertificateFolderError(f"{made}: {error.strerror}") from error
    return Issued(made, names, expires(certificate))


def _names(role: FleetRole, name: str, addresses: Sequence[str]) -> Sequence[str]:
    if not role.is_machine:
        if addresses:
            raise CertificateFolderError(f"--address is for a machine: a {role.word} is not called by anybody")
        if _PERSON.fullmatch(name) is None:
            raise CertificateFolderError(f"{name[:100]!r}: up to 64 letters, digits and @ . _ -, as in alice")
        return (role.value,)
    try:
        return tuple(dict.fromkeys((role.value, *(host_name(each, "the name") for each in (name, *addresses)))))
    except ValueError as error:
        raise CertificateFolderError(f"{error}; name the machine, as in node-1, and --address 10.0.0.1") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    """A new file; its mode holds from the first byte, whatever the umask."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
