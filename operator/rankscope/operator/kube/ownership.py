"""The operator's own service account: its name, and its ownership of objects that the operator creates."""

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

TOKEN_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
ACCOUNT = "system:serviceaccount:"
AGAIN_SECONDS = 10.0
SELF_REVIEWS = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class OwnName:
    """Our name for the API server; None while it is not known, and before Kubernetes 1.28 for a client certificate."""

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
        named = None if token is None else account_in(token)
        if named is not None:
            return named
        status = self._status(SELF_REVIEWS, "SelfSubjectReview")
        name = (status.get("userInfo") or {}).get("username")
        if name is None and token is not None:  # before 1.28, with the chart's role api
            status = self._status(TOKEN_REVIEWS, "TokenReview", spec={"token": token})
            name = (status.get("user") or {}).get("username") if status.get("authenticated") is True else None
        return str(name) if name else None

    def _status(self, path: str, kind: str, **content: Any) -> Document:
        try:
            answer = self._api.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": kind, **content})
        except (ApiError, UnreachableError):
            return {}
        return answer.get("status") or {}


def account_in(token: str) -> str | None:
    """The service account in a token of our own. It need not be verified: it is ours."""
    subject = _claims(token).get("sub")
    return subject if isinstance(subject, str) and subject.startswith(ACCOUNT) else None


def owners(token_file: Path = TOKEN_FILE) -> list[Document]:
    """`metadata.ownerReferences` of objects that we create besides our own kinds: our service account, so that the
    cluster's garbage collection removes them with it, when the chart is uninstalled. Empty outside of a pod."""
    try:
        account = _claims(token_file.read_text())["kubernetes.io"]["serviceaccount"]
        name, uid = account["name"], account["uid"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not (isinstance(name, str) and isinstance(uid, str)):
        return []
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "name": name, "uid": uid}]


def _claims(token: str) -> dict[str, Any]:
    """Of a JSON Web Token, unverified; empty where it is not one."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        claims = msgspec.json.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return {}
    return claims if isinstance(claims, dict) else {}
