"""The fleet's certificates in Secrets: the leader makes and renews them, every replica holds in memory what it shows
itself, and kubelets bring the daemons' to their files."""

from __future__ import annotations

import base64
import binascii
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from rankscope.operator.certificates.authority import Lifetimes, authorities, expires, is_pair
from rankscope.operator.certificates.daemon_credentials import ClientPair
from rankscope.operator.certificates.fleet import (
    FLEET_LIFETIMES,
    Authority,
    Leaf,
    Role,
    renewed_authority,
    renewed_leaf,
    roles,
)
from rankscope.operator.certificates.webhook_secret import MANAGED
from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, Document, MissingError, UnreachableError

log = logging.getLogger(__name__)

AUTHORITY_SECRET = "rankscope-authority"
OPERATOR_SECRET = "rankscope-operator-tls"
API_SECRET = "rankscope-api-tls"
# Ours to write. Whoever installs us may make the Secrets with this label and nothing in them: they are removed with the
# rest then, and we need no right to make any.
OURS = {"rankscope.dev/kept-by": "operator"}


@dataclass(frozen=True)
class FleetCertificateSettings:
    namespace: str
    api_names: Sequence[str] = ()
    lifetimes: Lifetimes = FLEET_LIFETIMES
    round_seconds: float = 10.0
    # From the moment a new authority is in every Secret until something signed by it is shown: kubelets bring a change
    # to the files within two minutes.
    settle_seconds: float = 600.0


