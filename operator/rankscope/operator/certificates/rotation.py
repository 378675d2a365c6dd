"""Certificates in Secrets and their rotation: the leader makes and renews them, every replica keeps in memory those
that it shows itself, and kubelets bring the daemons' to their files."""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from rankscope.common.tls import Read, TlsMaterial, files
from rankscope.operator.certificates.authority import (
    Authority,
    Lifetimes,
    authorities,
    expires,
    is_pair,
    renewed_authority,
    renewed_certificate,
)
from rankscope.operator.certificates.roles import AUTHORITY_SECRET, Role, fleet_roles
from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, Document, MissingError, UnreachableError

log = logging.getLogger(__name__)

FLEET_LIFETIMES = Lifetimes(authority_seconds=2 * 365 * 86400.0, serving_seconds=60 * 86400.0)
# The operator writes only Secrets with this label. An installation may create them with the label and without data:
# they are removed with it then, and the operator needs no right to create Secrets.
OURS = {"rankscope.dev/kept-by": "operator"}
LABELS = {"app.kubernetes.io/managed-by": "rankscope", **OURS}

Publish = Callable[[bytes], bool]


@dataclass(frozen=True)
class RotationSettings:
    """One authority and the certificates that it signs. A role may share the authority's Secret."""

    namespace: str
    authority_name: str
    authority_secret: str
    roles: Sequence[Role]
    lifetimes: Lifetimes
    # From the moment a new authority is distributed until a certificate that it signed is shown.
    settle_seconds: float
    round_seconds: float = 10.0


def fleet_rotation(namespace: str, api_names: Sequence[str] = ()) -> RotationSettings:
    """Daemons', scrapers' and the operator's own certificates. Raises ValueError for a bad API name."""
    return RotationSettings(
        namespace=namespace,
        authority_name="rankscope fleet",
        authority_secret=AUTHORITY_SECRET,
        roles=fleet_roles(namespace, api_names),
        lifetimes=FLEET_LIFETIMES,
        settle_seconds=600.0,  # kubelets bring a change to the files within two minutes
    )


