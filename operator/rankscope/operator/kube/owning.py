"""Whose the things are that we make besides our own kinds: our service account's. When it goes (the chart is
uninstalled), the cluster's garbage collector takes them along."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import msgspec

from rankscope.operator.kube.api import Document

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
