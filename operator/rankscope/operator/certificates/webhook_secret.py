"""Where the webhooks' certificates are kept: in a Secret that the leader writes and every replica reads, or in files
that somebody else renews (cert-manager, for one)."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from rankscope.operator.certificates.authority import Certificates, Lifetimes, authorities, renewed
from rankscope.operator.kube.api_client import Api, ConflictError, Document, MissingError

log = logging.getLogger(__name__)

MANAGED = {"app.kubernetes.io/managed-by": "rankscope"}
# Ours to write though somebody else made it: a chart that wants to remove it with the rest. It may be empty.
KEPT_BY_US = {"rankscope.dev/kept-by": "operator"}


@dataclass(frozen=True)
class Served:
    """`bundle` is what the API server has to trust; empty: somebody else tells it."""

    certificate: bytes
    key: bytes
    bundle: bytes
    newest_authority: bytes = b""


class Keeper(Protocol):
    def read(self) -> Served | None:
        """None: there is nothing to serve with yet."""

    def renew(self, newest_is_trusted: bool) -> None:
        """Called by the leader alone."""


class SecretKeeper:
    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        names: Sequence[str],
        lifetimes: Lifetimes,
        clock: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._api = api
        self._name = name
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._names = names
        self._lifetimes = lifetimes
        self._clock = clock
        self._foreign_told = False

    def read(self) -> Served | None:
        try:
            kept = _certificates(self._api.get(f"{self._path}/{self._name}"))
        except MissingError:
            return None
        if kept is None:
            return None
        newest = next(iter(authorities(kept.bundle)), b"")
        return Served(kept.serving, kept.serving_key, kept.bundle, newest)

    def renew(self, newest_is_trusted: bool) -> None:
        try:
            document: Document | None = self._api.get(f"{self._path}/{self._name}")
        except MissingError:
            document = None
        if document is not None and not self._is_ours(document):
            return
        kept = None if document is None else _certificates(document)
        wanted = renewed(kept, self._names, newest_is_trusted, self._clock(), self._lifetimes)
        if wanted == kept:
            return
        try:
            if document is None:
                self._api.create(self._path, _secret(self._name, wanted))
            else:
                # What others put there (a chart's labels, an owner) stays, and the type cannot be changed.
                kept_parts = {"metadata": document["metadata"], "type": document.get("type") or TYPE}
                self._api.replace(f"{self._path}/{self._name}", {**_secret(self._name, wanted), **kept_parts})
        except ConflictError:
            return  # another leader, a moment ago: what it wrote is read in the next round
        log.info("the webhooks' certificates in secret %s were renewed", self._name)

    def _is_ours(self, document: Document) -> bool:
        labels = document["metadata"].get("labels") or {}
        ours = any(each.items() <= labels.items() for each in (MANAGED, KEPT_BY_US))
        if not ours and not self._foreign_told:
            self._foreign_told = True
            log.warning("secret %s is not ours to renew: it has no label %s", self._name, MANAGED)
        return ours


class FileKeeper:
    """Read anew in every round: whoever renews them replaces the files."""

    def __init__(self, certificate: Path, key: Path, authority: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        self._authority = authority

    def read(self) -> Served | None:
        bundle = b"" if self._authority is None else self._authority.read_bytes()
        return Served(self._certificate.read_bytes(), self._key.read_bytes(), bundle)

    def renew(self, newest_is_trusted: bool) -> None:
        """Not ours to do."""


TYPE = "kubernetes.io/tls"
_KEYS = ("ca.crt", "ca.key", "tls.crt", "tls.key")


def _certificates(document: Document) -> Certificates | None:
    data = document.get("data") or {}
    try:
        parts = [base64.b64decode(data[key], validate=True) for key in _KEYS]
    except (KeyError, TypeError, binascii.Error):
        return None
    return Certificates(*parts)


def _secret(name: str, kept: Certificates) -> Document:
    parts = (kept.bundle, kept.authority_key, kept.serving, kept.serving_key)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": TYPE,
        "metadata": {"name": name, "labels": MANAGED},
        "data": {key: base64.b64encode(part).decode() for key, part in zip(_KEYS, parts, strict=True)},
    }