class CertificateSource(ABC):
    """Certificates that this process shows. Runs from `start` to `stop`."""

    def __init__(self, names: Sequence[str], round_seconds: float) -> None:
        self._names = names
        self._round_seconds = round_seconds
        self._held: dict[str, TlsMaterial] = {}
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-certificates", daemon=True)

    @abstractmethod
    def round(self) -> None:
        """Looks for new certificates, and renews what is due."""

    def client(self, name: str) -> Read:
        """A certificate with the authorities to trust, to be read for every connection. None until it exists."""
        return lambda: self._held.get(name)

    def server(self, name: str) -> Read:
        """The same for a server that asks callers for no certificate."""

        def read() -> TlsMaterial | None:
            held = self._held.get(name)
            return None if held is None else replace(held, authorities=b"")

        return read

    @property
    def are_held(self) -> bool:
        return all(name in self._held for name in self._names)

    @property
    def expires_unix(self) -> float | None:
        """When the first of them ends."""
        held = list(self._held.values())
        return min((expires(material.certificate).timestamp() for material in held), default=None)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def _hold(self, name: str, material: TlsMaterial | None) -> None:
        if material is None or material == self._held.get(name):
            return
        if not _is_usable(material):
            self._warn(name, "it has no certificate with its key; the certificate in use stays")
            return
        self._held[name] = material
        self._warned.discard(name)
        log.info("the certificate of %s is in use, valid until %s", name, expires(material.certificate))

    def _warn(self, name: str, text: str) -> None:
        """Once, until it is written again."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("certificate %s: %s", name, text)

    def _run(self) -> None:
        logged = ""
        while True:
            pause = self._round_seconds
            try:
                self.round()
                logged = ""
            except UnreachableError as error:
                log.debug("certificates wait for the API server: %s", error)
            except (ApiError, ValueError, OSError) as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning("certificates cannot be renewed: %s", logged)
            except Exception:
                log.exception("a round of the certificates failed")
            if not self.are_held:
                pause = min(pause, 1.0)  # the leader is about to make them
            if self._stopping.wait(pause):
                return


class CertificateFiles(CertificateSource):
    """Files that somebody else renews, cert-manager for example. `publish` gets the authority, where there is one, from
    the leader."""

    def __init__(
        self,
        name: str,
        certificate: Path,
        key: Path,
        authority: Path | None,
        leads: Callable[[], bool],
        publish: Publish,
        round_seconds: float,
    ) -> None:
        super().__init__((name,), round_seconds)
        self._name = name
        self._read = files(certificate, key)
        self._authority = authority
        self._leads = leads
        self._publish = publish

    def round(self) -> None:
        self._hold(self._name, self._read())
        if self._authority is not None and self._leads():
            self._publish(self._authority.read_bytes())


class CertificateRotation(CertificateSource):
    """Every replica reads; the one that `leads` renews. `publish` distributes the authorities beyond the Secrets; it
    returns True once they have been there before."""

    def __init__(
        self,
        api: Api,
        settings: RotationSettings,
        leads: Callable[[], bool],
        publish: Publish = lambda bundle: True,
        clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__([role.secret for role in settings.roles if role.is_operators], settings.round_seconds)
        self.settings = settings
        self._api = api
        self._leads = leads
        self._publish = publish
        self._clock = clock
        self._monotonic = monotonic
        self._path = f"/api/v1/namespaces/{settings.namespace}/secrets"
        self._trusted_since: tuple[bytes, float] | None = None  # the authorities, seen everywhere

    def round(self) -> None:
        leads = self._leads()
        written = self._renew() if leads else None
        for name in self._names:
            self._hold(name, _material(self._read(name)))
        if not leads:
            self._trusted_since = None
        elif written is not None:
            bundle, is_everywhere = written
            if not self._publish(bundle) or not is_everywhere:
                self._trusted_since = None
            elif self._trusted_since is None:
                self._trusted_since = (bundle, self._monotonic())

    def _renew(self) -> tuple[bytes, bool] | None:
        """The authorities, and whether every Secret has them. None if the authority could not be written."""
        now, settings = self._clock(), self.settings
        secret = settings.authority_secret
        documents = {name: self._read(name) for name in (secret, *(role.secret for role in settings.roles))}
        if not self._is_ours(secret, documents[secret]):
            return None
        kept = _authority(documents[secret])
        authority = renewed_authority(kept, settings.authority_name, now, settings.lifetimes)
        if _is_filled(documents[secret]) and (kept is None or not _is_continued(kept, authority)):
            self._warn(secret, "the authority in it could not be used; all certificates are replaced")
        wanted = {secret: {"ca.crt": authority.bundle, "ca.key": authority.key}}
        is_trusted = self._is_trusted(authority.bundle)
        for role in settings.roles:
            if self._is_ours(role.secret, documents[role.secret]):
                material = self._renewed(role, authority, is_trusted, documents[role.secret], now)
                parts = {"ca.crt": authority.bundle, "tls.crt": material.certificate, "tls.key": material.key}
                wanted.setdefault(role.secret, {}).update(parts)
        is_everywhere = True
        for name, data in wanted.items():
            if _parts(documents[name], *data) == list(data.values()) or self._write(name, documents[name], data):
                continue
            if name == secret:
                return None  # another leader wrote a moment ago: nothing may be signed by an authority that is not kept
            is_everywhere = False
        return authority.bundle, is_everywhere

    def _is_trusted(self, bundle: bytes) -> bool:
        if self._trusted_since is None or self._trusted_since[0] != bundle:
            self._trusted_since = None
            return False
        return self._monotonic() - self._trusted_since[1] >= self.settings.settle_seconds

    def _renewed(
        self, role: Role, authority: Authority, is_trusted: bool, document: Document | None, now: datetime
    ) -> TlsMaterial:
        kept = _material(document)
        made = renewed_certificate(kept, role, authority, is_trusted, now, self.settings.lifetimes)
        if _is_filled(document) and not is_trusted and (kept is None or kept.certificate != made.certificate):
            self._warn(
                role.secret, "the certificate in it had ended, was not signed by our authority or had other names"
            )
        return made

    def _read(self, name: str) -> Document | None:
        try:
            return self._api.get(f"{self._path}/{name}")
        except MissingError:
            return None

    def _write(self, name: str, document: Document | None, data: dict[str, bytes]) -> bool:
        body: Document = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/tls" if "tls.crt" in data else "Opaque",
            "metadata": {"name": name, "labels": LABELS},
            "data": {key: base64.b64encode(part).decode() for key, part in data.items()},
        }
        if document is not None:
            # Labels and owners that others have set stay, and the type cannot be changed.
            body |= {"metadata": document["metadata"], "type": document.get("type") or body["type"]}
        try:
            if document is None:
                self._api.create(self._path, body)
            else:
                self._api.replace(f"{self._path}/{name}", body)
        except ConflictError:
            return False
        except ApiError as error:
            if document is not None or error.status != 403:
                raise
            self._warn(name, f"the Secret does not exist, and we may not create it; create it empty with label {OURS}")
            return False
        log.info("secret %s was renewed", name)
        self._warned.discard(name)
        return True

    def _is_ours(self, name: str, document: Document | None) -> bool:
        labels = {} if document is None else document["metadata"].get("labels") or {}
        if document is None or OURS.items() <= labels.items():
            return True
        self._warn(name, f"not renewed, because the Secret has no label {OURS}; delete it to have it made by us")
        return False


def _is_filled(document: Document | None) -> bool:
    return bool((document or {}).get("data"))


def _is_continued(kept: Authority, authority: Authority) -> bool:
    return authority.key == kept.key or any(each in authority.bundle for each in authorities(kept.bundle))


def _is_usable(material: TlsMaterial) -> bool:
    try:
        return is_pair(material.certificate, material.key)
    except (ValueError, TypeError):
        return False


def _parts(document: Document | None, *keys: str) -> list[bytes] | None:
    data = (document or {}).get("data") or {}
    try:
        return [base64.b64decode(data[key], validate=True) for key in keys]
    except (KeyError, TypeError, binascii.Error):
        return None


def _authority(document: Document | None) -> Authority | None:
    parts = _parts(document, "ca.crt", "ca.key")
    return None if parts is None else Authority(*parts)


def _material(document: Document | None) -> TlsMaterial | None:
    parts = _parts(document, "tls.crt", "tls.key", "ca.crt")
    return None if parts is None else TlsMaterial(*parts)
