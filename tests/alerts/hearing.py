"""Somebody whom Alertmanager tells: a webhook that keeps every alert it hears of."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rankscope.common.run_names import run_name


@dataclass(frozen=True)
class Heard:
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def run(self) -> str:
        return run_name(self.labels.get("run_namespace", ""), self.labels.get("run", ""))


class Hearing:
    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._heard: list[Heard] = []

    def note(self, notification: dict[str, Any]) -> None:
        with self._lock:
            for alert in notification["alerts"]:
                self._heard.append(Heard(alert["status"], alert["labels"], alert["annotations"]))

    def of(self, job: str, name: str | None = None, status: str = "firing") -> list[Heard]:
        with self._lock:
            return [
                heard
                for heard in self._heard
                if heard.run == job and heard.status == status and name in (None, heard.name)
            ]

    def __str__(self) -> str:
        with self._lock:
            return "\n".join(f"{heard.status} {heard.labels}" for heard in self._heard) or "nothing was heard"


@contextmanager
def hearing() -> Iterator[Hearing]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.note(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the standard library gave it
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    heard = Hearing(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown()
        server.server_close()
