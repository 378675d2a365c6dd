"""Who we are to the API server: objects that we make in other people's names are told from those that people make."""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rankscope.operator.kube.api_client import TOKEN_REVIEWS, Api, ApiError, Document, UnreachableError

ACCOUNT = "system:serviceaccount:"
AGAIN_SECONDS = 10.0


class OwnName:
    """None while it is not known, and where nothing tells it (a client certificate)."""

    def __init__(self, api: Api, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._name: str | None = None
        self._ask_at = 0.0

    def __call__(self) -> str | None:
        with self._lock:
            if self._name is None and self._monotonic_seconds() >= self._ask_at:
                self._ask_at = self._monotonic_seconds() + AGAIN_SECONDS
                self._name = self._asked()
            return self._name

    def _asked(self) -> str | None:
        token = self._api.token()
        if token is None:
            return None
        named = account_in(token)
        if named is not None:
            return named
        try:
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
            status = self._api.create(TOKEN_REVIEWS, body).get("status") or {}
        except (ApiError, UnreachableError):
            return None
        name = (status.get("user") or {}).get("username")
        return str(name) if status.get("authenticated") is True and name else None


def account_in(token: str) -> str | None:
    """The service account that a token of our own says it is of. Nobody need check it: it is ours."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return None
    subject = claims.get("sub") if isinstance(claims, dict) else None
    return subject if isinstance(subject, str) and subject.startswith(ACCOUNT) else None


# Whose the things are that we make besides our own kinds: our service account's. When it goes (the chart is
# uninstalled), the cluster's garbage collector takes them along.

TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def owners(token_file: Path = TOKEN_FILE) -> list[Document]:
    """For `metadata.ownerReferences`. Our own token tells who we are, so that nobody has to be asked. Empty outside of
    a pod, or where it cannot be told."""
    try:
        payload = token_file.read_text().split(".")[1]
        claims: Any = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        account = claims["kubernetes.io"]["serviceaccount"]
        name, uid = account["name"], account["uid"]
    except (OSError, ValueError, IndexError, KeyError, TypeError, binascii.Error, msgspec.DecodeError):
        return []
    if not (isinstance(name, str) and isinstance(uid, str)):
        return []
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": uid}]
