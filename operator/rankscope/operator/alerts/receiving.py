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
import socket
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from rankscope.operator.alerts.deciding import AlertDesk, Outcome, Result
from rankscope.operator.alerts.reading import MalformedError, read_notification

log = logging.getLogger(__name__)

PATH = "/api/v1/alerts"
BODY_BYTES = 1 << 20
CONCURRENT_REQUESTS = 8
SILENCE_SECONDS = 5.0
REQUEST_SECONDS = 20.0


class AlertReceiver:
    """Serves from when it is made until `close`; port 0 chooses a free one. Raises OSError if it cannot listen."""

    def __init__(self, host: str, port: int, desk: AlertDesk, token: bytes) -> None:
        if not token:
            raise ValueError("an alert receiver needs a token")
        self._server = _Server((host, port), desk, token)
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{self._server.server_address[1]}{PATH}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="rankscope-alerts", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _RefusedRequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENCE_SECONDS

    def do_POST(self) -> None:
        self._answer(self._receive)

    def do_GET(self) -> None:
        self._answer(lambda: (200, _told(self.server.desk.recent)))

    def _answer(self, make: Any) -> None:
        try:
            self._check_caller()
            status, document = make()
        except _RefusedRequestError as error:
            status, document = error.status, {"error": str(error)}
        except Exception:
            log.exception("an alert was lost")
            status, document = 500, {"error": "unexpected; see the log"}
        body = json.dumps(document).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

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
        body = bytearray()
        give_up_at = time.monotonic() + REQUEST_SECONDS
        while len(body) < length:
            # One byte every few seconds would else hold a slot for ever.
            if time.monotonic() > give_up_at:
                raise _RefusedRequestError(408, "the body came too slowly")
            try:
                piece = self.rfile.read1(length - len(body))
            except TimeoutError:
                raise _RefusedRequestError(408, "the body came too slowly") from None
            if not piece:
                raise _RefusedRequestError(400, f"the body ended after {len(body)} of {length} bytes")
            body += piece
        return bytes(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the standard library gave it
        """What matters is logged with the alert; the rest is noise that anyone could make."""

    def version_string(self) -> str:
        return "rankscope"


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


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], desk: AlertDesk, token: bytes) -> None:
        self.desk = desk
        self.token = token
        self._slots = threading.BoundedSemaphore(CONCURRENT_REQUESTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the host's full name here, which can take seconds where DNS is broken.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that hangs up is its own affair."""