class FleetCertificates:
    """Every replica reads; whoever `leads` renews. Runs from `start` to `stop`."""

    def __init__(
        self,
        api: Api,
        settings: FleetCertificateSettings,
        leads: Callable[[], bool],
        clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._settings = settings
        self._leads = leads
        self._clock = clock
        self._monotonic = monotonic
        self._path = f"/api/v1/namespaces/{settings.namespace}/secrets"
        self._roles = roles(settings.namespace, settings.api_names)
        self._held: dict[str, Leaf] = {}
        self._told_since: tuple[bytes, float] | None = None  # the authorities, seen in every Secret
        self._warned: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-fleet-certificates", daemon=True)

    @property
    def operator(self) -> ClientPair | None:
        """What this replica shows to daemons; None until the leader has made it."""
        leaf = self._held.get(OPERATOR_SECRET)
        return None if leaf is None else ClientPair(leaf.certificate, leaf.key, leaf.bundle)

    @property
    def serving(self) -> Leaf | None:
        """What people, Alertmanager and Prometheus are served with; to be asked for at every connection or every few
        seconds, for it changes."""
        return self._held.get(API_SECRET)

    @property
    def are_held(self) -> bool:
        return OPERATOR_SECRET in self._held and API_SECRET in self._held

    @property
    def expires_unix(self) -> float | None:
        """Of the first that ends of those we show."""
        held = list(self._held.values())
        return min((expires(leaf.certificate).timestamp() for leaf in held), default=None)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def round(self) -> None:
        if self._leads():
            self._renew()
        else:
            self._told_since = None
        for name in (OPERATOR_SECRET, API_SECRET):
            leaf = _leaf(self._read(name))
            if leaf is None or leaf == self._held.get(name):
                continue
            if not _fits(leaf):
                self._warn(name, "what is in it is no certificate with its key; what we had stays in use")
                continue
            self._held[name] = leaf
            log.info("the certificate of secret %s is in use, good until %s", name, expires(leaf.certificate))

    def _renew(self) -> None:
        now, settings = self._clock(), self._settings
        document = self._read(AUTHORITY_SECRET)
        if not self._is_ours(AUTHORITY_SECRET, document):
            return
        kept = _authority(document)
        authority = renewed_authority(kept, now, settings.lifetimes)
        if authority != kept:
            if _is_filled(document) and (kept is None or not _is_continued(kept, authority)):
                self._warn(AUTHORITY_SECRET, "what was in it could not be used; every certificate is made anew")
            if not self._write(AUTHORITY_SECRET, document, "Opaque", _authority_data(authority)):
                return  # another leader, a moment ago: nothing may be signed by what is not kept
        if self._told_since is not None and self._told_since[0] != authority.bundle:
            self._told_since = None
        told = self._told_since is not None and self._monotonic() - self._told_since[1] >= settings.settle_seconds
        # All of them, whatever becomes of one.
        stood = [self._renew_leaf(role, authority, told, now) for role in self._roles]
        if all(stood) and self._told_since is None:
            self._told_since = (authority.bundle, self._monotonic())

    def _renew_leaf(self, role: Role, authority: Authority, told: bool, now: datetime) -> bool:
        """True if the Secret has the authorities as they are now."""
        document = self._read(role.secret)
        if not self._is_ours(role.secret, document):
            return True  # nobody waits for what is not ours to write
        kept = _leaf(document)
        leaf = renewed_leaf(kept, role, authority, told, now, self._settings.lifetimes)
        if leaf == kept:
            return True
        if _is_filled(document) and not told and (kept is None or kept.certificate != leaf.certificate):
            self._warn(role.secret, "what was in it was not signed by our authority, had ended, or is for other names")
        return self._write(role.secret, document, "kubernetes.io/tls", _leaf_data(leaf))

    def _read(self, name: str) -> Document | None:
        try:
            return self._api.get(f"{self._path}/{name}")
        except MissingError:
            return None

    def _write(self, name: str, document: Document | None, kind: str, data: dict[str, bytes]) -> bool:
        metadata: Document = {"name": name, "labels": {**MANAGED, **OURS}}
        if document is not None:
            # What others put there (a chart's labels, an owner) stays.
            metadata = document["metadata"]
            kind = str(document.get("type") or kind)  # cannot be changed
        body: Document = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": kind,
            "metadata": metadata,
            "data": {key: base64.b64encode(part).decode() for key, part in data.items()},
        }
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
            self._warn(name, f"it is not there, and we may not make it; make it, empty and with the label {OURS}")
            return False
        log.info("secret %s was renewed", name)
        self._warned.discard(name)
        return True

    def _is_ours(self, name: str, document: Document | None) -> bool:
        labels = {} if document is None else document["metadata"].get("labels") or {}
        if document is None or all(labels.get(key) == value for key, value in OURS.items()):
            return True
        self._warn(name, f"not ours to renew, for it has no label {OURS}; delete it to have it made anew")
        return False

    def _warn(self, name: str, text: str) -> None:
        """Once, until it has been written again."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("secret %s: %s", name, text)

    def _run(self) -> None:
        complaint = ""
        while True:
            pause = self._settings.round_seconds
            try:
                self.round()
                complaint = ""
            except UnreachableError as error:
                log.debug("the fleet's certificates wait for the API server: %s", error)
            except (ApiError, ValueError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("the fleet's certificates cannot be kept: %s", complaint)
            except Exception:
                log.exception("a round of the fleet's certificates failed")
            if not self.are_held:
                pause = min(pause, 1.0)  # the leader is about to make them
            if self._stopping.wait(pause):
                return


def _is_filled(document: Document | None) -> bool:
    return bool((document or {}).get("data"))


def _is_continued(kept: Authority, authority: Authority) -> bool:
    return authority.key == kept.key or any(each in authority.bundle for each in authorities(kept.bundle))


def _fits(leaf: Leaf) -> bool:
    try:
        return is_pair(leaf.certificate, leaf.key)
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


def _authority_data(authority: Authority) -> dict[str, bytes]:
    return {"ca.crt": authority.bundle, "ca.key": authority.key}


def _leaf(document: Document | None) -> Leaf | None:
    parts = _parts(document, "ca.crt", "tls.crt", "tls.key")
    return None if parts is None else Leaf(*parts)


def _leaf_data(leaf: Leaf) -> dict[str, bytes]:
    return {"ca.crt": leaf.bundle, "tls.crt": leaf.certificate, "tls.key": leaf.key}
