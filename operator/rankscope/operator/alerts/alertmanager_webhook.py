"""The endpoint that Alertmanager notifies: POST /api/v1/alerts. GET returns the outcome of the latest alerts.

Alertmanager tries again after a 5xx and drops the notification after a 4xx, so:
  200  every alert has an answer, be it that nothing will be captured: trying again changes nothing
  400, 411, 413  the body is malformed, of unknown length or too large
  401  without the token
  503  a daemon could not be asked: try again; what was started is a duplicate then"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rankscope.common.http_server import JSON, HttpServer, Limits, Request, Response, Route, is_loopback
from rankscope.common.tls import FollowedTls
from rankscope.operator.alerts.alert import MalformedError, read_notification
from rankscope.operator.alerts.decision import AlertDecisions, Outcome, Result

log = logging.getLogger(__name__)

PATH = "/api/v1/alerts"
BODY_BYTES = 1 << 20
LIMITS = Limits(connections=16)


class AlertReceiver:
    """Listens from construction on, and serves from `start` to `stop`; port 0 selects a free port. Raises OSError if
    it cannot listen, and ValueError if others could read the token in transit."""

    def __init__(
        self,
        host: str,
        port: int,
        desk: AlertDecisions,
        token: bytes,
        tls: FollowedTls | None = None,
    ) -> None:
        if not token:
            raise ValueError("an alert receiver needs a token")
        check_address(host, tls is not None)
        self._desk = desk
        self._token = token
        routes = {
            ("GET", PATH): Route(self._recent, check=self._check_token),
            ("POST", PATH): Route(self._receive, BODY_BYTES, self._check_token),
        }
        self._server = HttpServer(host, port, routes, tls, LIMITS)
        self.url = f"{self._server.url}{PATH}"

    def start(self) -> None:
        self._server.serve("rankscope-alerts")

    def stop(self) -> None:
        self._server.close()

    def _check_token(self, request: Request) -> Response | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Compared as bytes in constant time: the duration must not reveal how much of a guess was right.
        is_right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self._token)
        if scheme.lower() == "bearer" and is_right:
            return None
        error = {"error": "the token is missing or wrong; see http_config.authorization"}
        return _json(401, error, {"WWW-Authenticate": "Bearer"})

    def _recent(self, request: Request) -> Response:
        return _json(200, _told(self._desk.recent))

    def _receive(self, request: Request) -> Response:
        try:
            alerts = read_notification(request.body)
        except MalformedError as error:
            log.warning("a notification was not understood: %s", error)
            return _json(400, {"error": str(error)})
        outcomes = self._desk.handle(alerts)
        failed = any(outcome.result is Result.FAILED for outcome in outcomes)
        return _json(503 if failed else 200, _told(outcomes))


def check_address(host: str, has_tls: bool) -> None:
    """Raises ValueError."""
    if not has_tls and not is_loopback(host):
        raise ValueError(
            f"--alerts-listen {host}: others can reach this address and there is no TLS, so the token would be read on "
            "its way; name a certificate (see docs/tls.md), or listen on 127.0.0.1"
        )


def _json(status: int, document: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, json.dumps(document).encode() + b"\n", JSON, headers or {})


def _told(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    return {
        "outcomes": [
            {
                "at_unix_seconds": round(outcome.at_unix_seconds, 3),
                "alert": outcome.alert,
                "job": outcome.job,
                "ranks": list(outcome.ranks),
                "result": outcome.result.value,
                "text": outcome.text,
            }
            for outcome in outcomes
        ]
    }


# The secret of Alertmanager: a file that only its owner may read.

MIN_TOKEN_CHARACTERS = 16
MAX_BYTES = 4096


class TokenError(Exception):
    """A token that cannot be used: the file, the reason and the next step."""


def read_token(path: Path) -> bytes:
    """The token in a file of this user or root that nobody else can read."""
    try:
        # Links are followed: a mounted Kubernetes secret is a link.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        reason = f"token file {path}: {error.strerror}"
        raise TokenError(f"{reason}; next: (umask 077; openssl rand -hex 32 > {path})") from error
    try:
        _check_owner(path, os.fstat(descriptor))
        token = os.read(descriptor, MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if len(token) < MIN_TOKEN_CHARACTERS or len(token) > MAX_BYTES or not token.isascii() or b" " in token:
        raise TokenError(
            f"token file {path} must hold one word of {MIN_TOKEN_CHARACTERS} to {MAX_BYTES} ASCII characters; "
            f"next: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TokenError(f"token file {path} is not a regular file; name another one")
    if status.st_uid not in (0, os.geteuid()):
        raise TokenError(f"token file {path} belongs to user {status.st_uid}; next: chown {os.geteuid()} {path}")
    # A mounted Kubernetes secret belongs to root, and a pod of another user reads it by its group.
    closed_to = 0o037 if status.st_uid == 0 and os.geteuid() != 0 and status.st_gid in _own_groups() else 0o077
    if stat.S_IMODE(status.st_mode) & closed_to:
        raise TokenError(f"token file {path} can be read or written by others; next: chmod 600 {path}")


def _own_groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def make_token(path: Path) -> bytes:
    """Write a new token to a new file. Raises FileExistsError if the file exists."""
    token = secrets.token_hex(32).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token
