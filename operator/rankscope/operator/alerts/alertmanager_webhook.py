"""The endpoint that Alertmanager notifies: POST /api/v1/alerts. GET tells what became of the latest alerts.

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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankscope.common.http_server import REQUEST_SECONDS, BoundedHandler, BoundedHttpServer, is_loopback
from rankscope.common.tls import FollowedTls
from rankscope.operator.alerts.alert import MalformedError, read_notification
from rankscope.operator.alerts.decision import AlertDecisions, Outcome, Result

log = logging.getLogger(__name__)

PATH = "/api/v1/alerts"
BODY_BYTES = 1 << 20
CONCURRENT_REQUESTS = 16


class AlertReceiver:
    """Serves from when it is made until `close`; port 0 chooses a free one. Raises OSError if it cannot listen, and
    ValueError where others could read the token on its way."""

    def __init__(
        self,
        host: str,
        port: int,
        desk: AlertDecisions,
        token: bytes,
        tls: FollowedTls | None = None,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        if not token:
            raise ValueError("an alert receiver needs a token")
        check_address(host, tls is not None)
        self._server = _Server(host, port, desk, token, tls, request_seconds)
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{shown_host}:{self._server.port}{PATH}"
        self._server.serve("rankscope-alerts")

    def close(self) -> None:
        self._server.close()


def check_address(host: str, has_tls: bool) -> None:
    """Raises ValueError."""
    if not has_tls and not is_loopback(host):
        raise ValueError(
            f"--alerts-listen {host}: others can reach this address and there is no TLS, so the token would be read on "
            "its way; name a certificate (see docs/tls.md), or listen on 127.0.0.1"
        )


class _RefusedRequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BoundedHandler):
    server: _Server

    def post(self) -> None:
        self._tell(self._receive)

    def get(self) -> None:
        self._tell(lambda: (200, _told(self.server.desk.recent)))

    def _tell(self, make: Any) -> None:
        try:
            self._check_caller()
            status, document = make()
        except _RefusedRequestError as error:
            status, document = error.status, {"error": str(error)}
        except Exception:
            log.exception("an alert was lost")
            status, document = 500, {"error": "unexpected; see the log"}
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        self.answer(status, json.dumps(document).encode() + b"\n", "application/json", **headers)

    def _check_caller(self) -> None:
        if self.path.partition("?")[0] != PATH:
            raise _RefusedRequestError(404, f"only {PATH} is here")
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        # Of bytes and in constant time: how long it takes must not tell how much of a guess was right.
        is_right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.server.token)
        if scheme.lower() != "bearer" or not is_right:
            raise _RefusedRequestError(401, "the token is missing or wrong; see http_config.authorization")

    def _receive(self) -> tuple[int, dict[str, Any]]:
        try:
            alerts = read_notification(self._read_body())
        except MalformedError as error:
            log.warning("a notification was not understood: %s", error)
            raise _RefusedRequestError(400, str(error)) from error
        outcomes = self.server.desk.handle(alerts)
        failed = any(outcome.result is Result.FAILED for outcome in outcomes)
        return (503 if failed else 200), _told(outcomes)

    def _read_body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise _RefusedRequestError(411, "Content-Length is needed")
        length = int(text)
        if length > BODY_BYTES:
            raise _RefusedRequestError(413, f"a notification of {length} bytes; at most {BODY_BYTES} are read")
        try:
            body = self.read_body(length)
        except TimeoutError:
            raise _RefusedRequestError(408, "the body came too slowly") from None
        if len(body) < length:
            raise _RefusedRequestError(400, f"the body ended after {len(body)} of {length} bytes")
        return body


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


class _Server(BoundedHttpServer):
    def __init__(
        self, host: str, port: int, desk: AlertDecisions, token: bytes, tls: FollowedTls | None, request_seconds: float
    ) -> None:
        self.desk = desk
        self.token = token
        super().__init__(host, port, _Handler, tls, CONCURRENT_REQUESTS, request_seconds)


# The secret that Alertmanager shows: a file that only its owner may read.

SHORTEST_CHARACTERS = 16
LONGEST_BYTES = 4096


class TokenError(Exception):
    """A token that cannot be used: names the file, the reason and the next step."""


def read_token(path: Path) -> bytes:
    """The token in a file of ours (or of root's) that nobody else can read."""
    try:
        # Links are followed: a mounted Kubernetes secret is one.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        reason = f"token file {path}: {error.strerror}"
        raise TokenError(f"{reason}; next: (umask 077; openssl rand -hex 32 > {path})") from error
    try:
        _check_owner(path, os.fstat(descriptor))
        token = os.read(descriptor, LONGEST_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if len(token) < SHORTEST_CHARACTERS or len(token) > LONGEST_BYTES or not token.isascii() or b" " in token:
        raise TokenError(
            f"token file {path} must hold one word of {SHORTEST_CHARACTERS} to {LONGEST_BYTES} ASCII characters; "
            f"next: (umask 077; openssl rand -hex 32 > {path})"
        )
    return token


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TokenError(f"token file {path} is not a regular file; name another one")
    if status.st_uid not in (0, os.geteuid()):
        raise TokenError(f"token file {path} belongs to user {status.st_uid}; next: chown {os.geteuid()} {path}")
    # A mounted Kubernetes secret is root's, and a pod of another user reads it by its group: there is no other way.
    closed_to = 0o037 if status.st_uid == 0 and os.geteuid() != 0 and status.st_gid in _own_groups() else 0o077
    if stat.S_IMODE(status.st_mode) & closed_to:
        raise TokenError(f"token file {path} can be read or written by others; next: chmod 600 {path}")


def _own_groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def make_token(path: Path) -> bytes:
    """A new token in a new file. Raises FileExistsError: a token that somebody prepared is not ours."""
    token = secrets.token_hex(32).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(token + b"\n")
    return token
