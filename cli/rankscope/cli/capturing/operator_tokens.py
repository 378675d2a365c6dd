"""The token that the operator is shown: from a file, the environment, or a kubeconfig that somebody names.

A kubeconfig is never looked for: its token opens the API server, and nobody should send that anywhere unasked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

VARIABLE = "RANKSCOPE_TOKEN"
TOKEN_BYTES = 12 * 1024
KUBECONFIG_BYTES = 4 << 20
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NEXT = "next: kubectl create token ACCOUNT --audience rankscope > FILE, and --token-file FILE"


class NoTokenError(Exception):
    """What is missing, and the next step. Never holds a token."""


def find_token(token_file: Path | None, kubeconfig: Path | None) -> str:
    if token_file is not None and kubeconfig is not None:
        raise NoTokenError("--token-file and --kubeconfig are two tokens: name one")
    if token_file is not None:
        return _checked(_read(token_file, "--token-file", TOKEN_BYTES), f"--token-file {token_file}")
    if kubeconfig is not None:
        return _from_kubeconfig(kubeconfig)
    given = os.environ.get(VARIABLE)
    if given is None:
        raise NoTokenError(f"the operator asks for a token; {_NEXT} (or {VARIABLE} in the environment)")
    return _checked(given, VARIABLE)


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if _TOKEN.fullmatch(token) is None or len(token) > TOKEN_BYTES:
        raise NoTokenError(f"{where}: there is no token in it; {_NEXT}")
    return token


def _read(path: Path, flag: str, most_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1).decode("utf-8", errors="replace")
    except OSError as error:
        raise NoTokenError(f"{flag} {path}: {error.strerror}") from error


def _from_kubeconfig(path: Path) -> str:
    import yaml

    where = f"--kubeconfig {path}"
    try:
        document = yaml.safe_load(_read(path, "--kubeconfig", KUBECONFIG_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Not the parser's own text: it quotes the file.
        raise NoTokenError(f"{where}: not a kubeconfig") from error
    user = _user(document)
    if user is None:
        raise NoTokenError(f"{where}: it has no current context with a user")
    if user.get("token"):
        return _checked(str(user["token"]), where)
    if user.get("tokenFile"):
        named = path.parent / str(user["tokenFile"])
        return _checked(_read(named, f"{where}: tokenFile", TOKEN_BYTES), str(named))
    kind = "gets its token from a program (exec)" if user.get("exec") or user.get("auth-provider") else "has no token"
    raise NoTokenError(f"{where}: its user {kind}, which is not run here; {_NEXT}")


def _user(document: Any) -> dict[str, Any] | None:
    if not isinstance(document, dict):
        return None
    context = _named(document.get("contexts"), document.get("current-context"), "context")
    return None if context is None else _named(document.get("users"), context.get("user"), "user")


def _named(entries: Any, name: Any, kind: str) -> dict[str, Any] | None:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            return dict(entry[kind])
    return None
